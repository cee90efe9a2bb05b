"""The request machine of the prefill side: one per transfer (I3, I7).

Two levels: the request (negotiating, awaiting room, filling, delivered, consumed, ended) and its
parts (placing, requested, sized, granted, read). Rules of this file:

- A message counts only for the attempt that is open, in the session it was opened in (`_to_part`).
- All parts are leased in one go once all sizes are known; a lease outlives its attempts.
- A retry asks only for items that were not read yet, and must announce the same sizes.
- Once delivered, only the consumer's release frees (I5): a cancel changes nothing any more.
- A request is delivered whole or failed with one error, by its deadline. What happens to its memory
  is the slot machine's business (`slots.py`): here the lease is only given back.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace

from epd.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    EpdError,
    ForwardFailed,
    NoEncoder,
    PoolExhausted,
    SessionLost,
    SourceInvalid,
    TimedOut,
)
from epd.protocol.ids import Attempt, Part, SessionId
from epd.protocol.machine import Effect, Event, Ignored, State, Step, TimerExpired, dispatch, ignored
from epd.protocol.messages import EmbeddingSpec, ErrorValue, Item
from epd.protocol.prefill_types import (
    INITIAL,
    AnyEffect,
    AnyEvent,
    AnyState,
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
    Live,
    MetadataReceived,
    Negotiating,
    New,
    PartState,
    Placing,
    Read,
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
    Sized,
    SourcesReady,
    StartRead,
    Submitted,
    Taken,
    WarnUnconsumed,
    WithdrawRoom,
)

__all__ = [
    "INITIAL",
    "PART_TRANSITIONS",
    "TRANSITIONS",
    "AnyEffect",
    "AnyEvent",
    "AnyState",
    "Limits",
    "state_name",
    "step",
]

T = TypeVar("T")


# -- request handlers --------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What an event did to one part."""

    part: PartState
    effects: tuple[Effect, ...] = ()
    specs: tuple[tuple[int, EmbeddingSpec], ...] = ()
    done: tuple[int, ...] = ()
    fatal: ErrorValue | None = None


def _submit(_: New, event: Submitted, now_s: float, limits: Limits) -> Step:
    parts: list[PartState] = []
    effects: list[Effect] = []
    for index, plan in enumerate(event.plans):
        parts.append(Placing(plan.items, Attempt(1), None))
        if plan.session is None:
            effects.append(ChooseEncoder(Part(index), _pick(event.items, plan.items), ()))
    count = len(event.items)
    state: Live = Negotiating(
        event.items,
        (None,) * count,
        (False,) * count,
        tuple(parts),
        event.dtype,
        event.deadline_s,
        event.traceparent,
    )
    for index, plan in enumerate(event.plans):
        if plan.session is not None:
            outcome = _open_attempt(state, state.parts[index], Part(index), plan.session, now_s, limits)
            state = replace(state, parts=_put(state.parts, index, outcome.part))
            effects.extend(outcome.effects)
    return Step(state, tuple(effects))


def _to_part(state: Live, event: "PartEvent", now_s: float, limits: Limits) -> Step:
    """Hand an event to its part, if it concerns the attempt that is open there."""
    if not 0 <= event.part < len(state.parts):
        return ignored(state, event)
    part = state.parts[event.part]
    attempt = getattr(event, "attempt", part.attempt)
    session = getattr(event, "session", None)
    if attempt != part.attempt:
        return ignored(state, event)
    if isinstance(event, MetadataReceived | SourcesReady | AttemptFailed) and session != getattr(
        part, "session", None
    ):
        return ignored(state, event)
    handler = PART_TRANSITIONS.get((type(part), type(event)))
    if handler is None:
        return ignored(state, event)
    return _apply(state, event.part, handler(state, part, event, now_s, limits), now_s, limits)


def _apply(state: Live, index: int, outcome: Outcome, now_s: float, limits: Limits) -> Step:
    if outcome.fatal is not None:
        failed = replace(state, parts=_put(state.parts, index, outcome.part))
        return _fail(failed, outcome.fatal, outcome.effects)
    specs, done = state.specs, state.done
    for item, spec in outcome.specs:
        specs = _put(specs, item, spec)
    for item in outcome.done:
        done = _put(done, item, True)
    changed = replace(state, parts=_put(state.parts, index, outcome.part), specs=specs, done=done)
    return _settle(changed, outcome.effects, now_s, limits)


def _settle(state: Live, effects: tuple[Effect, ...], now_s: float, limits: Limits) -> Step:
    """What follows for the request once a part has moved."""
    if isinstance(state, Negotiating) and all(spec is not None for spec in state.specs):
        sizes = tuple(spec.nbytes for spec in state.specs if spec is not None)
        awaiting = AwaitingRoom(
            state.items,
            state.specs,
            state.done,
            state.parts,
            state.dtype,
            state.request_deadline_s,
            state.traceparent,
            now_s + limits.room_s,
        )
        return Step(awaiting, (*effects, AskRoom(sizes)))
    if isinstance(state, Filling) and all(isinstance(part, Read) for part in state.parts):
        specs = tuple(spec for spec in state.specs if spec is not None)
        delivered = Delivered(state.lease, now_s + limits.consume_warning_s)
        return Step(delivered, (*effects, Deliver(state.lease, specs)))
    return Step(state, effects)


def _grant(state: AwaitingRoom, event: RoomLeased, now_s: float, limits: Limits) -> Step:
    parts: list[PartState] = []
    effects: list[Effect] = []
    for index, part in enumerate(state.parts):
        if isinstance(part, Sized):
            parts.append(Granted(part.items, part.attempt, part.session, part.asked))
            effects.append(SendGrant(part.session, Part(index), part.attempt, event.lease))
        else:
            parts.append(part)
    filling = Filling(
        state.items,
        state.specs,
        state.done,
        tuple(parts),
        state.dtype,
        state.request_deadline_s,
        state.traceparent,
        event.lease,
    )
    return Step(filling, tuple(effects))


def _refuse_room(state: AwaitingRoom, event: RoomRefused, now_s: float, limits: Limits) -> Step:
    return _fail(state, event.error, (), room_asked=False)


def _return_stray_lease(state: AnyState, event: RoomLeased, now_s: float, limits: Limits) -> Step:
    """Lost race: the lease came after the wish was withdrawn; no encoder was told."""
    if event.lease == getattr(state, "lease", None):
        return ignored(state, event)
    return Step(state, (ReturnLease(event.lease),))


def _lose_session(state: Live, event: SessionEnded, now_s: float, limits: Limits) -> Step:
    """All attempts in it end in this turn, and nothing more is sent there."""
    lost = SessionLost("session ended").as_value()
    effects: list[Effect] = []
    fatal: ErrorValue | None = None
    for index, part in enumerate(state.parts):
        if getattr(part, "session", None) != event.session:
            continue
        outcome = _close_attempt(state, part, Part(index), lost, now_s, limits, tell=False)
        state = replace(state, parts=_put(state.parts, index, outcome.part))
        effects.extend(outcome.effects)
        fatal = fatal or outcome.fatal
    if fatal is not None:
        return _fail(state, fatal, ())
    return Step(state, tuple(effects))


def _place_again(state: Live, event: EncoderAvailable, now_s: float, limits: Limits) -> Step:
    effects = tuple(
        ChooseEncoder(Part(index), _missing(state, part), part.avoid)
        for index, part in enumerate(state.parts)
        if isinstance(part, Placing) and part.deadline_s is None
    )
    return Step(state, effects)


def _cancel(state: Live, event: CancelWanted, now_s: float, limits: Limits) -> Step:
    return _fail(state, Cancelled("cancelled by the caller").as_value(), ())


def _expire(state: Live, event: TimerExpired, now_s: float, limits: Limits) -> Step:
    if now_s >= state.request_deadline_s:
        return _fail(state, _deadline_error(state), ())
    if isinstance(state, AwaitingRoom) and now_s >= state.room_deadline_s:
        wanted = sum(spec.nbytes for spec in state.specs if spec is not None)
        error = PoolExhausted(f"no room for {wanted} B within {limits.room_s} s; others hold the pool")
        return _fail(state, error.as_value(), ())
    for index, part in enumerate(state.parts):
        if part.deadline_s is None or now_s < part.deadline_s:
            continue
        if isinstance(part, Placing):
            waiting = replace(part, deadline_s=None)
            choose = ChooseEncoder(Part(index), _missing(state, part), part.avoid)
            return Step(replace(state, parts=_put(state.parts, index, waiting)), (choose,))
        late = TimedOut(f"no sizes within {limits.metadata_s} s", phase="metadata").as_value()
        outcome = _close_attempt(state, part, Part(index), late, now_s, limits, tell=True)
        return _apply(state, index, outcome, now_s, limits)
    return ignored(state, event)


def _take(state: Delivered, event: Taken, now_s: float, limits: Limits) -> Step:
    return Step(Consumed(state.lease, now_s + limits.consume_warning_s), ())


def _free(state: Delivered | Consumed, event: Released, now_s: float, limits: Limits) -> Step:
    return Step(Ended("freed"), (ReturnLease(state.lease),))


def _warn(state: Delivered | Consumed, event: TimerExpired, now_s: float, limits: Limits) -> Step:
    return Step(replace(state, deadline_s=None), (WarnUnconsumed(state.lease),))


# -- part handlers -----------------------------------------------------------------------------


def _choose(state: Live, part: Placing, event: EncoderChosen, now_s: float, limits: Limits) -> Outcome:
    if event.session is None or part.deadline_s is not None:  # pausing: it will be asked again
        return Outcome(part)
    return _open_attempt(state, part, event.part, event.session, now_s, limits)


def _size(state: Live, part: Requested, event: MetadataReceived, now_s: float, limits: Limits) -> Outcome:
    if len(event.specs) != len(part.asked):
        return _fatal(part, f"{len(event.specs)} sizes for {len(part.asked)} items")
    named = tuple(zip(part.asked, event.specs, strict=True))
    for item, spec in named:
        known = state.specs[item]
        if spec.rows < 0 or spec.dim < 1 or state.dtype not in ("model", spec.dtype):
            return _fatal(
                part, f"item {item}: {spec.rows}x{spec.dim} {spec.dtype}, asked {state.dtype}", item
            )
        if known is not None and known != spec:
            return _fatal(part, f"item {item}: another attempt announced other sizes", item)
    if isinstance(state, Filling):
        granted = Granted(part.items, part.attempt, part.session, part.asked)
        return Outcome(granted, (SendGrant(part.session, event.part, part.attempt, state.lease),), named)
    return Outcome(Sized(part.items, part.attempt, part.session, part.asked), (), named)


def _read(state: Live, part: Granted, event: SourcesReady, now_s: float, limits: Limits) -> Outcome:
    assert isinstance(state, Filling)
    end = event.first + len(event.ready)
    if event.grant != state.lease or event.first < 0 or end > len(part.asked):
        return _fatal(part, f"grant {event.grant}, items {event.first}..{end} of {len(part.asked)}")
    effects: list[Effect] = []
    reading = list(part.reading)
    for number, ready in enumerate(event.ready, event.first):
        item = part.asked[number]
        spec = state.specs[item]
        assert spec is not None
        if ready.spec != spec or ready.source.nbytes != spec.nbytes:
            return _fatal(part, f"item {item}: the source differs from what was announced", item)
        if item in reading or state.done[item]:
            continue  # a repeat changes nothing
        reading.append(item)
        effects.append(
            StartRead(part.session, event.part, part.attempt, state.lease, item, ready.source, ready.digest)
        )
    missing = [item for item in part.asked if item not in reading and not state.done[item]]
    if event.last and missing:  # nothing more will come: better now than at the deadline
        error = ForwardFailed(f"the encoder's last announcement leaves out items {missing}").as_value()
        return _close_attempt(state, part, event.part, error, now_s, limits, tell=True)
    return Outcome(replace(part, reading=tuple(reading)), tuple(effects))


def _finish_read(state: Live, part: Granted, event: ReadEnded, now_s: float, limits: Limits) -> Outcome:
    assert isinstance(state, Filling)
    if event.item not in part.reading:
        return Outcome(part, (Ignored(type(event).__name__),))
    if event.error is not None:
        return _close_attempt(state, part, event.part, event.error, now_s, limits, tell=True)
    last = all(state.done[item] or item == event.item for item in part.asked)
    receipt = SendReceipt(
        part.session, event.part, part.attempt, state.lease, part.asked.index(event.item), 1, last
    )
    after: PartState = replace(part, reading=tuple(i for i in part.reading if i != event.item))
    if last:
        after = Read(part.items, part.attempt)
    return Outcome(after, (receipt,), done=(event.item,))


def _fail_attempt(
    state: Live, part: PartState, event: AttemptFailed, now_s: float, limits: Limits
) -> Outcome:
    error = event.error
    asked = getattr(part, "asked", ())
    if error.item is not None:
        error = replace(error, item=asked[error.item] if 0 <= error.item < len(asked) else None)
    return _close_attempt(state, part, event.part, error, now_s, limits, tell=False)


def _open_attempt(
    state: Live, part: PartState, index: Part, session: SessionId, now_s: float, limits: Limits
) -> Outcome:
    asked = tuple(item for item in part.items if not state.done[item])
    deadline_s = now_s + limits.metadata_s
    requested = Requested(part.items, part.attempt, session, asked, deadline_s)
    request = SendEncodeRequest(
        session,
        index,
        part.attempt,
        _pick(state.items, asked),
        state.dtype,
        state.request_deadline_s,
        state.traceparent,
    )
    return Outcome(requested, (request,))


def _close_attempt(
    state: Live,
    part: PartState,
    index: Part,
    error: ErrorValue,
    now_s: float,
    limits: Limits,
    *,
    tell: bool,
) -> Outcome:
    """End the open attempt; the next may start after a pause that doubles, or the request fails.

    The pause is zero the first time: a lost session or a torn source is retried at once.
    """
    assert isinstance(part, Requested | Sized | Granted)
    cancel: tuple[Effect, ...] = (SendCancel(part.session, index, part.attempt),) if tell else ()
    if not error.retryable or part.attempt >= limits.max_attempts:
        return Outcome(Placing(part.items, Attempt(part.attempt + 1), None), cancel, fatal=error)
    pause_s = 0.0
    if part.attempt > 1:
        pause_s = min(limits.retry_max_s, limits.retry_base_s * 2.0 ** (part.attempt - 2))
    avoid = (part.session,)
    if pause_s == 0.0:
        placing = Placing(part.items, Attempt(part.attempt + 1), None, avoid, error)
        choose = ChooseEncoder(index, _missing(state, part), avoid)
        return Outcome(placing, (*cancel, choose))
    return Outcome(Placing(part.items, Attempt(part.attempt + 1), now_s + pause_s, avoid, error), cancel)


def _fatal(part: PartState, message: str, item: int | None = None) -> Outcome:
    return Outcome(part, fatal=SourceInvalid(message).as_value(item))


def _fail(state: Live, error: ErrorValue, before: tuple[Effect, ...], *, room_asked: bool = True) -> Step:
    """End the request: cancel what is open, give back what is held, tell the caller once."""
    effects = list(before)
    for index, part in enumerate(state.parts):
        if isinstance(part, Requested | Sized | Granted):
            effects.append(SendCancel(part.session, Part(index), part.attempt))
    if isinstance(state, AwaitingRoom) and room_asked:
        effects.append(WithdrawRoom())
    if isinstance(state, Filling):
        effects.append(ReturnLease(state.lease))
    effects.append(FailRequest(error))
    return Step(Ended(error.code), tuple(effects))


def _deadline_error(state: Live) -> ErrorValue:
    """The deadline, or why no attempt was open when it came: that is what people need to know."""
    for part in state.parts:
        if isinstance(part, Placing):
            if part.last_error is not None:
                return part.last_error
            return NoEncoder("no encoder's session was open before the deadline").as_value()
    names = ", ".join(sorted({type(part).__name__.lower() for part in state.parts}))
    error: EpdError = DeadlineExceeded(f"deadline passed; parts were {names}")
    return error.as_value()


def _missing(state: Live, part: PartState) -> tuple[Item, ...]:
    """What an attempt would ask for: the part's items that are not whole yet."""
    return tuple(state.items[index] for index in part.items if not state.done[index])


def _pick(items: tuple[Item, ...], indices: tuple[int, ...]) -> tuple[Item, ...]:
    return tuple(items[index] for index in indices)


def _put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


# -- tables ------------------------------------------------------------------------------------

PartEvent = EncoderChosen | MetadataReceived | SourcesReady | ReadEnded | AttemptFailed

PART_TRANSITIONS: Final[dict[tuple[type[State], type[Event]], Callable[..., Outcome]]] = {
    (Placing, EncoderChosen): _choose,
    (Requested, MetadataReceived): _size,
    (Requested, AttemptFailed): _fail_attempt,
    (Sized, AttemptFailed): _fail_attempt,
    (Granted, SourcesReady): _read,
    (Granted, ReadEnded): _finish_read,
    (Granted, AttemptFailed): _fail_attempt,
}

_LIVE: Final[dict[type[Event], Callable[..., Step]]] = {
    EncoderChosen: _to_part,
    EncoderAvailable: _place_again,
    MetadataReceived: _to_part,
    SourcesReady: _to_part,
    ReadEnded: _to_part,
    AttemptFailed: _to_part,
    SessionEnded: _lose_session,
    CancelWanted: _cancel,
    TimerExpired: _expire,
}

_NOT_AWAITING_ROOM: Final = (New, Negotiating, Filling, Delivered, Consumed, Ended)

TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (New, Submitted): _submit,
    **{(kind, RoomLeased): _return_stray_lease for kind in _NOT_AWAITING_ROOM},
    **{
        (live, event): handler
        for live in (Negotiating, AwaitingRoom, Filling)
        for event, handler in _LIVE.items()
    },
    (AwaitingRoom, RoomLeased): _grant,
    (AwaitingRoom, RoomRefused): _refuse_room,
    (Delivered, Taken): _take,
    (Delivered, Released): _free,
    (Delivered, TimerExpired): _warn,
    (Consumed, Released): _free,
    (Consumed, TimerExpired): _warn,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: Limits) -> Step:
    """Total and pure (see `machine.py`)."""
    return dispatch(TRANSITIONS, state, event, now_s, limits)


_GOOD_ENDS: Final = ("freed", "cancelled")


def state_name(state: AnyState) -> str:
    """The name people see for this state."""
    match state:
        case Negotiating():
            return "metadata" if any(isinstance(p, Sized) for p in state.parts) else "requested"
        case AwaitingRoom():
            return "metadata"
        case Filling():
            reading = any(isinstance(p, Read) or (isinstance(p, Granted) and p.reading) for p in state.parts)
            return "forward-done" if reading else "buffer-registered"
        case Delivered():
            return "rdma-written"
        case Consumed():
            return "consumed"
        case Ended():
            return state.outcome if state.outcome in _GOOD_ENDS else f"failed({state.outcome})"
        case New():
            return "new"
