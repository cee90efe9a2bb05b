"""The request machine of the encoder side: one per (session, transfer, part).

It is a join of two facts per item, job ready and grant held, in either order: a new job is ready
after its grant, a shared one or a cache hit before. An item is announced once, and only after its
source is pinned. An attempt ends with the last `Receipt`, `Cancel`, `Failed` or its session's end;
then nothing is held.
"""

from collections.abc import Callable
from typing import ClassVar, Final

import msgspec
from msgspec.structs import replace

from epd.protocol.errors import DeadlineExceeded, Draining, RequestTooLarge
from epd.protocol.ids import Attempt, LeaseId
from epd.protocol.machine import Effect, Event, Ignored, State, Step, TimerExpired, dispatch, ignored
from epd.protocol.messages import EmbeddingSpec, ErrorValue, Item, ReadyItem, Source
from epd.protocol.wire import MAX_ITEMS_PER_PART


class Limits(msgspec.Struct, frozen=True):
    """The request's own deadline is the only one on this side (jobs have theirs)."""


# -- items ---------------------------------------------------------------------------------------


class Waiting(State):
    """No result yet."""


class Ready(State):
    """A result is staged; not pinned."""

    staged: LeaseId


class Pinning(State):
    """Ready and granted: the pin was asked for.

    `renewed`: the result was evicted before it was pinned, and the forward that ran again was
    faster than the news of it.
    """

    staged: LeaseId
    renewed: LeaseId | None = None


class Announced(State):
    """`ForwardDone` sent, source pinned."""

    staged: LeaseId


class Received(State):
    """`Receipt` received, source unpinned."""


ItemState = Waiting | Ready | Pinning | Announced | Received


# -- the part ------------------------------------------------------------------------------------


class Idle(State):
    """Nothing is held. Also the end: a part's machine is forgotten when its attempt has ended."""

    deadline_s: None = None
    final: ClassVar[bool] = True


class Open(State):
    """An attempt is open; `grant` is None until `BufferGrant` came."""

    attempt: Attempt
    specs: tuple[EmbeddingSpec, ...]
    items: tuple[ItemState, ...]
    grant: LeaseId | None
    deadline_s: float
    final: ClassVar[bool] = False


AnyState = Idle | Open
INITIAL: Final = Idle()


# -- events --------------------------------------------------------------------------------------


class RequestReceived(Event):
    """An `EncodeRequest`, planned; `refusal` if it cannot be served (naming its item)."""

    attempt: Attempt
    items: tuple[Item, ...]
    specs: tuple[EmbeddingSpec, ...]
    deadline_s: float
    refusal: ErrorValue | None = None
    traceparent: str | None = None
    """Changes nothing here; for whoever watches the steps."""


class GrantReceived(Event):
    attempt: Attempt
    grant: LeaseId


class JobReady(Event):
    attempt: Attempt
    item: int
    staged: LeaseId


class JobEvicted(Event):
    """The result was given up for room before it was pinned; the job will run again."""

    attempt: Attempt
    item: int


class JobFailed(Event):
    attempt: Attempt
    item: int
    error: ErrorValue


class SourcePinned(Event):
    attempt: Attempt
    item: int
    staged: LeaseId
    source: Source
    digest: bytes | None = None


class SourceGone(Event):
    attempt: Attempt
    item: int


class ReceiptReceived(Event):
    attempt: Attempt
    grant: LeaseId
    first: int
    count: int


class CancelReceived(Event):
    attempt: Attempt


class SessionEnded(Event):
    pass


class DrainWanted(Event):
    """The node drains: hand back what was not started."""


AnyEvent = (
    RequestReceived
    | GrantReceived
    | JobReady
    | JobEvicted
    | JobFailed
    | SourcePinned
    | SourceGone
    | ReceiptReceived
    | CancelReceived
    | SessionEnded
    | DrainWanted
    | TimerExpired
)


# -- effects -------------------------------------------------------------------------------------


class SendMetadata(Effect):
    attempt: Attempt
    specs: tuple[EmbeddingSpec, ...]


class Subscribe(Effect):
    attempt: Attempt
    item: int
    described: Item
    spec: EmbeddingSpec


class TellGranted(Effect):
    """This subscriber holds a grant: its job's forward may start (I7)."""

    attempt: Attempt
    item: int


class Unsubscribe(Effect):
    attempt: Attempt
    item: int


class PinSource(Effect):
    attempt: Attempt
    item: int
    staged: LeaseId


class UnpinSource(Effect):
    attempt: Attempt
    item: int
    staged: LeaseId


class SendForwardDone(Effect):
    attempt: Attempt
    grant: LeaseId
    first: int
    ready: tuple[ReadyItem, ...]
    last: bool


class SendFailed(Effect):
    attempt: Attempt
    error: ErrorValue


class AttemptEnded(Effect):
    """For the log and the metrics: `received`, or why not."""

    attempt: Attempt
    outcome: str


AnyEffect = (
    SendMetadata
    | Subscribe
    | TellGranted
    | Unsubscribe
    | PinSource
    | UnpinSource
    | SendForwardDone
    | SendFailed
    | AttemptEnded
    | Ignored
)


# -- handlers ------------------------------------------------------------------------------------


def _accept(state: Idle, event: RequestReceived, now_s: float, limits: Limits) -> Step:
    count = len(event.items)
    refusal = event.refusal
    if not 1 <= count <= MAX_ITEMS_PER_PART:
        error = RequestTooLarge(f"a part of {count} items; 1 to {MAX_ITEMS_PER_PART} are allowed")
        refusal = error.as_value()
    if refusal is not None:
        failed = SendFailed(event.attempt, refusal)
        return Step(state, (failed, AttemptEnded(event.attempt, refusal.code)))
    opened = Open(event.attempt, event.specs, (Waiting(),) * count, None, event.deadline_s)
    subscriptions = (
        Subscribe(event.attempt, number, item, spec)
        for number, (item, spec) in enumerate(zip(event.items, event.specs, strict=True))
    )
    return Step(opened, (SendMetadata(event.attempt, event.specs), *subscriptions))


def _accept_newer(state: Open, event: RequestReceived, now_s: float, limits: Limits) -> Step:
    """One attempt of a part is open at a time: a newer one ends the older."""
    if event.attempt <= state.attempt:
        return ignored(state, event)
    ended = _end(state, "superseded")
    opened = _accept(Idle(), event, now_s, limits)
    return Step(opened.state, ended.effects + opened.effects)


def _grant(state: Open, event: GrantReceived, now_s: float, limits: Limits) -> Step:
    if event.attempt != state.attempt or state.grant is not None:
        return ignored(state, event)
    items: list[ItemState] = []
    effects: list[Effect] = []
    for number, item in enumerate(state.items):
        effects.append(TellGranted(state.attempt, number))
        if isinstance(item, Ready):
            effects.append(PinSource(state.attempt, number, item.staged))
        items.append(Pinning(item.staged) if isinstance(item, Ready) else item)
    return Step(replace(state, grant=event.grant, items=tuple(items)), tuple(effects))


def _job_ready(state: Open, event: JobReady, now_s: float, limits: Limits) -> Step:
    item = _item(state, event.attempt, event.item)
    if isinstance(item, Pinning) and item.staged != event.staged:
        return _put(state, event.item, replace(item, renewed=event.staged))
    if not _expects(state, event.attempt, event.item, Waiting):
        return ignored(state, event)
    if state.grant is None:
        return _put(state, event.item, Ready(event.staged))
    pin = PinSource(state.attempt, event.item, event.staged)
    return _put(state, event.item, Pinning(event.staged), pin)


def _job_evicted(state: Open, event: JobEvicted, now_s: float, limits: Limits) -> Step:
    # A pin that is under way is answered by `SourceGone`; until then the item stays `Pinning`.
    if not _expects(state, event.attempt, event.item, Ready):
        return ignored(state, event)
    return _put(state, event.item, Waiting())


def _source_gone(state: Open, event: SourceGone, now_s: float, limits: Limits) -> Step:
    item = _item(state, event.attempt, event.item)
    if not isinstance(item, Pinning):
        return ignored(state, event)
    if item.renewed is not None:
        pin = PinSource(state.attempt, event.item, item.renewed)
        return _put(state, event.item, Pinning(item.renewed), pin)
    return _put(state, event.item, Waiting())


def _announce(state: Open, event: SourcePinned, now_s: float, limits: Limits) -> Step:
    item = _item(state, event.attempt, event.item)
    if isinstance(item, Announced) and item.staged == event.staged:
        return ignored(state, event)
    if not isinstance(item, Pinning) or item.staged != event.staged:
        return _unpin_stray(state, event, now_s, limits)
    assert state.grant is not None
    ready = ReadyItem(event.source, state.specs[event.item], event.digest)
    others = (item for number, item in enumerate(state.items) if number != event.item)
    last = all(isinstance(item, Announced | Received) for item in others)
    done = SendForwardDone(state.attempt, state.grant, event.item, (ready,), last)
    return _put(state, event.item, Announced(event.staged), done)


def _unpin_stray(state: AnyState, event: SourcePinned, now_s: float, limits: Limits) -> Step:
    """The pin came after its attempt had ended."""
    return Step(state, (UnpinSource(event.attempt, event.item, event.staged),))


def _job_failed(state: Open, event: JobFailed, now_s: float, limits: Limits) -> Step:
    # In `Pinning` too: the result was evicted before it was pinned, and its forward failed since.
    if not isinstance(_item(state, event.attempt, event.item), Waiting | Ready | Pinning):
        return ignored(state, event)
    error = replace(event.error, item=event.item)
    return _end(state, error.code, SendFailed(state.attempt, error))


def _receive(state: Open, event: ReceiptReceived, now_s: float, limits: Limits) -> Step:
    if event.attempt != state.attempt or event.grant != state.grant:
        return ignored(state, event)
    items = list(state.items)
    effects: list[Effect] = []
    for number in range(max(0, event.first), min(event.first + event.count, len(items))):
        item = items[number]
        if isinstance(item, Announced):
            effects.append(UnpinSource(state.attempt, number, item.staged))
            effects.append(Unsubscribe(state.attempt, number))
            items[number] = Received()
    if all(isinstance(item, Received) for item in items):
        return Step(Idle(), (*effects, AttemptEnded(state.attempt, "received")))
    return Step(replace(state, items=tuple(items)), tuple(effects))


def _cancel(state: Open, event: CancelReceived, now_s: float, limits: Limits) -> Step:
    return _end(state, "cancelled") if event.attempt == state.attempt else ignored(state, event)


def _lose_session(state: Open, event: SessionEnded, now_s: float, limits: Limits) -> Step:
    return _end(state, "session_lost")


def _drain(state: Open, event: DrainWanted, now_s: float, limits: Limits) -> Step:
    if state.grant is not None:
        return ignored(state, event)
    error = Draining("the encoder drains; this part was not started").as_value()
    return _end(state, error.code, SendFailed(state.attempt, error))


def _expire(state: Open, event: TimerExpired, now_s: float, limits: Limits) -> Step:
    error = DeadlineExceeded("the request's deadline passed at the encoder").as_value()
    return _end(state, error.code, SendFailed(state.attempt, error))


def _end(state: Open, outcome: str, *before: Effect) -> Step:
    """Hold nothing any more: unpin what was announced, leave every job."""
    effects: list[Effect] = list(before)
    for number, item in enumerate(state.items):
        if isinstance(item, Announced):
            effects.append(UnpinSource(state.attempt, number, item.staged))
        if not isinstance(item, Received):
            effects.append(Unsubscribe(state.attempt, number))
    return Step(Idle(), (*effects, AttemptEnded(state.attempt, outcome)))


def _item(state: Open, attempt: Attempt, item: int) -> ItemState | None:
    """The item's state, if the event is of the attempt that is open."""
    return state.items[item] if attempt == state.attempt and 0 <= item < len(state.items) else None


def _expects(state: Open, attempt: Attempt, item: int, kind: type[ItemState]) -> bool:
    return isinstance(_item(state, attempt, item), kind)


def _put(state: Open, number: int, item: ItemState, *effects: Effect) -> Step:
    items = (*state.items[:number], item, *state.items[number + 1 :])
    return Step(replace(state, items=items), effects)


TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (Idle, RequestReceived): _accept,
    (Idle, SourcePinned): _unpin_stray,
    (Open, RequestReceived): _accept_newer,
    (Open, GrantReceived): _grant,
    (Open, JobReady): _job_ready,
    (Open, JobEvicted): _job_evicted,
    (Open, JobFailed): _job_failed,
    (Open, SourcePinned): _announce,
    (Open, SourceGone): _source_gone,
    (Open, ReceiptReceived): _receive,
    (Open, CancelReceived): _cancel,
    (Open, SessionEnded): _lose_session,
    (Open, DrainWanted): _drain,
    (Open, TimerExpired): _expire,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: Limits) -> Step:
    """Total and pure (see `machine.py`)."""
    return dispatch(TRANSITIONS, state, event, now_s, limits)


def state_name(state: AnyState) -> str:
    """The name people see, derived from the pair (job, grant) in this one place."""
    if isinstance(state, Idle):
        return "freed"
    if all(isinstance(item, Received) for item in state.items):
        return "rdma-written"
    if any(isinstance(item, Announced | Received) for item in state.items):
        return "forward-done"
    return "metadata" if state.grant is None else "buffer-registered"
