"""The slot machine: one per lease of the prefill pool (I1).

A slot is written only by reads that this node posted, and leased again, or read into again, only
when every read into it is terminal by our own engine's word. So a request may end at any time; its
lease lives on here, `quarantined`, until the engine has spoken. A deadline never frees: it aborts.
"""

from collections.abc import Callable
from typing import ClassVar, Final

import msgspec
from msgspec.structs import replace

from epd.protocol.errors import DigestMismatch, ReadFailed, SealMismatch, SourceInvalid
from epd.protocol.ids import Attempt, LeaseId, Part, ReadId, SessionId
from epd.protocol.machine import Effect, Event, Ignored, State, Step, TimerExpired, dispatch, ignored
from epd.protocol.messages import ErrorValue, Source, Struct


class Limits(msgspec.Struct, frozen=True):
    """A read may take `read_base_s + nbytes / read_min_bandwidth_bytes_per_s` from its posting."""

    read_base_s: float = 5.0
    read_min_bandwidth_bytes_per_s: float = 50e6


class Wanted(Struct):
    """A read somebody waits for: `read` is our own number, never reused."""

    read: ReadId
    session: SessionId
    part: Part
    attempt: Attempt
    item: int
    source: Source
    digest: bytes | None = None


class Running(Struct):
    """A read our engine may still write for; `deadline_s` is None until it was posted or aborted."""

    wanted: Wanted
    deadline_s: float | None = None
    aborted: bool = False
    next: Wanted | None = None
    """A newer attempt's read into the same item, posted when this one is terminal."""


class Free(State):
    """Not leased: the extents belong to the pool."""

    deadline_s: None = None
    final: ClassVar[bool] = True


class Leased(State):
    """Held by a request; `reads` are running."""

    lease: LeaseId
    reads: tuple[Running, ...] = ()
    final: ClassVar[bool] = False

    @property
    def deadline_s(self) -> float | None:
        return _earliest(self.reads)


class Quarantined(State):
    """Given back by its request or consumer, while our engine may still write into it."""

    lease: LeaseId
    reads: tuple[Running, ...]
    final: ClassVar[bool] = False

    @property
    def deadline_s(self) -> float | None:
        return _earliest(self.reads)


def _earliest(reads: tuple[Running, ...]) -> float | None:
    return min((r.deadline_s for r in reads if r.deadline_s is not None), default=None)


AnyState = Free | Leased | Quarantined
INITIAL: Final = Free()


class LeaseTaken(Event):
    lease: LeaseId


class ReadWanted(Event):
    wanted: Wanted


class ReadPosted(Event):
    """The engine has it: from now on its deadline counts."""

    read: ReadId


class ReadTerminal(Event):
    """The engine's last word: `ok`, `seal_mismatch`, `digest_mismatch`, `failed`, `refused`, `aborted`."""

    read: ReadId
    outcome: str


class LeaseReturned(Event):
    """The request, or the consumer, is done with the lease."""


AnyEvent = LeaseTaken | ReadWanted | ReadPosted | ReadTerminal | LeaseReturned | TimerExpired


class PostRead(Effect):
    wanted: Wanted


class AbortRead(Effect):
    """End this read by our own side, and go on polling it."""

    read: ReadId
    session: SessionId


class TellReadEnded(Effect):
    part: Part
    attempt: Attempt
    item: int
    error: ErrorValue | None


class FreeExtents(Effect):
    """Our engine does not touch the memory any more: back to the pool, once no rank does (`group.py`)."""

    lease: LeaseId


AnyEffect = PostRead | AbortRead | TellReadEnded | FreeExtents | Ignored


def _take(_: Free, event: LeaseTaken, now_s: float, limits: Limits) -> Step:
    return Step(Leased(event.lease), ())


def _want(state: Leased, event: ReadWanted, now_s: float, limits: Limits) -> Step:
    wanted = event.wanted
    for running in state.reads:
        if running.wanted.item == wanted.item:
            newest = running.next or running.wanted
            if wanted.read <= newest.read:
                return ignored(state, event)
            # Not posted yet: the older read may still write into this extent (I1).
            effects: tuple[Effect, ...] = ()
            if not running.aborted:
                effects = (AbortRead(running.wanted.read, running.wanted.session),)
            waiting = replace(running, next=wanted, aborted=True, deadline_s=None)
            return Step(replace(state, reads=_swap(state.reads, running, waiting)), effects)
    return Step(replace(state, reads=(*state.reads, Running(wanted))), (PostRead(wanted),))


def _post(state: Leased | Quarantined, event: ReadPosted, now_s: float, limits: Limits) -> Step:
    running = _find(state.reads, event.read)
    if running is None or running.aborted:
        return ignored(state, event)
    read_s = limits.read_base_s + running.wanted.source.nbytes / limits.read_min_bandwidth_bytes_per_s
    timed = replace(running, deadline_s=now_s + read_s)
    return Step(replace(state, reads=_swap(state.reads, running, timed)), ())


def _end_read(state: Leased, event: ReadTerminal, now_s: float, limits: Limits) -> Step:
    running = _find(state.reads, event.read)
    if running is None:
        return ignored(state, event)
    if running.next is not None:
        following = Running(running.next)
        return Step(replace(state, reads=_swap(state.reads, running, following)), (PostRead(running.next),))
    rest = tuple(r for r in state.reads if r is not running)
    w = running.wanted
    told = TellReadEnded(w.part, w.attempt, w.item, _error(event.outcome, w))
    # An aborted read was reported when its deadline passed; the attempt has ended.
    return Step(replace(state, reads=rest), () if running.aborted else (told,))


def _end_quarantined(state: Quarantined, event: ReadTerminal, now_s: float, limits: Limits) -> Step:
    running = _find(state.reads, event.read)
    if running is None:
        return ignored(state, event)
    rest = tuple(r for r in state.reads if r is not running)
    if rest:
        return Step(replace(state, reads=rest), ())
    return Step(Free(), (FreeExtents(state.lease),))


def _give_back(state: Leased, event: LeaseReturned, now_s: float, limits: Limits) -> Step:
    if not state.reads:
        return Step(Free(), (FreeExtents(state.lease),))
    # A healthy read ends by itself, unseen; its own deadline aborts it if it does not.
    return Step(Quarantined(state.lease, tuple(replace(r, next=None) for r in state.reads)), ())


def _abort_late(state: Leased | Quarantined, event: TimerExpired, now_s: float, limits: Limits) -> Step:
    effects: list[Effect] = []
    reads: list[Running] = []
    for running in state.reads:
        if running.deadline_s is None or now_s < running.deadline_s:
            reads.append(running)
            continue
        w = running.wanted
        effects.append(AbortRead(w.read, w.session))
        if isinstance(state, Leased):
            effects.append(TellReadEnded(w.part, w.attempt, w.item, _error("timeout", w)))
        reads.append(replace(running, aborted=True, deadline_s=None))
    return Step(replace(state, reads=tuple(reads)), tuple(effects))


def _error(outcome: str, wanted: Wanted) -> ErrorValue | None:
    nbytes, region, offset = wanted.source.nbytes, wanted.source.region, wanted.source.offset
    where = f"{nbytes} B at region {region} offset {offset}"
    match outcome:
        case "ok":
            return None
        case "seal_mismatch":
            return SealMismatch(f"source reused before the read had ended: {where}").as_value(wanted.item)
        case "digest_mismatch":
            return DigestMismatch(f"bytes differ from the encoder's digest: {where}").as_value(wanted.item)
        case "refused":
            return SourceInvalid(f"source outside of what the peer announced: {where}").as_value(wanted.item)
        case _:
            return ReadFailed(f"read ended {outcome}: {where}").as_value(wanted.item)


def _find(reads: tuple[Running, ...], read: ReadId) -> Running | None:
    return next((r for r in reads if r.wanted.read == read), None)


def _swap(reads: tuple[Running, ...], old: Running, new: Running) -> tuple[Running, ...]:
    return tuple(new if r is old else r for r in reads)


TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (Free, LeaseTaken): _take,
    (Leased, ReadWanted): _want,
    (Leased, ReadPosted): _post,
    (Leased, ReadTerminal): _end_read,
    (Leased, LeaseReturned): _give_back,
    (Leased, TimerExpired): _abort_late,
    (Quarantined, ReadPosted): _post,
    (Quarantined, ReadTerminal): _end_quarantined,
    (Quarantined, TimerExpired): _abort_late,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: Limits) -> Step:
    """Total and pure (see `machine.py`)."""
    return dispatch(TRANSITIONS, state, event, now_s, limits)
