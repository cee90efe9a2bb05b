"""The encoder side's request machine: the join of job and grant, and every way an attempt ends."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import LEASE, ONE, START_S, TWO, Bench, failure, items, ready, source, specs

from epd.protocol import encoder
from epd.protocol.encoder import (
    AttemptEnded,
    CancelReceived,
    DrainWanted,
    GrantReceived,
    Idle,
    JobEvicted,
    JobFailed,
    JobReady,
    Limits,
    Open,
    PinSource,
    ReceiptReceived,
    RequestReceived,
    SendFailed,
    SendForwardDone,
    SendMetadata,
    SessionEnded,
    SourceGone,
    SourcePinned,
    Subscribe,
    TellGranted,
    UnpinSource,
    Unsubscribe,
)
from epd.protocol.ids import Attempt, LeaseId
from epd.protocol.machine import Effect, Event, Ignored, TimerExpired
from epd.protocol.messages import ErrorValue
from epd.protocol.wire import MAX_ITEMS_PER_PART

DEADLINE_S = START_S + 60.0
STAGED = LeaseId(100)


def requested(count: int = 1, attempt: Attempt = ONE, refusal: ErrorValue | None = None) -> RequestReceived:
    return RequestReceived(attempt, items(count), specs(range(count)), DEADLINE_S, refusal)


def granted(attempt: Attempt = ONE) -> GrantReceived:
    return GrantReceived(attempt, LEASE)


def job_ready(number: int = 0, staged: LeaseId = STAGED, attempt: Attempt = ONE) -> JobReady:
    return JobReady(attempt, number, staged)


def pinned(number: int = 0, staged: LeaseId = STAGED, attempt: Attempt = ONE) -> SourcePinned:
    return SourcePinned(attempt, number, staged, source(number))


def receipt(first: int = 0, count: int = 1, attempt: Attempt = ONE, grant: LeaseId = LEASE) -> Event:
    return ReceiptReceived(attempt, grant, first, count)


def announcement(number: int = 0, *, last: bool = True) -> SendForwardDone:
    return SendForwardDone(ONE, LEASE, number, (ready(number),), last)


@pytest.fixture
def part() -> Bench:
    return Bench(encoder, Limits())


HOW: dict[str, list[Event]] = {
    "requested": [requested()],
    "ready": [requested(), job_ready()],
    "granted": [requested(), granted()],
    "pinning": [requested(), granted(), job_ready()],
    "announced": [requested(), granted(), job_ready(), pinned()],
}


def at(state: str) -> Bench:
    bench = Bench(encoder, Limits())
    bench.feed(*HOW[state])
    return bench


def test_an_attempt_passes_all_states_in_order(part: Bench) -> None:
    names = []
    for event in (requested(), granted(), job_ready(), pinned(), receipt()):
        part.feed(event)
        names.append(encoder.state_name(part.state))
    assert names == ["metadata", "buffer-registered", "buffer-registered", "forward-done", "freed"]
    assert part.effects == [
        SendMetadata(ONE, specs([0])),
        Subscribe(ONE, 0, items(1)[0], specs([0])[0]),
        TellGranted(ONE, 0),
        PinSource(ONE, 0, STAGED),
        announcement(),
        UnpinSource(ONE, 0, STAGED),
        Unsubscribe(ONE, 0),
        AttemptEnded(ONE, "received"),
    ]


@pytest.mark.parametrize("order", list(permutations([job_ready(), granted()])))
def test_the_source_is_pinned_and_announced_once_whichever_half_comes_first(
    part: Bench, order: tuple[Event, ...]
) -> None:
    part.feed(requested(), order[0])
    assert part.count(PinSource) == 0
    part.feed(order[1])
    assert part.all(PinSource) == [PinSource(ONE, 0, STAGED)]
    assert part.count(SendForwardDone) == 0, "announced only once it is pinned"
    assert part.feed(pinned()) == [announcement()]
    assert part.ignores(job_ready(), granted(), pinned())


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_items_are_announced_as_they_become_ready_and_exactly_one_is_the_last(
    part: Bench, order: tuple[int, ...]
) -> None:
    part.feed(requested(3), granted())
    told = [
        part.feed(job_ready(number, LeaseId(number)), pinned(number, LeaseId(number)))[-1] for number in order
    ]
    assert told == [announcement(number, last=number == order[-1]) for number in order]


def test_the_last_announcement_is_the_last_even_if_others_were_received_before(part: Bench) -> None:
    part.feed(requested(2), granted(), job_ready(0), pinned(0), receipt(0))
    assert part.feed(job_ready(1), pinned(1))[-1] == announcement(1, last=True)
    assert part.feed(receipt(1))[-1] == AttemptEnded(ONE, "received")


def test_a_receipt_unpins_each_item_of_its_range_once(part: Bench) -> None:
    part.feed(requested(3), granted())
    for number in range(3):
        part.feed(job_ready(number, LeaseId(number)), pinned(number, LeaseId(number)))
    part.feed(receipt(1, 1))
    effects = part.feed(receipt(-5, 10**12))
    assert [e.item for e in effects if isinstance(e, UnpinSource)] == [0, 2]
    assert part.state == Idle()


def test_a_receipt_of_another_grant_or_before_the_announcement_unpins_nothing() -> None:
    assert at("announced").ignores(receipt(grant=LeaseId(8)))
    for state in ("granted", "pinning"):
        bench = at(state)
        assert bench.feed(receipt()) == []
        assert isinstance(bench.state, Open)


ENDS: list[tuple[Event, str, bool]] = [
    (CancelReceived(ONE), "cancelled", False),
    (SessionEnded(), "session_lost", False),
    (TimerExpired(), "deadline", True),
]


@pytest.mark.parametrize("state", list(HOW))
@pytest.mark.parametrize(("event", "outcome", "told"), ENDS, ids=[end[1] for end in ENDS])
def test_an_end_leaves_the_job_and_the_pin_in_every_state(
    state: str, event: Event, outcome: str, told: bool
) -> None:
    bench = at(state)
    bench.now_s = DEADLINE_S
    effects = bench.feed(event)
    unpin = [UnpinSource(ONE, 0, STAGED)] if state == "announced" else []
    assert effects[1 if told else 0 :] == [*unpin, Unsubscribe(ONE, 0), AttemptEnded(ONE, outcome)]
    assert isinstance(effects[0], SendFailed) == told
    assert bench.state == Idle()
    if state == "pinning":
        assert bench.feed(pinned()) == [UnpinSource(ONE, 0, STAGED)], "the pin came too late"


def test_a_failed_job_ends_the_attempt_and_names_the_item(part: Bench) -> None:
    part.feed(requested(2), granted(), job_ready(0), pinned(0))
    effects = part.feed(JobFailed(ONE, 1, failure("media_invalid", retryable=False)))
    error = ErrorValue("media_invalid", False, "on purpose", 1)
    assert effects == [
        SendFailed(ONE, error),
        UnpinSource(ONE, 0, STAGED),
        Unsubscribe(ONE, 0),
        Unsubscribe(ONE, 1),
        AttemptEnded(ONE, "media_invalid"),
    ]


def test_a_part_that_cannot_be_served_is_refused_and_nothing_is_held(part: Bench) -> None:
    error = failure("unsupported_item", retryable=False, item=0)
    effects = part.feed(requested(refusal=error))
    assert effects == [SendFailed(ONE, error), AttemptEnded(ONE, "unsupported_item")]
    assert part.state == Idle()


@pytest.mark.parametrize("count", [0, MAX_ITEMS_PER_PART + 1])
def test_a_part_without_items_or_with_too_many_is_refused(part: Bench, count: int) -> None:
    effects = part.feed(requested(count))
    assert isinstance(effects[0], SendFailed)
    assert effects[0].error.code == "request_too_large"
    assert part.count(SendMetadata) == 0
    assert part.state == Idle()


def test_a_part_of_the_most_items_is_served(part: Bench) -> None:
    assert len(part.feed(requested(MAX_ITEMS_PER_PART))) == 1 + MAX_ITEMS_PER_PART


def test_a_newer_attempt_ends_the_older_and_an_older_one_is_ignored() -> None:
    bench = at("announced")
    effects = bench.feed(requested(attempt=TWO))
    assert effects[:3] == [
        UnpinSource(ONE, 0, STAGED),
        Unsubscribe(ONE, 0),
        AttemptEnded(ONE, "superseded"),
    ]
    assert effects[3] == SendMetadata(TWO, specs([0]))
    assert bench.ignores(requested(), requested(attempt=TWO))


@pytest.mark.parametrize("state", list(HOW))
def test_what_concerns_another_attempt_is_ignored(state: str) -> None:
    bench = at(state)
    assert bench.ignores(
        granted(TWO),
        job_ready(attempt=TWO),
        JobEvicted(TWO, 0),
        JobFailed(TWO, 0, failure()),
        SourceGone(TWO, 0),
        receipt(attempt=TWO),
        CancelReceived(TWO),
    )
    assert bench.feed(pinned(attempt=TWO)) == [UnpinSource(TWO, 0, STAGED)], "a pin is never kept"


def test_what_concerns_no_open_attempt_is_ignored(part: Bench) -> None:
    assert part.ignores(
        granted(), receipt(), CancelReceived(ONE), SessionEnded(), DrainWanted(), job_ready(), TimerExpired()
    )


@pytest.mark.parametrize("state", list(HOW))
def test_draining_hands_back_only_what_has_no_grant(state: str) -> None:
    bench = at(state)
    effects = bench.feed(DrainWanted())
    if state in ("requested", "ready"):
        assert isinstance(effects[0], SendFailed)
        assert (effects[0].error.code, effects[0].error.retryable) == ("draining", True)
        assert bench.state == Idle()
    else:
        assert effects == [Ignored("DrainWanted")]


# -- eviction races ----------------------------------------------------------------------------


def test_a_result_evicted_before_the_grant_is_waited_for_again() -> None:
    bench = at("ready")
    bench.feed(JobEvicted(ONE, 0))
    assert bench.feed(granted()) == [TellGranted(ONE, 0)]
    again = LeaseId(101)
    assert bench.feed(job_ready(staged=again)) == [PinSource(ONE, 0, again)]


@pytest.mark.parametrize("order", [["evicted", "gone"], ["gone", "evicted"]])
def test_a_result_evicted_under_a_pin_on_its_way_is_waited_for_again(order: list[str]) -> None:
    bench = at("pinning")
    news: dict[str, Event] = {"evicted": JobEvicted(ONE, 0), "gone": SourceGone(ONE, 0)}
    bench.feed(*(news[name] for name in order))
    again = LeaseId(101)
    assert bench.feed(job_ready(staged=again)) == [PinSource(ONE, 0, again)]
    assert bench.feed(pinned(staged=again)) == [announcement()]


def test_a_renewed_result_that_overtakes_the_answer_to_the_pin_is_not_lost() -> None:
    bench = at("pinning")
    again = LeaseId(101)
    assert bench.feed(JobEvicted(ONE, 0), job_ready(staged=again)) == [Ignored("JobEvicted")]
    assert bench.feed(SourceGone(ONE, 0)) == [PinSource(ONE, 0, again)]
    assert bench.feed(pinned(staged=again)) == [announcement()]


def test_a_second_eviction_under_the_same_pin_is_waited_for_again() -> None:
    bench = at("pinning")
    second, third = LeaseId(101), LeaseId(102)
    bench.feed(JobEvicted(ONE, 0), job_ready(staged=second), JobEvicted(ONE, 0))
    assert bench.feed(SourceGone(ONE, 0)) == [PinSource(ONE, 0, second)]
    assert bench.feed(job_ready(staged=third), SourceGone(ONE, 0)) == [PinSource(ONE, 0, third)]
    assert bench.feed(pinned(staged=third)) == [announcement()]


def test_a_rerun_that_failed_before_the_answer_to_the_pin_ends_the_attempt() -> None:
    bench = at("pinning")
    bench.feed(JobEvicted(ONE, 0), JobFailed(ONE, 0, failure()))
    assert bench.count(SendFailed) == 1
    assert bench.state == Idle()


# -- random sequences --------------------------------------------------------------------------

ATTEMPTS = st.integers(1, 3).map(Attempt)
NUMBERS = st.integers(-1, 3)
STAGES = st.integers(1, 4).map(LeaseId)
EVENTS = st.one_of(
    st.builds(requested, st.integers(0, 3), ATTEMPTS, st.none() | st.just(failure())),
    st.builds(granted, ATTEMPTS),
    st.builds(job_ready, NUMBERS, STAGES, ATTEMPTS),
    st.builds(JobEvicted, ATTEMPTS, NUMBERS),
    st.builds(JobFailed, ATTEMPTS, NUMBERS, st.just(failure())),
    st.builds(SourceGone, ATTEMPTS, NUMBERS),
    st.builds(receipt, NUMBERS, NUMBERS, ATTEMPTS, st.sampled_from([LEASE, LeaseId(8)])),
    st.builds(CancelReceived, ATTEMPTS),
    st.sampled_from([SessionEnded(), DrainWanted()]),
    st.just("pin"),
    st.just("pin"),
    st.just("timer"),
)
Pin = tuple[Attempt, int, LeaseId]


class Ledger:
    def __init__(self) -> None:
        self.subscribed: set[tuple[Attempt, int]] = set()
        self.asked: list[Pin] = []
        self.pins: set[Pin] = set()
        self.open: Attempt | None = None
        self.last_told = False

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendMetadata():
                    assert self.open is None
                    self.open, self.last_told = effect.attempt, False
                case Subscribe():
                    assert (effect.attempt, effect.item) not in self.subscribed
                    self.subscribed.add((effect.attempt, effect.item))
                case Unsubscribe():
                    self.subscribed.remove((effect.attempt, effect.item))
                case PinSource():
                    assert (effect.attempt, effect.item) not in {pin[:2] for pin in self.asked}
                    self.asked.append((effect.attempt, effect.item, effect.staged))
                case UnpinSource():
                    self.pins.remove((effect.attempt, effect.item, effect.staged))
                case SendForwardDone():
                    assert effect.first in {pin[1] for pin in self.pins if pin[0] == effect.attempt}
                    assert not self.last_told, "nothing is announced after the last"
                    self.last_told = effect.last
                case AttemptEnded():
                    assert self.open in (effect.attempt, None)
                    self.open = None
                case _:
                    pass


@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_no_pin_and_no_wish_outlives_the_attempt(script: list[Event | str]) -> None:
    bench, ledger = Bench(encoder, Limits()), Ledger()
    for entry in [*script, "pin", "pin", "pin", "pin", SessionEnded(), *["pin"] * 40]:
        if isinstance(entry, Event):
            ledger.note(bench.feed(entry))
        elif entry == "timer":
            if bench.state.deadline_s is not None:
                bench.now_s = bench.state.deadline_s
                ledger.note(bench.feed(TimerExpired()))
                bench.now_s = START_S
        elif ledger.asked:
            attempt, number, staged = ledger.asked.pop(0)
            ledger.pins.add((attempt, number, staged))
            ledger.note(bench.feed(pinned(number, staged, attempt)))
    assert bench.state == Idle()
    assert ledger.subscribed == set()
    assert ledger.pins == set()
