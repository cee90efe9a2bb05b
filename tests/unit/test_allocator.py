"""The allocator against a byte map: leases never overlap, nothing is lost, what is offered is granted."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from epd.memory.allocator import ALIGNMENT_NBYTES, Allocator

UNIT = ALIGNMENT_NBYTES
Lease = tuple[int, int]


def units_of(nbytes: int) -> int:
    return -(-nbytes // UNIT)


def free_runs(taken: list[bool]) -> Iterator[int]:
    """Lengths of the free runs of a map of units."""
    run = 0
    for used in [*taken, True]:
        if used and run:
            yield run
        run = 0 if used else run + 1


class AllocatorMachine(RuleBasedStateMachine):
    """The model is a map of units: which are taken."""

    leases: Bundle[Lease] = Bundle("leases")

    @initialize(nbytes=st.one_of(st.integers(0, 64 * UNIT), st.integers(0, 3000 * UNIT)))
    def start(self, nbytes: int) -> None:
        self.allocator = Allocator(nbytes)
        self.taken = [False] * (nbytes // UNIT)
        self.live = 0

    def _lease(self, nbytes: int) -> Lease | None:
        offset = self.allocator.lease(nbytes)
        if offset is None:
            # Good fit: refused only if every free block is smaller than the lease and 1/32 of it.
            units = units_of(nbytes)
            assert max(free_runs(self.taken), default=0) < units + max(1, units // 32)
            return None
        assert offset % UNIT == 0
        if nbytes:
            first, count = offset // UNIT, units_of(nbytes)
            assert offset + nbytes <= len(self.taken) * UNIT
            assert not any(self.taken[first : first + count])
            self.taken[first : first + count] = [True] * count
            self.live += 1
        return offset, nbytes

    @rule(
        target=leases,
        nbytes=st.one_of(st.integers(0, 8 * UNIT), st.integers(0, 100 * UNIT), st.integers(0, 3000 * UNIT)),
    )
    def lease(self, nbytes: int) -> Lease:
        lease = self._lease(nbytes)
        return lease if lease is not None else (len(self.taken) * UNIT, 0)

    @rule(target=leases)
    def lease_the_largest(self) -> Lease:
        nbytes = self.allocator.largest_free_nbytes
        lease = self._lease(nbytes)
        assert lease is not None
        return lease

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        offset, nbytes = lease
        self.allocator.release(offset)
        if nbytes:
            first, count = offset // UNIT, units_of(nbytes)
            self.taken[first : first + count] = [False] * count
            self.live -= 1

    @invariant()
    def counts_agree(self) -> None:
        assert self.allocator.free_nbytes == self.taken.count(False) * UNIT
        assert self.allocator.live == self.live

    @invariant()
    def the_largest_is_within_a_step_of_the_largest_run(self) -> None:
        largest = max(free_runs(self.taken), default=0)
        offered = self.allocator.largest_free_nbytes // UNIT
        assert offered <= largest < offered + max(1, offered // 32 + 1)


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_leases_agree_with_a_byte_map = pytest.mark.slow(AllocatorMachine.TestCase)


@given(st.lists(st.integers(1, 40 * UNIT), max_size=40), st.randoms(use_true_random=False))
def test_releasing_everything_in_any_order_gives_one_block_back(sizes: list[int], random: object) -> None:
    nbytes = 1000 * UNIT + 17
    allocator = Allocator(nbytes)
    offsets = [offset for size in sizes if (offset := allocator.lease(size)) is not None]
    random.shuffle(offsets)  # type: ignore[attr-defined]  # hypothesis' Random has no public type
    for offset in offsets:
        allocator.release(offset)
    assert allocator.largest_free_nbytes == 1000 * UNIT
    assert allocator.lease(1000 * UNIT) == 0


@pytest.mark.parametrize(
    "units", [1, 31, 32, 33, 63, 64, 65, 1000, 2**18 - 1, 2**18, 2**18 + 1, 2**30 + 12345]
)
def test_an_empty_region_of_any_size_can_be_leased_whole(units: int) -> None:
    allocator = Allocator(units * UNIT)
    assert allocator.lease(units * UNIT + 1) is None
    assert allocator.lease(units * UNIT) == 0
    assert allocator.largest_free_nbytes == 0
    assert allocator.lease(1) is None


def test_zero_bytes_take_nothing_even_in_a_full_region() -> None:
    allocator = Allocator(4 * UNIT)
    assert allocator.lease(0) == 4 * UNIT
    assert allocator.lease(4 * UNIT) == 0
    assert allocator.lease(0) == 4 * UNIT
    allocator.release(4 * UNIT)
    assert (allocator.live, allocator.free_nbytes) == (1, 0)


def test_a_double_release_is_our_bug() -> None:
    allocator = Allocator(4 * UNIT)
    offset = allocator.lease(UNIT)
    assert offset is not None
    allocator.release(offset)
    with pytest.raises(AssertionError, match="nothing is leased at 0"):
        allocator.release(offset)


@pytest.mark.parametrize("offset", [1, UNIT, -UNIT])
def test_releasing_what_was_never_leased_is_our_bug(offset: int) -> None:
    allocator = Allocator(4 * UNIT)
    assert allocator.lease(2 * UNIT) == 0
    with pytest.raises(AssertionError, match="nothing is leased"):
        allocator.release(offset)


def test_a_good_fit_leaves_the_large_block_alone() -> None:
    allocator = Allocator(100 * UNIT)
    held = [allocator.lease(10 * UNIT) for _ in range(3)]
    assert held[1] is not None
    allocator.release(held[1])
    assert allocator.lease(9 * UNIT) == held[1]
    assert allocator.largest_free_nbytes == 70 * UNIT
