"""The prefill side's request machine: every state of it, every way out, and random event sequences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import (
    FAR,
    FIRST,
    LEASE,
    NEAR,
    ONE,
    SECOND,
    START_S,
    TWO,
    Bench,
    failure,
    item,
    items,
    ready,
    spec,
    specs,
)

from epd.protocol import prefill
from epd.protocol.ids import Attempt, LeaseId, Part, SessionId
from epd.protocol.machine import Effect, Event, Ignored, TimerExpired
from epd.protocol.messages import ErrorValue
from epd.protocol.prefill_types import (
    AskRoom,
    AttemptFailed,
    AwaitingRoom,
    CancelWanted,
    ChooseEncoder,
    Consumed,
    Deliver,
    Delivered,
    EncoderAvailable,
    EncoderChosen,
    Ended,
    FailRequest,
    Filling,
    Granted,
    Limits,
    MetadataReceived,
    Negotiating,
    PartPlan,
    Placing,
    ReadEnded,
    Released,
    Requested,
    ReturnLease,
    RoomLeased,
    RoomRefused,
    SendCancel,
    SendEncodeRequest,
    SendGrant,
    SendReceipt,
    SessionEnded,
    SourcesReady,
    StartRead,
    Submitted,
    Taken,
    WarnUnconsumed,
    WithdrawRoom,
)

LIMITS = Limits()
DEADLINE_S = START_S + 60.0


def submitted(count: int = 1, plans: tuple[PartPlan, ...] | None = None) -> Submitted:
    whole = (PartPlan(tuple(range(count)), NEAR),)
    return Submitted(items(count), "float32", DEADLINE_S, plans or whole)


def sized(
    count: int = 1, attempt: Attempt = ONE, session: SessionId = NEAR, part: Part = FIRST
) -> MetadataReceived:
    return MetadataReceived(session, part, attempt, specs(range(count)))


def ready_item(
    number: int = 0,
    *,
    attempt: Attempt = ONE,
    session: SessionId = NEAR,
    first: int | None = None,
    last: bool = False,
) -> SourcesReady:
    at = number if first is None else first
    return SourcesReady(session, FIRST, attempt, LEASE, at, (ready(number),), last=last)


def read(number: int = 0, attempt: Attempt = ONE, error: ErrorValue | None = None) -> ReadEnded:
    return ReadEnded(FIRST, attempt, number, error)


def failed(
    error: ErrorValue | None = None, attempt: Attempt = ONE, session: SessionId = NEAR
) -> AttemptFailed:
    return AttemptFailed(session, FIRST, attempt, error or failure())


@pytest.fixture
def request_() -> Bench:
    return Bench(prefill, LIMITS)


def at(state: str, count: int = 1) -> Bench:
    """A request in the named state, of one part with `count` items."""
    bench = Bench(prefill, LIMITS)
    steps: list[tuple[str, Event]] = [
        ("requested", submitted(count)),
        ("metadata", sized(count)),
        ("buffer-registered", RoomLeased(LEASE)),
        ("forward-done", ready_item(0, last=count == 1)),
    ]
    for name, event in steps:
        bench.feed(event)
        if name == state:
            return bench
    for number in range(1, count):
        bench.feed(ready_item(number, last=number == count - 1))
    for number in range(count):
        bench.feed(read(number))
    if state == "consumed":
        bench.feed(Taken())
    return bench


LIVE_STATES = ("requested", "metadata", "buffer-registered", "forward-done")


# -- the way through ---------------------------------------------------------------------------


def test_a_request_passes_all_states_in_order(request_: Bench) -> None:
    names = [prefill.state_name(request_.state)]
    for event in (
        submitted(),
        sized(),
        RoomLeased(LEASE),
        ready_item(),
        read(),
        Taken(),
        Released(),
    ):
        request_.feed(event)
        names.append(prefill.state_name(request_.state))
    assert names == [
        "new",
        "requested",
        "metadata",
        "buffer-registered",
        "forward-done",
        "rdma-written",
        "consumed",
        "freed",
    ]
    assert request_.effects == [
        SendEncodeRequest(NEAR, FIRST, ONE, items(1), "float32", DEADLINE_S, None),
        AskRoom((specs([0])[0].nbytes,)),
        SendGrant(NEAR, FIRST, ONE, LEASE),
        StartRead(NEAR, FIRST, ONE, LEASE, 0, ready(0).source, None),
        SendReceipt(NEAR, FIRST, ONE, LEASE, 0, 1, True),
        Deliver(LEASE, specs([0])),
        ReturnLease(LEASE),
    ]


def test_each_item_is_read_and_receipted_as_soon_as_it_is_ready() -> None:
    bench = at("buffer-registered", count=3)
    assert bench.feed(ready_item(2), read(2)) == [
        StartRead(NEAR, FIRST, ONE, LEASE, 2, ready(2).source, None),
        SendReceipt(NEAR, FIRST, ONE, LEASE, 2, 1, False),
    ]
    bench.feed(ready_item(0), ready_item(1, last=True), read(1))
    assert bench.feed(read(0))[0] == SendReceipt(NEAR, FIRST, ONE, LEASE, 0, 1, True)
    assert bench.count(Deliver) == 1


def test_room_is_asked_for_once_when_the_sizes_of_all_parts_are_known(request_: Bench) -> None:
    plans = (PartPlan((0, 2), NEAR), PartPlan((1,), FAR))
    request_.feed(submitted(3, plans))
    request_.feed(MetadataReceived(NEAR, FIRST, ONE, specs([0, 2])))
    assert request_.count(AskRoom) == 0
    request_.feed(MetadataReceived(FAR, SECOND, ONE, specs([1])))
    assert request_.all(AskRoom) == [AskRoom(tuple(s.nbytes for s in specs(range(3))))]
    assert request_.feed(RoomLeased(LEASE)) == [
        SendGrant(NEAR, FIRST, ONE, LEASE),
        SendGrant(FAR, SECOND, ONE, LEASE),
    ]


def test_items_are_numbered_as_in_their_part_s_request_on_the_wire(request_: Bench) -> None:
    request_.feed(submitted(3, (PartPlan((0, 2), NEAR), PartPlan((1,), FAR))))
    request_.feed(MetadataReceived(NEAR, FIRST, ONE, specs([0, 2])))
    request_.feed(MetadataReceived(FAR, SECOND, ONE, specs([1])), RoomLeased(LEASE))
    effects = request_.feed(
        SourcesReady(NEAR, FIRST, ONE, LEASE, 1, (ready(2),), last=False), ReadEnded(FIRST, ONE, 2, None)
    )
    assert effects == [
        StartRead(NEAR, FIRST, ONE, LEASE, 2, ready(2).source, None),
        SendReceipt(NEAR, FIRST, ONE, LEASE, 1, 1, False),
    ]


def test_a_request_without_an_encoder_waits_for_one_and_says_so_at_its_deadline(request_: Bench) -> None:
    request_.feed(submitted(1, (PartPlan((0,), None),)), EncoderChosen(FIRST, None))
    assert request_.feed(EncoderAvailable()) == [ChooseEncoder(FIRST, items(1), ())]
    request_.jump_to_deadline()
    assert [effect.error.code for effect in request_.all(FailRequest)] == ["no_encoder"]


def test_an_encoder_that_comes_later_gets_the_request(request_: Bench) -> None:
    request_.feed(submitted(1, (PartPlan((0,), None),)), EncoderChosen(FIRST, None), EncoderAvailable())
    assert request_.feed(EncoderChosen(FIRST, FAR)) == [
        SendEncodeRequest(FAR, FIRST, ONE, items(1), "float32", DEADLINE_S, None)
    ]


# -- retries -----------------------------------------------------------------------------------


def test_a_retry_goes_elsewhere_and_asks_only_for_what_was_not_read() -> None:
    bench = at("buffer-registered", count=3)
    bench.feed(ready_item(1), read(1))
    assert bench.feed(failed()) == [ChooseEncoder(FIRST, (item(0), item(2)), (NEAR,))]
    assert bench.feed(EncoderChosen(FIRST, FAR)) == [
        SendEncodeRequest(FAR, FIRST, TWO, (item(0), item(2)), "float32", DEADLINE_S, None)
    ]
    grant = bench.feed(MetadataReceived(FAR, FIRST, TWO, specs([0, 2])))
    assert grant == [SendGrant(FAR, FIRST, TWO, LEASE)], "the lease outlives its attempts"
    last = SourcesReady(FAR, FIRST, TWO, LEASE, 0, (ready(0), ready(2)), last=True)
    assert [e.item for e in bench.feed(last) if isinstance(e, StartRead)] == [0, 2]
    bench.feed(read(0, TWO), read(2, TWO))
    assert bench.all(Deliver) == [Deliver(LEASE, specs(range(3)))]
    assert bench.count(AskRoom) == 1


def test_a_last_announcement_that_leaves_items_out_ends_the_attempt_at_once() -> None:
    bench = at("buffer-registered", count=4)
    bench.feed(ready_item(3), ready_item(1), read(1))
    cancel, choose = bench.feed(ready_item(0, last=True))
    assert cancel == SendCancel(NEAR, FIRST, ONE)
    assert choose == ChooseEncoder(FIRST, (item(0), item(2), item(3)), (NEAR,)), "what was read stays read"
    assert "items [2]" in bench.state.parts[0].last_error.message
    assert bench.ignores(read(3), ready_item(2))


def test_repeats_of_a_last_announcement_leave_nothing_out() -> None:
    bench = at("buffer-registered", count=2)
    bench.feed(ready_item(0), read(0))
    assert bench.feed(ready_item(1, last=True)) == [
        StartRead(NEAR, FIRST, ONE, LEASE, 1, ready(1).source, None)
    ]
    assert bench.feed(ready_item(1, last=True)) == []


def test_a_read_that_failed_ends_the_attempt_with_a_cancel() -> None:
    bench = at("forward-done")
    effects = bench.feed(read(error=failure("seal_mismatch")))
    assert effects == [SendCancel(NEAR, FIRST, ONE), ChooseEncoder(FIRST, items(1), (NEAR,))]


def test_the_first_retry_is_at_once_and_later_ones_pause_longer_and_longer(request_: Bench) -> None:
    request_.feed(submitted())
    pauses = []
    for number in range(1, LIMITS.max_attempts):
        request_.feed(failed(attempt=Attempt(number)))
        before_s = request_.now_s
        if number > 1:
            assert request_.jump_to_deadline() == [ChooseEncoder(FIRST, items(1), (NEAR,))]
        pauses.append(request_.now_s - before_s)
        request_.feed(EncoderChosen(FIRST, NEAR))
    assert pauses == pytest.approx([0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0])


def test_a_pause_is_not_cut_short_by_a_late_answer_of_the_placement(request_: Bench) -> None:
    request_.feed(submitted(), failed(), EncoderChosen(FIRST, NEAR), failed(attempt=TWO))
    assert request_.ignores(EncoderChosen(FIRST, FAR), EncoderAvailable())


def test_attempts_are_bounded_and_the_last_error_is_told(request_: Bench) -> None:
    request_.feed(submitted())
    for number in range(1, LIMITS.max_attempts + 1):
        request_.feed(failed(attempt=Attempt(number)))
        if number not in {1, LIMITS.max_attempts}:
            request_.jump_to_deadline()
        request_.feed(EncoderChosen(FIRST, NEAR))
    assert [effect.error.code for effect in request_.all(FailRequest)] == ["forward_failed"]
    assert request_.count(SendEncodeRequest) == LIMITS.max_attempts


def test_no_sizes_in_time_cancels_the_attempt_and_tries_another_encoder() -> None:
    bench = at("requested")
    effects = bench.jump_to_deadline()
    assert bench.now_s == START_S + LIMITS.metadata_s
    assert effects == [SendCancel(NEAR, FIRST, ONE), ChooseEncoder(FIRST, items(1), (NEAR,))]


def test_an_error_that_is_not_retryable_fails_the_request_and_names_the_item() -> None:
    bench = at("buffer-registered", count=3)
    bench.feed(ready_item(0), read(0), failed())
    bench.feed(EncoderChosen(FIRST, FAR), MetadataReceived(FAR, FIRST, TWO, specs([1, 2])))
    error = failure("media_invalid", retryable=False, item=1)
    effects = bench.feed(failed(error, TWO, FAR))
    named = ErrorValue("media_invalid", False, "on purpose", 2)
    assert effects == [ReturnLease(LEASE), FailRequest(named)], "item 1 of the attempt is item 2"


# -- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", LIVE_STATES)
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_an_end_cancels_what_is_open_and_gives_back_what_is_held(state: str, how: str) -> None:
    bench = at(state)
    if how == "cancel":
        effects = bench.feed(CancelWanted())
    else:
        bench.now_s = DEADLINE_S
        effects = bench.feed(TimerExpired())
    held: dict[str, list[Effect]] = {"metadata": [WithdrawRoom()], "buffer-registered": [ReturnLease(LEASE)]}
    held["forward-done"] = held["buffer-registered"]
    assert effects[:-1] == [SendCancel(NEAR, FIRST, ONE), *held.get(state, [])]
    assert isinstance(effects[-1], FailRequest)
    assert effects[-1].error.code == ("cancelled" if how == "cancel" else "deadline")
    assert prefill.state_name(bench.state) == ("cancelled" if how == "cancel" else "failed(deadline)")


@pytest.mark.parametrize("state", ["rdma-written", "consumed"])
def test_once_delivered_only_the_release_frees(state: str) -> None:
    bench = at(state)
    assert bench.ignores(CancelWanted(), SessionEnded(NEAR), read(), ready_item(), failed())
    assert bench.jump_to_deadline() == [WarnUnconsumed(LEASE)]
    assert bench.state.deadline_s is None
    assert bench.feed(Released()) == [ReturnLease(LEASE)]
    assert bench.ignores(Released())


@pytest.mark.parametrize("state", LIVE_STATES)
def test_a_session_s_end_retries_at_once_and_sends_nothing_there(state: str) -> None:
    bench = at(state)
    assert bench.feed(SessionEnded(NEAR)) == [ChooseEncoder(FIRST, items(1), (NEAR,))]
    assert isinstance(bench.state.parts[0], Placing)
    assert bench.feed(EncoderChosen(FIRST, FAR))[0] == SendEncodeRequest(
        FAR, FIRST, TWO, items(1), "float32", DEADLINE_S, None
    )


def test_a_session_s_end_that_uses_up_the_attempts_sends_nothing_there(request_: Bench) -> None:
    bench = Bench(prefill, Limits(max_attempts=1))
    bench.feed(submitted(2, (PartPlan((0,), NEAR), PartPlan((1,), NEAR))))
    effects = bench.feed(SessionEnded(NEAR))
    assert [type(effect) for effect in effects] == [FailRequest]


def test_another_session_s_end_changes_nothing() -> None:
    for state in LIVE_STATES:
        assert at(state).ignores(SessionEnded(FAR))


def test_a_read_that_ends_after_its_attempt_delivers_nothing() -> None:
    bench = at("forward-done")
    bench.feed(SessionEnded(NEAR), EncoderChosen(FIRST, FAR))
    assert bench.ignores(read(attempt=ONE))
    bench.feed(sized(attempt=TWO, session=FAR))
    assert bench.ignores(read(attempt=TWO)), "nobody asked for this read in this attempt"


# -- room --------------------------------------------------------------------------------------


def test_no_room_in_time_fails_and_withdraws_the_wish() -> None:
    bench = at("metadata")
    effects = bench.jump_to_deadline()
    assert bench.now_s == START_S + LIMITS.room_s
    assert effects[:2] == [SendCancel(NEAR, FIRST, ONE), WithdrawRoom()]
    assert bench.all(FailRequest)[0].error.code == "pool_exhausted"


def test_a_request_larger_than_the_pool_fails_at_once() -> None:
    error = failure("request_too_large", retryable=False)
    effects = at("metadata").feed(RoomRefused(error))
    assert effects == [SendCancel(NEAR, FIRST, ONE), FailRequest(error)]


def test_a_lease_that_comes_too_late_is_given_back() -> None:
    bench = at("metadata")
    bench.feed(CancelWanted())
    assert bench.feed(RoomLeased(LEASE)) == [ReturnLease(LEASE)]
    assert Bench(prefill, LIMITS).feed(RoomLeased(LEASE)) == [ReturnLease(LEASE)], "forgotten already"


@pytest.mark.parametrize("state", ["buffer-registered", "forward-done", "rdma-written", "consumed"])
def test_a_repeated_lease_is_not_given_back_and_another_one_is(state: str) -> None:
    bench = at(state)
    assert bench.ignores(RoomLeased(LEASE))
    assert bench.feed(RoomLeased(LeaseId(8))) == [ReturnLease(LeaseId(8))]


def test_a_part_retried_while_room_is_awaited_gets_its_grant_with_its_sizes() -> None:
    bench = at("metadata")
    bench.feed(SessionEnded(NEAR), EncoderChosen(FIRST, FAR))
    assert bench.feed(RoomLeased(LEASE)) == []
    assert bench.feed(sized(attempt=TWO, session=FAR)) == [SendGrant(FAR, FIRST, TWO, LEASE)]


# -- what peers may say ------------------------------------------------------------------------


@pytest.mark.parametrize("state", [*LIVE_STATES, "rdma-written", "consumed"])
def test_messages_of_another_attempt_session_or_part_are_ignored(state: str) -> None:
    bench = at(state)
    assert bench.ignores(
        sized(attempt=TWO),
        sized(session=FAR),
        sized(part=SECOND),
        sized(part=Part(-1)),
        ready_item(attempt=TWO),
        ready_item(session=FAR),
        failed(attempt=TWO),
        failed(session=FAR),
        read(attempt=TWO),
        RoomRefused(failure()) if state != "metadata" else SessionEnded(FAR),
    )


def test_repeats_of_what_has_happened_change_nothing() -> None:
    bench = at("forward-done", count=2)
    assert bench.ignores(submitted(2), sized(2), ready_item(0))
    bench.feed(read(0))
    assert bench.ignores(ready_item(0), read(0))


def test_a_source_before_its_grant_is_not_read() -> None:
    assert at("requested").ignores(ready_item())
    assert at("metadata").ignores(ready_item())


@pytest.mark.parametrize(
    "event",
    [
        MetadataReceived(NEAR, FIRST, ONE, ()),
        MetadataReceived(NEAR, FIRST, ONE, (spec(), spec())),
        MetadataReceived(NEAR, FIRST, ONE, (spec(rows=-1),)),
        MetadataReceived(NEAR, FIRST, ONE, (spec(dim=0),)),
    ],
)
def test_sizes_that_make_no_sense_fail_the_request(event: Event) -> None:
    effects = at("requested").feed(event)
    assert isinstance(effects[-1], FailRequest)
    assert effects[-1].error.code == "source_invalid"
    assert effects[0] == SendCancel(NEAR, FIRST, ONE)


def test_another_dtype_than_the_one_asked_for_fails_the_request(request_: Bench) -> None:
    request_.feed(Submitted(items(1), "bfloat16", DEADLINE_S, (PartPlan((0,), NEAR),)))
    assert isinstance(request_.feed(sized())[-1], FailRequest)
    model = Bench(prefill, LIMITS)
    model.feed(Submitted(items(1), "model", DEADLINE_S, (PartPlan((0,), NEAR),)))
    assert model.feed(sized())[-1] == AskRoom((specs([0])[0].nbytes,))


def test_a_retry_that_announces_other_sizes_fails_the_request() -> None:
    bench = at("metadata")
    bench.feed(SessionEnded(NEAR), EncoderChosen(FIRST, FAR))
    effects = bench.feed(MetadataReceived(FAR, FIRST, TWO, (spec(99),)))
    assert effects[:2] == [SendCancel(FAR, FIRST, TWO), WithdrawRoom()]
    assert bench.all(FailRequest)[0].error.item == 0


@pytest.mark.parametrize(
    "event",
    [
        SourcesReady(NEAR, FIRST, ONE, LEASE, 0, (ready(0), ready(1), ready(1)), last=True),
        SourcesReady(NEAR, FIRST, ONE, LEASE, 2, (ready(1),), last=True),
        SourcesReady(NEAR, FIRST, ONE, LEASE, -1, (ready(1),), last=True),
        SourcesReady(NEAR, FIRST, ONE, LEASE, -7, (ready(1),), last=True),
        SourcesReady(NEAR, FIRST, ONE, LeaseId(8), 0, (ready(0),), last=True),
        SourcesReady(NEAR, FIRST, ONE, LEASE, 0, (ready(1),), last=True),
    ],
    ids=["too many", "beyond", "before", "far before", "another grant", "other sizes"],
)
def test_sources_that_were_not_announced_are_never_read(event: Event) -> None:
    bench = at("buffer-registered", count=2)
    effects = bench.feed(event)
    assert not any(isinstance(effect, StartRead) for effect in effects)
    assert effects[:2] == [SendCancel(NEAR, FIRST, ONE), ReturnLease(LEASE)]
    assert bench.all(FailRequest)[0].error.code == "source_invalid"


def test_a_failure_that_names_no_item_of_the_attempt_blames_none() -> None:
    for number in (-1, 1, 10**9):
        bench = at("requested")
        bench.feed(failed(failure("media_invalid", retryable=False, item=number)))
        assert bench.all(FailRequest)[0].error.item is None


def test_the_deadline_tells_why_no_attempt_was_open(request_: Bench) -> None:
    request_.feed(submitted(), failed(failure("draining")), EncoderChosen(FIRST, None))
    request_.now_s = DEADLINE_S
    request_.feed(TimerExpired())
    assert request_.all(FailRequest)[0].error.code == "draining"


# -- random sequences --------------------------------------------------------------------------

PARTS = st.sampled_from([FIRST, SECOND, Part(2)])
SESSIONS = st.sampled_from([NEAR, FAR])
ATTEMPTS = st.integers(1, 4).map(Attempt)
NUMBERS = st.integers(-1, 3)
ERRORS = st.builds(
    lambda retryable, number: failure(retryable=retryable, item=number),
    st.sampled_from([True, True, True, False]),
    st.none() | NUMBERS,
)
READY = st.lists(st.integers(0, 3).map(ready), max_size=3).map(tuple)
SIZES = st.sampled_from([(0, 1), (2,), (1,), (0,), ()]).map(specs)
EVENTS = st.one_of(
    st.builds(EncoderChosen, PARTS, st.none() | SESSIONS),
    st.just(EncoderAvailable()),
    st.builds(MetadataReceived, SESSIONS, PARTS, ATTEMPTS, SIZES),
    st.builds(SourcesReady, SESSIONS, PARTS, ATTEMPTS, st.just(LeaseId(1)), NUMBERS, READY, st.booleans()),
    st.builds(ReadEnded, PARTS, ATTEMPTS, NUMBERS, st.none() | ERRORS),
    st.builds(AttemptFailed, SESSIONS, PARTS, ATTEMPTS, ERRORS),
    st.builds(SessionEnded, SESSIONS),
    st.sampled_from([CancelWanted(), Taken(), Released()]),
    st.builds(RoomRefused, ERRORS),
)
HELPFUL = ("help", "help", "help", "lease", "timer")


def helpful_events(bench: Bench) -> list[Event]:
    """What a good peer and a good node would say next, so that random runs get far."""
    state = bench.state
    events: list[Event] = []
    if isinstance(state, Delivered | Consumed):
        return [Taken(), Released()]
    for index, part in enumerate(getattr(state, "parts", ())):
        number = Part(index)
        if isinstance(part, Placing):
            events.append(EncoderChosen(number, FAR if part.attempt % 2 else NEAR))
        elif isinstance(part, Requested):
            events.append(MetadataReceived(part.session, number, part.attempt, specs(part.asked)))
        elif isinstance(state, Filling) and isinstance(part, Granted):
            for at_number, asked in enumerate(part.asked):
                if asked in part.reading:
                    events.append(ReadEnded(number, part.attempt, asked, None))
                elif not state.done[asked]:
                    events.append(
                        SourcesReady(
                            part.session, number, part.attempt, state.lease, at_number, (ready(asked),), True
                        )
                    )
    return events


class Ledger:
    """Follows the effects of one request: who was told what, what is held."""

    def __init__(self) -> None:
        self.open: dict[Part, tuple[SessionId, Attempt]] = {}
        self.attempts: set[tuple[Part, Attempt]] = set()
        self.returned: list[LeaseId] = []
        self.outcomes = 0
        self.room_asked = 0

    def note(self, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, SessionEnded):
            self.open = {p: o for p, o in self.open.items() if o[0] != event.session}
        for effect in effects:
            match effect:
                case SendEncodeRequest():
                    assert effect.part not in self.open, "one attempt of a part is open at a time"
                    assert (effect.part, effect.attempt) not in self.attempts
                    self.attempts.add((effect.part, effect.attempt))
                    self.open[effect.part] = (effect.session, effect.attempt)
                case SendGrant() | SendReceipt() | SendCancel():
                    assert self.open[effect.part] == (effect.session, effect.attempt)
                    if isinstance(effect, SendCancel) or (isinstance(effect, SendReceipt) and effect.last):
                        del self.open[effect.part]
                case ReturnLease():
                    self.returned.append(effect.lease)
                case Deliver() | FailRequest():
                    self.outcomes += 1
                case AskRoom():
                    self.room_asked += 1
                case _:
                    pass


def feed(bench: Bench, ledger: Ledger, event: Event) -> None:
    if isinstance(event, AttemptFailed):
        part = ledger.open.get(event.part)
        if part == (event.session, event.attempt):
            del ledger.open[event.part]
    ledger.note(event, bench.feed(event))


@given(st.lists(EVENTS | st.tuples(st.sampled_from(HELPFUL), st.integers(0, 9)), max_size=40))
def test_whatever_happens_a_request_ends_once_by_its_deadline_and_holds_nothing(
    script: list[Event | tuple[str, int]],
) -> None:
    bench, ledger = Bench(prefill, LIMITS), Ledger()
    feed(bench, ledger, submitted(3, (PartPlan((0, 1), NEAR), PartPlan((2,), FAR))))
    leases: list[LeaseId] = []
    for entry in script:
        if isinstance(entry, Event):
            feed(bench, ledger, entry)
        elif entry[0] == "lease":
            if len(leases) < ledger.room_asked:
                leases.append(LeaseId(len(leases) + 1))
                feed(bench, ledger, RoomLeased(leases[-1]))
        elif entry[0] == "timer":
            if bench.state.deadline_s is not None:
                bench.now_s = max(bench.now_s, bench.state.deadline_s)
                feed(bench, ledger, TimerExpired())
        elif events := helpful_events(bench):
            feed(bench, ledger, events[entry[1] % len(events)])
        assert ledger.outcomes <= 1
    while not isinstance(bench.state, Delivered | Consumed | Ended):
        bench.now_s = max(bench.now_s, bench.state.deadline_s)
        feed(bench, ledger, TimerExpired())
    assert ledger.outcomes == 1
    assert bench.now_s <= DEADLINE_S or bench.count(Deliver)
    feed(bench, ledger, Released())
    if ledger.room_asked > len(leases):
        leases.append(LeaseId(99))
        feed(bench, ledger, RoomLeased(leases[-1]))
    assert sorted(ledger.returned) == sorted(leases), "every lease is given back exactly once"
    assert ledger.open == {}, "every attempt was ended"
    assert isinstance(bench.state, Ended)


def test_the_table_knows_every_state() -> None:
    kinds = {state for state, _ in prefill.TRANSITIONS}
    assert {Negotiating, AwaitingRoom, Filling, Delivered, Consumed, Ended} <= kinds
    assert at("requested").feed(Taken()) == [Ignored("Taken")]
