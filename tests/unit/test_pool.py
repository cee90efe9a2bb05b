"""The pool: all or none, over equal regions, and honest about what can never fit."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import KIB, Memory, make_pool

from epd.memory.pool import Extent, Pool
from epd.protocol.ids import RegionId


def assert_empty(pool: Pool) -> None:
    assert pool.counts() == {
        "extents": 0,
        "used_nbytes": 0,
        "free_nbytes": pool.total_nbytes,
        "largest_free_nbytes": pool.region_nbytes,
        "total_nbytes": pool.total_nbytes,
    }


def test_extents_come_in_the_order_of_the_sizes() -> None:
    pool = make_pool()
    extents = pool.take([100, 16 * KIB, 3000])
    assert extents is not None
    assert [extent.nbytes for extent in extents] == [100, 16 * KIB, 3000]
    assert pool.counts()["used_nbytes"] == 256 + 16 * KIB + 3072
    pool.give(extents)
    assert_empty(pool)


def test_one_item_without_room_takes_nothing_for_the_others() -> None:
    pool = make_pool(count=2)
    held = pool.take([10 * KIB, 10 * KIB])
    assert held is not None
    before = pool.counts()
    assert pool.take([1 * KIB, 7 * KIB]) is None
    assert pool.counts() == before
    assert pool.take([6 * KIB, 6 * KIB]) is not None


def test_an_item_larger_than_a_region_never_fits() -> None:
    pool = make_pool()
    assert pool.fits_empty([16 * KIB])
    assert not pool.fits_empty([16 * KIB + 1])
    assert pool.take([16 * KIB + 1]) is None


def test_a_set_that_leaves_too_much_of_each_region_never_fits() -> None:
    pool = make_pool()
    assert pool.fits_empty([9 * KIB] * 4)
    assert not pool.fits_empty([9 * KIB] * 5)
    assert pool.fits_empty([9 * KIB, 7 * KIB] * 4)
    assert not pool.fits_empty([9 * KIB, 7 * KIB] * 4 + [1])


def test_alignment_counts_in_what_fits() -> None:
    assert make_pool(count=1, region_nbytes=1024).fits_empty([1] * 4)
    assert not make_pool(count=1, region_nbytes=1024).fits_empty([1] * 5)


def test_no_items_take_nothing() -> None:
    pool = make_pool()
    assert pool.fits_empty([])
    assert pool.take([]) == ()
    assert_empty(pool)


def test_zero_bytes_take_nothing_and_have_an_empty_view() -> None:
    pool = make_pool(count=1)
    full = pool.take([16 * KIB])
    assert full is not None
    empty = pool.take([0, 0])
    assert empty is not None
    assert [len(pool.view(extent)) for extent in empty] == [0, 0]
    pool.give(empty)
    pool.give(full)
    assert_empty(pool)


def test_an_extent_names_its_bytes() -> None:
    pool = make_pool(count=2)
    extents = pool.take([16 * KIB, 1000])
    assert extents is not None
    first, second = extents
    assert (first, second) == (Extent(RegionId(0), 0, 16 * KIB), Extent(RegionId(1), 0, 1000))
    assert pool.address(second) == 2 << 32
    pool.view(second)[:] = b"x" * 1000
    assert bytes(pool.view(Extent(RegionId(1), 998, 4))) == b"xx\0\0"


def test_giving_twice_is_our_bug() -> None:
    pool = make_pool()
    extents = pool.take([1000])
    assert extents is not None
    pool.give(extents)
    with pytest.raises(AssertionError, match="nothing is leased"):
        pool.give(extents)


def test_regions_must_be_equal_and_numbered() -> None:
    with pytest.raises(AssertionError, match="different sizes"):
        Pool([Memory(0, 512), Memory(1, 1024)])
    with pytest.raises(AssertionError):
        Pool([Memory(1, 512), Memory(0, 512)])


@given(st.integers(1, 4), st.lists(st.integers(0, 20 * KIB), max_size=12))
def test_fits_empty_says_what_take_does_on_an_empty_pool(count: int, sizes: list[int]) -> None:
    pool = make_pool(count, 16 * KIB)
    extents = pool.take(sizes)
    assert pool.fits_empty(sizes) == (extents is not None)
    pool.give(extents or ())
    assert_empty(pool)


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 12 * KIB), max_size=5), max_size=25), st.data())
def test_extents_never_overlap_and_everything_comes_back(
    requests: list[list[int]], data: st.DataObject
) -> None:
    pool = make_pool(count=2)
    held: list[tuple[Extent, ...]] = []
    for sizes in requests:
        before = pool.counts()
        extents = pool.take(sizes)
        if extents is None:
            assert pool.counts() == before
        else:
            held.append(extents)
        if data.draw(st.booleans()) and held:
            pool.give(held.pop(data.draw(st.integers(0, len(held) - 1))))
        spans = sorted(
            (extent.region, extent.offset, extent.offset + extent.nbytes)
            for taken in held
            for extent in taken
            if extent.nbytes
        )
        for (region, _, end), (next_region, begin, _) in pairwise(spans):
            assert region != next_region or end <= begin
        assert all(end <= pool.region_nbytes for _, _, end in spans)
    for extents in held:
        pool.give(extents)
    assert_empty(pool)
