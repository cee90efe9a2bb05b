"""The source machine (I2): a staged result is whole, or its seal has changed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import FIRST, NEAR, ONE, Bench

from epd.protocol import sources
from epd.protocol.ids import LeaseId, Seal, TransferId
from epd.protocol.machine import Effect, Event, Ignored
from epd.protocol.sources import (
    EvictWanted,
    FreeExtent,
    Limits,
    PinWanted,
    ReleaseWanted,
    Reserved,
    Stable,
    Subscriber,
    TellEvicted,
    TellGone,
    TellPinned,
    Unpinned,
    Vacant,
    WriteEnded,
    WriteSeal,
    Writing,
    Written,
)

STAGED = LeaseId(5)
SEAL, NEXT = Seal(1001), Seal(1002)
A = Subscriber(NEAR, TransferId(1), FIRST, ONE, 0)
B = Subscriber(NEAR, TransferId(2), FIRST, ONE, 0)
FREED: list[Effect] = [WriteSeal(STAGED, NEXT), FreeExtent(STAGED)]


@pytest.fixture
def writing() -> Bench:
    bench = Bench(sources, Limits())
    assert bench.feed(Reserved(STAGED, SEAL, NEXT)) == [WriteSeal(STAGED, SEAL)]
    return bench


@pytest.fixture
def stable(writing: Bench) -> Bench:
    assert writing.feed(Written()) == []
    return writing


def test_a_whole_result_is_pinned_with_the_seal_that_was_written(stable: Bench) -> None:
    assert stable.feed(PinWanted(A)) == [TellPinned(STAGED, A, SEAL)]
    assert stable.feed(PinWanted(A)) == [TellPinned(STAGED, A, SEAL)], "named, not counted"
    assert stable.feed(Unpinned(A)) == []
    assert stable.feed(EvictWanted()) == [*FREED, TellEvicted(STAGED)]


def test_a_pinned_result_is_not_evicted(stable: Bench) -> None:
    stable.feed(PinWanted(A), PinWanted(B))
    for who in (A, B):
        assert stable.feed(EvictWanted()) == [Ignored("EvictWanted")]
        stable.feed(Unpinned(who))
    assert stable.feed(EvictWanted())[1] == FreeExtent(STAGED)


def test_a_released_result_is_freed_when_its_last_reader_has_gone(stable: Bench) -> None:
    stable.feed(PinWanted(A), PinWanted(B))
    assert stable.feed(ReleaseWanted(), Unpinned(A)) == []
    assert stable.feed(Unpinned(B)) == FREED


def test_nobody_new_is_let_in_once_it_was_released(stable: Bench) -> None:
    stable.feed(PinWanted(A), ReleaseWanted())
    assert stable.feed(PinWanted(B)) == [TellGone(B)]


def test_a_released_result_without_readers_is_freed_at_once(stable: Bench) -> None:
    assert stable.feed(ReleaseWanted()) == FREED


def test_a_slot_that_is_being_written_is_freed_only_by_the_worker_s_word(writing: Bench) -> None:
    assert writing.feed(ReleaseWanted()) == []
    assert writing.ignores(EvictWanted(), Unpinned(A))
    assert isinstance(writing.state, Writing)
    assert writing.feed(Written()) == FREED


def test_a_forward_without_a_result_frees_its_slot(writing: Bench) -> None:
    assert writing.feed(WriteEnded()) == FREED


def test_a_pin_that_overtakes_the_end_of_the_forward_is_answered_then(writing: Bench) -> None:
    assert writing.feed(PinWanted(A), PinWanted(B), PinWanted(A), Unpinned(B)) == []
    assert writing.feed(Written()) == [TellPinned(STAGED, A, SEAL)]
    assert writing.feed(EvictWanted()) == [Ignored("EvictWanted")]


@pytest.mark.parametrize("end", [[WriteEnded()], [ReleaseWanted(), Written()]])
def test_there_is_nothing_to_pin_after_a_forward_without_a_result(writing: Bench, end: list[Event]) -> None:
    assert writing.feed(PinWanted(A), *end) == [*FREED, TellGone(A)]
    assert writing.feed(PinWanted(A)) == [TellGone(A)]


def test_a_freed_slot_ignores_what_comes_late(stable: Bench) -> None:
    stable.feed(EvictWanted())
    assert stable.ignores(Unpinned(A), ReleaseWanted(), EvictWanted(), Written(), WriteEnded())


def test_a_stable_result_is_not_freed_by_a_repeat_of_its_forward_s_end(stable: Bench) -> None:
    assert stable.ignores(Written(), WriteEnded())


EVENTS = st.one_of(
    st.builds(PinWanted, st.sampled_from([A, B])),
    st.builds(Unpinned, st.sampled_from([A, B])),
    st.sampled_from([Written(), WriteEnded(), EvictWanted(), ReleaseWanted()]),
)


@given(st.lists(EVENTS, max_size=30))
def test_the_seal_changes_before_every_free_and_nothing_is_freed_while_written_or_pinned(
    script: list[Event],
) -> None:
    bench = Bench(sources, Limits())
    bench.feed(Reserved(STAGED, SEAL, NEXT))
    writing, pins, freed, seal = True, set[Subscriber](), 0, SEAL
    for event in [*script, WriteEnded(), Unpinned(A), Unpinned(B), ReleaseWanted()]:
        effects = bench.feed(event)
        writing = writing and not isinstance(event, Written | WriteEnded)
        if isinstance(event, Unpinned):
            pins.discard(event.subscriber)
        for effect in effects:
            match effect:
                case TellPinned():
                    assert not writing and not freed
                    assert effect.seal == seal == SEAL
                    pins.add(effect.subscriber)
                case WriteSeal():
                    assert not writing and not pins
                    seal = effect.seal
                case FreeExtent():
                    assert seal == NEXT, "the seal first"
                    assert not writing and not pins
                    freed += 1
                case _:
                    pass
        if isinstance(bench.state, Stable):
            assert set(bench.state.pins) == pins
    assert freed == 1
    assert bench.state == Vacant()
