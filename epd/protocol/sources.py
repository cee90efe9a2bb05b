"""The source machine: one per staged result on the encoder (I2).

A staging slot is pinned only while its forward runs or between `ForwardDone` and `Receipt`;
otherwise it may be evicted. When it is freed its seal is changed first, visibly to a reader before
any byte of it is reused. Pins are named, never counted: a repeat changes nothing.
"""

import struct
from collections.abc import Callable, Iterable
from typing import ClassVar, Final

import msgspec
from msgspec.structs import replace

from epd.protocol.ids import Attempt, LeaseId, Part, Seal, SessionId, TransferId
from epd.protocol.machine import Effect, Event, Ignored, State, Step, TimerExpired, dispatch, ignored
from epd.protocol.messages import Struct

SEAL_WORD: Final = struct.Struct("<Q")
"""A seal as it stands in memory."""


def seal_offset(nbytes: int) -> int:
    """Where the seal of a payload of `nbytes` stands, from the payload's start: both sides agree on it."""
    return (nbytes + SEAL_WORD.size - 1) & -SEAL_WORD.size


def sealed_nbytes(nbytes: int) -> int:
    """Of a slot with a seal: the payload and, behind it, the seal."""
    return seal_offset(nbytes) + SEAL_WORD.size


class Limits(msgspec.Struct, frozen=True):
    """This machine has no deadlines."""


class Subscriber(Struct):
    """Who wants one item: one attempt of one part, and the item's number in its request."""

    session: SessionId
    transfer: TransferId
    part: Part
    attempt: Attempt
    item: int


class Vacant(State):
    deadline_s: None = None
    final: ClassVar[bool] = True


class Writing(State):
    """A forward writes into it, until the worker's own word or death. `unwanted`: free it then.

    `waiting` want to pin it: they heard of its end before it did.
    """

    staged: LeaseId
    seal: Seal
    next_seal: Seal
    unwanted: bool = False
    waiting: tuple[Subscriber, ...] = ()
    deadline_s: None = None
    final: ClassVar[bool] = False


class Stable(State):
    """Whole. `pins` are readers between `ForwardDone` and `Receipt`."""

    staged: LeaseId
    seal: Seal
    next_seal: Seal
    pins: tuple[Subscriber, ...] = ()
    unwanted: bool = False
    deadline_s: None = None
    final: ClassVar[bool] = False


AnyState = Vacant | Writing | Stable
INITIAL: Final = Vacant()


class Reserved(Event):
    """A slot for one forward. Both seals are fresh: the one announced and the one that ends it."""

    staged: LeaseId
    seal: Seal
    next_seal: Seal


class Written(Event):
    """The worker's own word: the forward into it has ended well."""


class WriteEnded(Event):
    """The forward has ended without a result, by the worker's own word or its death."""


class PinWanted(Event):
    subscriber: Subscriber


class Unpinned(Event):
    subscriber: Subscriber


class EvictWanted(Event):
    """Room is short: free it if nobody reads it."""


class ReleaseWanted(Event):
    """Its job is over: free it as soon as nobody writes or reads it."""


AnyEvent = Reserved | Written | WriteEnded | PinWanted | Unpinned | EvictWanted | ReleaseWanted | TimerExpired


class WriteSeal(Effect):
    """Put the seal into the trailer, visibly before anything that follows."""

    staged: LeaseId
    seal: Seal


class FreeExtent(Effect):
    """Back to the staging pool; always after `WriteSeal` of another seal."""

    staged: LeaseId


class TellPinned(Effect):
    staged: LeaseId
    subscriber: Subscriber
    seal: Seal


class TellGone(Effect):
    """There is nothing to pin any more."""

    subscriber: Subscriber


class TellEvicted(Effect):
    staged: LeaseId


AnyEffect = WriteSeal | FreeExtent | TellPinned | TellGone | TellEvicted | Ignored


def _reserve(_: Vacant, event: Reserved, now_s: float, limits: Limits) -> Step:
    state = Writing(event.staged, event.seal, event.next_seal)
    return Step(state, (WriteSeal(event.staged, event.seal),))


def _settle_written(state: Writing, event: Written, now_s: float, limits: Limits) -> Step:
    if state.unwanted:
        return _give_up(state)
    told = tuple(TellPinned(state.staged, subscriber, state.seal) for subscriber in state.waiting)
    return Step(Stable(state.staged, state.seal, state.next_seal, state.waiting), told)


def _end_write(state: Writing, event: WriteEnded, now_s: float, limits: Limits) -> Step:
    return _give_up(state)


def _give_up(state: Writing) -> Step:
    freed = _free(state)
    return Step(freed.state, (*freed.effects, *map(TellGone, state.waiting)))


def _pin_later(state: Writing, event: PinWanted, now_s: float, limits: Limits) -> Step:
    return Step(replace(state, waiting=_with(state.waiting, event.subscriber)), ())


def _unpin_later(state: Writing, event: Unpinned, now_s: float, limits: Limits) -> Step:
    return Step(replace(state, waiting=_without(state.waiting, event.subscriber)), ())


def _release_writing(state: Writing, event: ReleaseWanted, now_s: float, limits: Limits) -> Step:
    return Step(replace(state, unwanted=True), ())


def _pin(state: Stable, event: PinWanted, now_s: float, limits: Limits) -> Step:
    if state.unwanted:
        return Step(state, (TellGone(event.subscriber),))
    pinned = replace(state, pins=_with(state.pins, event.subscriber))
    return Step(pinned, (TellPinned(state.staged, event.subscriber, state.seal),))


def _pin_gone(state: AnyState, event: PinWanted, now_s: float, limits: Limits) -> Step:
    return Step(state, (TellGone(event.subscriber),))


def _unpin(state: Stable, event: Unpinned, now_s: float, limits: Limits) -> Step:
    after = replace(state, pins=_without(state.pins, event.subscriber))
    return _free(after) if after.unwanted and not after.pins else Step(after, ())


def _evict(state: Stable, event: EvictWanted, now_s: float, limits: Limits) -> Step:
    if state.pins:
        return ignored(state, event)
    freed = _free(state)
    return Step(freed.state, (*freed.effects, TellEvicted(state.staged)))


def _release(state: Stable, event: ReleaseWanted, now_s: float, limits: Limits) -> Step:
    return Step(replace(state, unwanted=True), ()) if state.pins else _free(state)


def first_unread(states: Iterable[tuple[LeaseId, AnyState]]) -> LeaseId | None:
    """Which result to evict for room: the first that is whole and has no reader; None if there is none."""
    return next((staged for staged, state in states if isinstance(state, Stable) and not state.pins), None)


def _with(pins: tuple[Subscriber, ...], subscriber: Subscriber) -> tuple[Subscriber, ...]:
    return pins if subscriber in pins else (*pins, subscriber)


def _without(pins: tuple[Subscriber, ...], subscriber: Subscriber) -> tuple[Subscriber, ...]:
    return tuple(pin for pin in pins if pin != subscriber)


def _free(state: Writing | Stable) -> Step:
    return Step(Vacant(), (WriteSeal(state.staged, state.next_seal), FreeExtent(state.staged)))


TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (Vacant, Reserved): _reserve,
    (Vacant, PinWanted): _pin_gone,
    (Writing, Written): _settle_written,
    (Writing, WriteEnded): _end_write,
    (Writing, ReleaseWanted): _release_writing,
    (Writing, PinWanted): _pin_later,
    (Writing, Unpinned): _unpin_later,
    (Stable, PinWanted): _pin,
    (Stable, Unpinned): _unpin,
    (Stable, EvictWanted): _evict,
    (Stable, ReleaseWanted): _release,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: Limits) -> Step:
    """Total and pure (see `machine.py`)."""
    return dispatch(TRANSITIONS, state, event, now_s, limits)
