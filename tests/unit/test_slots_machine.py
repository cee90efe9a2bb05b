"""The slot machine (I1): memory is reused only when our own engine has let go of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import FAR, FIRST, LEASE, NEAR, ONE, START_S, TWO, Bench, source

from epd.protocol import slots
from epd.protocol.ids import Attempt, LeaseId, ReadId
from epd.protocol.machine import Effect, Event, Ignored, TimerExpired
from epd.protocol.slots import (
    AbortRead,
    Free,
    FreeExtents,
    Leased,
    LeaseReturned,
    LeaseTaken,
    Limits,
    PostRead,
    Quarantined,
    ReadPosted,
    ReadTerminal,
    ReadWanted,
    TellReadEnded,
    Wanted,
)

LIMITS = Limits(read_base_s=5.0, read_min_bandwidth_bytes_per_s=1000.0)
R1, R2, R3 = ReadId(1), ReadId(2), ReadId(3)


def wanted(read: ReadId = R1, item: int = 0, attempt: Attempt = ONE) -> Wanted:
    return Wanted(read, NEAR if attempt == ONE else FAR, FIRST, attempt, item, source(item))


def ended(bench_effects: list[Effect]) -> list[str | None]:
    """The codes that were told for reads that ended."""
    told = [effect for effect in bench_effects if isinstance(effect, TellReadEnded)]
    return [None if effect.error is None else effect.error.code for effect in told]


@pytest.fixture
def slot() -> Bench:
    bench = Bench(slots, LIMITS)
    bench.feed(LeaseTaken(LEASE))
    return bench


@pytest.fixture
def reading(slot: Bench) -> Bench:
    slot.feed(ReadWanted(wanted()), ReadPosted(R1))
    return slot


def test_a_lease_is_freed_once_when_it_is_given_back(slot: Bench) -> None:
    assert slot.feed(LeaseReturned()) == [FreeExtents(LEASE)]
    assert slot.ignores(LeaseReturned(), ReadWanted(wanted()), ReadTerminal(R1, "ok"))


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ("ok", None),
        ("failed", "read_failed"),
        ("aborted", "read_failed"),
        ("refused", "source_invalid"),
        ("seal_mismatch", "seal_mismatch"),
        ("digest_mismatch", "digest_mismatch"),
    ],
)
def test_the_engine_s_last_word_is_told_once(slot: Bench, outcome: str, code: str | None) -> None:
    assert slot.feed(ReadWanted(wanted())) == [PostRead(wanted())]
    assert ended(slot.feed(ReadPosted(R1), ReadTerminal(R1, outcome))) == [code]
    assert slot.ignores(ReadTerminal(R1, outcome))
    assert slot.feed(LeaseReturned()) == [FreeExtents(LEASE)]


def test_reads_of_different_items_run_side_by_side(slot: Bench) -> None:
    effects = slot.feed(ReadWanted(wanted(R1, 0)), ReadWanted(wanted(R2, 1)))
    assert effects == [PostRead(wanted(R1, 0)), PostRead(wanted(R2, 1))]


def test_a_read_into_a_slot_with_a_running_read_waits_until_that_is_terminal(reading: Bench) -> None:
    again = wanted(R2, attempt=TWO)
    assert reading.feed(ReadWanted(again)) == [AbortRead(R1, NEAR)]
    assert reading.feed(ReadTerminal(R1, "ok")) == [PostRead(again)], "and the old one delivers nothing"
    assert ended(reading.feed(ReadPosted(R2), ReadTerminal(R2, "ok"))) == [None]


def test_the_newest_of_several_waiting_reads_is_posted(reading: Bench) -> None:
    reading.feed(ReadWanted(wanted(R2, attempt=TWO)))
    assert reading.feed(ReadWanted(wanted(R3, attempt=Attempt(3)))) == []
    assert reading.feed(ReadTerminal(R1, "failed")) == [PostRead(wanted(R3, attempt=Attempt(3)))]


def test_a_repeated_or_older_wish_does_not_stop_the_read(reading: Bench) -> None:
    assert reading.ignores(ReadWanted(wanted()))
    reading.feed(ReadWanted(wanted(R3, attempt=TWO)))
    assert reading.ignores(ReadWanted(wanted(R2)))


def test_a_late_read_is_aborted_and_told_but_its_slot_is_kept(reading: Bench) -> None:
    effects = reading.jump_to_deadline()
    assert reading.now_s == START_S + 5.0 + wanted().source.nbytes / 1000.0
    assert effects[0] == AbortRead(R1, NEAR)
    assert ended(effects) == ["read_failed"]
    assert reading.state.deadline_s is None, "aborted: from here on only the engine's word counts"
    assert reading.feed(LeaseReturned()) == []
    assert isinstance(reading.state, Quarantined)
    assert reading.feed(ReadTerminal(R1, "aborted")) == [FreeExtents(LEASE)]


def test_a_late_read_that_turns_out_well_after_all_is_not_told_again(reading: Bench) -> None:
    reading.jump_to_deadline()
    assert reading.feed(ReadTerminal(R1, "ok")) == []
    assert reading.feed(LeaseReturned()) == [FreeExtents(LEASE)]


def test_a_retry_after_a_time_out_waits_for_the_aborted_read(reading: Bench) -> None:
    reading.jump_to_deadline()
    again = wanted(R2, attempt=TWO)
    assert reading.feed(ReadWanted(again)) == [], "aborted already"
    assert reading.feed(ReadTerminal(R1, "aborted")) == [PostRead(again)]


def test_a_lease_given_back_during_a_read_is_freed_only_at_its_end(reading: Bench) -> None:
    reading.feed(ReadWanted(wanted(R2, 1)), ReadPosted(R2))
    assert reading.feed(LeaseReturned()) == []
    assert reading.feed(ReadTerminal(R1, "ok")) == []
    assert reading.feed(ReadTerminal(R2, "failed")) == [FreeExtents(LEASE)]


def test_a_quarantined_read_is_aborted_at_its_deadline_and_told_to_nobody(reading: Bench) -> None:
    reading.feed(LeaseReturned())
    assert reading.jump_to_deadline() == [AbortRead(R1, NEAR)]
    assert isinstance(reading.state, Quarantined)


def test_a_waiting_read_is_never_posted_once_the_lease_was_given_back(reading: Bench) -> None:
    reading.feed(ReadWanted(wanted(R2, attempt=TWO)), LeaseReturned())
    assert reading.feed(ReadTerminal(R1, "aborted")) == [FreeExtents(LEASE)]
    assert reading.count(PostRead) == 1


def test_the_time_of_a_read_counts_from_its_posting(slot: Bench) -> None:
    slot.feed(ReadWanted(wanted()))
    assert slot.state.deadline_s is None
    slot.advance(1000.0)
    slot.feed(ReadPosted(R1))
    assert slot.state.deadline_s == START_S + 1000.0 + 5.0 + source().nbytes / 1000.0


def test_the_deadline_is_the_earliest_of_the_running_reads(reading: Bench) -> None:
    first_s: float = reading.state.deadline_s
    reading.advance(1.0)
    reading.feed(ReadWanted(wanted(R2, 1)), ReadPosted(R2))
    assert reading.state.deadline_s == first_s
    reading.feed(ReadTerminal(R1, "ok"))
    assert reading.state.deadline_s == first_s + 1.0 + (source(1).nbytes - source(0).nbytes) / 1000.0


def test_a_leased_slot_is_not_leased_again(slot: Bench) -> None:
    assert slot.feed(LeaseTaken(LeaseId(8))) == [Ignored("LeaseTaken")]
    assert slot.state == Leased(LEASE)


# -- random sequences --------------------------------------------------------------------------

OUTCOMES = st.sampled_from(["ok", "failed", "aborted", "refused", "seal_mismatch", "digest_mismatch"])
ACTIONS = st.one_of(
    st.tuples(st.just("want"), st.integers(0, 2)),
    st.tuples(st.just("post"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 5), OUTCOMES),
    st.sampled_from([("return",), ("timer",), ("timer",), ("again",)]),
    st.builds(lambda read: ("stray", ReadTerminal(ReadId(read), "ok")), st.integers(50, 60)),
)


class Ledger:
    """Which reads our engine may still write for, by item; what was told; what was freed."""

    def __init__(self) -> None:
        self.running: dict[int, Wanted] = {}
        self.told: list[tuple[Attempt, int]] = []
        self.freed = 0

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case PostRead():
                    assert effect.wanted.item not in self.running, "two reads into one extent"
                    assert not self.freed
                    self.running[effect.wanted.item] = effect.wanted
                case FreeExtents():
                    assert self.running == {}, "freed while a read is running"
                    self.freed += 1
                case TellReadEnded():
                    self.told.append((effect.attempt, effect.item))
                case AbortRead():
                    assert effect.read in {w.read for w in self.running.values()}
                case _:
                    pass


@given(st.lists(ACTIONS, max_size=40))
def test_extents_are_freed_once_and_never_under_a_read(
    script: list[tuple[Any, ...]],
) -> None:
    bench, ledger = Bench(slots, LIMITS), Ledger()
    bench.feed(LeaseTaken(LEASE))
    asked = 0
    returned = False

    def feed(event: Event) -> None:
        ledger.note(bench.feed(event))

    for action in script:
        running = list(ledger.running.values())
        match action:
            case ("want", number):
                asked += 1
                feed(ReadWanted(wanted(ReadId(asked), number, Attempt(asked))))
            case ("post", index) if running:
                feed(ReadPosted(running[index % len(running)].read))
            case ("end", index, outcome) if running:
                read = running[index % len(running)]
                del ledger.running[read.item]
                feed(ReadTerminal(read.read, outcome))
            case ("timer",) if bench.state.deadline_s is not None:
                bench.now_s = max(bench.now_s, bench.state.deadline_s)
                feed(TimerExpired())
            case ("return",):
                returned = True
                feed(LeaseReturned())
            case ("again",) if returned:
                feed(LeaseReturned())
            case ("stray", event):
                feed(event)
    feed(LeaseReturned())
    for read in list(ledger.running.values()):
        assert ledger.freed == 0
        del ledger.running[read.item]
        feed(ReadTerminal(read.read, "aborted"))
    assert ledger.freed == 1
    assert bench.state == Free()
    assert len(ledger.told) == len(set(ledger.told)), "each read is told at most once"
