"""The rank group's machine, at rank 0: one order for all ranks, and what they all have said (I6).

A group is the prefill ranks that need the same embedding; `rank.py` is the machine of each of them,
rank 0 included. It stands between the request and slot machines and the consumers:

- What rank 0 tells the ranks is a numbered log: read, deliver, fail, cancel, free. Every rank
  applies it in order; nothing is resent, so a rank that misses an entry is lost.
- Each rank reads for itself. The read of an item has ended for the request machine when it has
  ended on every rank, and was good if all were; so a `Receipt` goes out when all have read.
- A lease is free when every rank has said so: its reads terminal, its view released.
- Rank 0's `poll()` shows what every rank has applied (`Commit`): what its engine decides to do,
  every other rank can do too.
- A group has one incarnation, named in all that ranks say. A rank that is lost, or that comes
  again, ends it for all: its memory and its place in the log cannot be had back.

A group of one is the same machine with one rank.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import ClassVar, Final, dataclass_transform

import msgspec
from msgspec.structs import replace

from epd.protocol.errors import Cancelled
from epd.protocol.ids import Attempt, Incarnation, LeaseId, Part, SessionId, TransferId
from epd.protocol.machine import Effect, Event, Ignored, State, Step, dispatch, ignored
from epd.protocol.messages import EmbeddingSpec, ErrorValue, Source, Struct

Rank = int
Ranks = frozenset[Rank]


class Limits(msgspec.Struct, frozen=True):
    """This machine has no deadlines: reads have the slot machine's, requests their own."""


# -- the log -----------------------------------------------------------------------------------


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Entry(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of what the log holds."""


class Read(Entry):
    """Read this source into the item's slot."""

    lease: LeaseId
    session: SessionId
    part: Part
    attempt: Attempt
    item: int
    source: Source
    digest: bytes | None = None


class Deliver(Entry):
    """Whole on every rank: the consumer gets its view."""

    transfer: TransferId
    lease: LeaseId
    specs: tuple[EmbeddingSpec, ...]


class Fail(Entry):
    transfer: TransferId
    error: ErrorValue


class Cancel(Entry):
    transfer: TransferId
    error: ErrorValue


class Free(Entry):
    """The lease is over; a rank answers when none of its reads into it runs any more."""

    lease: LeaseId


AnyEntry = Read | Deliver | Fail | Cancel | Free


# -- states ------------------------------------------------------------------------------------


class Gathered(Struct):
    """The reads of one item: `missing` are the ranks whose read has not ended; the first error stays."""

    item: int
    part: Part
    attempt: Attempt
    missing: Ranks
    error: ErrorValue | None = None


class Held(Struct):
    """A lease, on all ranks. `viewing` ranks were told to deliver and have not released yet;
    `freeing` ranks, once it is `returned`, may still have a read into it."""

    lease: LeaseId
    transfer: TransferId
    reads: tuple[Gathered, ...] = ()
    delivered: bool = False
    returned: bool = False
    viewing: Ranks = frozenset()
    freeing: Ranks = frozenset()


class Unformed(State):
    """There is no group."""

    deadline_s: None = None
    final: ClassVar[bool] = True


class Forming(State):
    """Waiting for `missing` ranks; nothing was told to any yet."""

    group: Incarnation
    ranks: int
    missing: Ranks
    deadline_s: None = None
    final: ClassVar[bool] = False


class Leading(State):
    """`appended` is the log's last number; `applied` each rank's; `leases` are in order of their number."""

    group: Incarnation
    applied: tuple[int, ...]
    appended: int = 0
    leases: tuple[Held, ...] = ()
    deadline_s: None = None
    final: ClassVar[bool] = False


class Over(State):
    """The group's incarnation has ended: all ranks start again."""

    deadline_s: None = None
    final: ClassVar[bool] = True


AnyState = Unformed | Forming | Leading | Over
INITIAL: Final = Unformed()


# -- events ------------------------------------------------------------------------------------


class GroupFormed(Event):
    """Rank 0 begins a group of `ranks` (1 or more) ranks."""

    group: Incarnation
    ranks: int


class RankJoined(Event):
    group: Incarnation
    rank: Rank


class RankLost(Event):
    """The connection to this rank, or the rank itself, has ended."""

    group: Incarnation
    rank: Rank


class LeaseTaken(Event):
    """Rank 0 has leased; the extents hold on every rank."""

    lease: LeaseId
    transfer: TransferId


class ReadWanted(Event):
    """The request machine's `StartRead`."""

    read: Read


class DeliverWanted(Event):
    lease: LeaseId
    specs: tuple[EmbeddingSpec, ...]


class EndWanted(Event):
    """The request failed, or was cancelled."""

    transfer: TransferId
    error: ErrorValue


class ReturnWanted(Event):
    """The request machine's `ReturnLease`."""

    lease: LeaseId


class RankApplied(Event):
    """This rank has applied all entries up to `number`."""

    group: Incarnation
    rank: Rank
    number: int


class RankRead(Event):
    """This rank's read of an item has ended; `error` is None if it is whole there."""

    group: Incarnation
    rank: Rank
    lease: LeaseId
    part: Part
    attempt: Attempt
    item: int
    error: ErrorValue | None


class RankReleased(Event):
    """This rank's consumer has released its view."""

    group: Incarnation
    rank: Rank
    lease: LeaseId


class RankFreed(Event):
    """This rank has applied `Free`, and none of its reads into the lease runs any more."""

    group: Incarnation
    rank: Rank
    lease: LeaseId


AnyEvent = (
    GroupFormed
    | RankJoined
    | RankLost
    | LeaseTaken
    | ReadWanted
    | DeliverWanted
    | EndWanted
    | ReturnWanted
    | RankApplied
    | RankRead
    | RankReleased
    | RankFreed
)


# -- effects -----------------------------------------------------------------------------------


class Append(Effect):
    """Tell every rank, our own included, in the order of the numbers."""

    number: int
    entry: AnyEntry


class TellReadEnded(Effect):
    """To the request machine: the item's read has ended on every rank."""

    transfer: TransferId
    part: Part
    attempt: Attempt
    item: int
    error: ErrorValue | None


class TellReleased(Effect):
    """To the request machine: every rank's consumer has released."""

    transfer: TransferId


class Commit(Effect):
    """Every rank has applied all entries up to `number`: rank 0's `poll()` may show them."""

    number: int


class FreeLease(Effect):
    """No rank touches it any more: back to the pool."""

    lease: LeaseId


class EndGroup(Effect):
    """Every rank starts again."""

    reason: str


AnyEffect = Append | TellReadEnded | TellReleased | Commit | FreeLease | EndGroup | Ignored


# -- handlers ----------------------------------------------------------------------------------


def _form(_: Unformed, event: GroupFormed, now_s: float, limits: Limits) -> Step:
    return Step(Forming(event.group, event.ranks, frozenset(range(event.ranks))), ())


def _join(state: Forming, event: RankJoined, now_s: float, limits: Limits) -> Step:
    if event.group != state.group or event.rank not in state.missing:
        return ignored(state, event)
    missing = state.missing - {event.rank}
    if missing:
        return Step(replace(state, missing=missing), ())
    return Step(Leading(state.group, (0,) * state.ranks), ())


def _join_again(state: Leading, event: RankJoined, now_s: float, limits: Limits) -> Step:
    """It has begun anew: its slots and its place in the log are gone, so nobody can go on."""
    if not _ours(state, event):
        return ignored(state, event)
    return Step(Over(), (EndGroup(f"rank {event.rank} came again"),))


def _lose(state: Forming | Leading, event: RankLost, now_s: float, limits: Limits) -> Step:
    if event.group != state.group:
        return ignored(state, event)
    return Step(Over(), (EndGroup(f"rank {event.rank} was lost"),))


def _take(state: Leading, event: LeaseTaken, now_s: float, limits: Limits) -> Step:
    at = _place(state, event.lease)
    if _find(state, event.lease) is not None:
        return ignored(state, event)
    held = Held(event.lease, event.transfer)
    return Step(replace(state, leases=(*state.leases[:at], held, *state.leases[at:])), ())


def _want_read(state: Leading, event: ReadWanted, now_s: float, limits: Limits) -> Step:
    read = event.read
    held = _find(state, read.lease)
    if held is None or held.returned or held.delivered:
        return ignored(state, event)
    # A newer attempt's read takes the item's place: what ranks say of the older is nobody's any more.
    others = tuple(gathered for gathered in held.reads if gathered.item != read.item)
    gathered = Gathered(read.item, read.part, read.attempt, _all(state))
    return _append(_put(state, replace(held, reads=(*others, gathered))), read)


def _gather(state: Leading, event: RankRead, now_s: float, limits: Limits) -> Step:
    held = _find(state, event.lease) if _ours(state, event) else None
    gathered = None if held is None else _gathered(held, event)
    if held is None or gathered is None or event.rank not in gathered.missing:
        return ignored(state, event)
    heard = replace(gathered, missing=gathered.missing - {event.rank}, error=gathered.error or event.error)
    if heard.missing:
        reads = tuple(heard if other is gathered else other for other in held.reads)
        return Step(_put(state, replace(held, reads=reads)), ())
    rest = tuple(other for other in held.reads if other is not gathered)
    told = TellReadEnded(held.transfer, heard.part, heard.attempt, heard.item, heard.error)
    return Step(_put(state, replace(held, reads=rest)), (told,))


def _deliver(state: Leading, event: DeliverWanted, now_s: float, limits: Limits) -> Step:
    held = _find(state, event.lease)
    if held is None or held.delivered or held.returned:
        return ignored(state, event)
    delivered = replace(held, delivered=True, viewing=_all(state))
    return _append(_put(state, delivered), Deliver(held.transfer, held.lease, event.specs))


def _end(state: Leading, event: EndWanted, now_s: float, limits: Limits) -> Step:
    kind = Cancel if event.error.code == Cancelled.code else Fail
    return _append(state, kind(event.transfer, event.error))


def _release(state: Leading, event: RankReleased, now_s: float, limits: Limits) -> Step:
    held = _find(state, event.lease) if _ours(state, event) else None
    if held is None or event.rank not in held.viewing:
        return ignored(state, event)
    released = replace(held, viewing=held.viewing - {event.rank})
    if released.viewing:
        return Step(_put(state, released), ())
    return Step(_put(state, released), (TellReleased(held.transfer),))


def _return(state: Leading, event: ReturnWanted, now_s: float, limits: Limits) -> Step:
    held = _find(state, event.lease)
    if held is None or held.returned or held.viewing:
        return ignored(state, event)
    returned = replace(held, returned=True, reads=(), freeing=_all(state))
    return _append(_put(state, returned), Free(held.lease))


def _free(state: Leading, event: RankFreed, now_s: float, limits: Limits) -> Step:
    held = _find(state, event.lease) if _ours(state, event) else None
    if held is None or event.rank not in held.freeing:
        return ignored(state, event)
    freed = replace(held, freeing=held.freeing - {event.rank})
    if freed.freeing:
        return Step(_put(state, freed), ())
    rest = tuple(other for other in state.leases if other is not held)
    return Step(replace(state, leases=rest), (FreeLease(held.lease),))


def _apply(state: Leading, event: RankApplied, now_s: float, limits: Limits) -> Step:
    if not _ours(state, event) or not state.applied[event.rank] < event.number <= state.appended:
        return ignored(state, event)
    common = min(state.applied)
    applied = (*state.applied[: event.rank], event.number, *state.applied[event.rank + 1 :])
    grown = (Commit(min(applied)),) if min(applied) > common else ()
    return Step(replace(state, applied=applied), grown)


# -- of a group --------------------------------------------------------------------------------


def _append(state: Leading, entry: AnyEntry) -> Step:
    number = state.appended + 1
    return Step(replace(state, appended=number), (Append(number, entry),))


def _ours(state: Leading, event: RankJoined | RankApplied | RankRead | RankReleased | RankFreed) -> bool:
    return event.group == state.group and 0 <= event.rank < len(state.applied)


def _all(state: Leading) -> Ranks:
    return frozenset(range(len(state.applied)))


def _place(state: Leading, lease: LeaseId) -> int:
    return bisect_left(state.leases, lease, key=_number)


def _number(held: Held) -> LeaseId:
    return held.lease


def _find(state: Leading, lease: LeaseId) -> Held | None:
    at = _place(state, lease)
    return state.leases[at] if at < len(state.leases) and state.leases[at].lease == lease else None


def _put(state: Leading, held: Held) -> Leading:
    at = _place(state, held.lease)
    return replace(state, leases=(*state.leases[:at], held, *state.leases[at + 1 :]))


def _gathered(held: Held, event: RankRead) -> Gathered | None:
    wanted = (event.part, event.attempt, event.item)
    return next((one for one in held.reads if (one.part, one.attempt, one.item) == wanted), None)


TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (Unformed, GroupFormed): _form,
    (Forming, RankJoined): _join,
    (Forming, RankLost): _lose,
    (Leading, RankJoined): _join_again,
    (Leading, RankLost): _lose,
    (Leading, LeaseTaken): _take,
    (Leading, ReadWanted): _want_read,
    (Leading, DeliverWanted): _deliver,
    (Leading, EndWanted): _end,
    (Leading, ReturnWanted): _return,
    (Leading, RankApplied): _apply,
    (Leading, RankRead): _gather,
    (Leading, RankReleased): _release,
    (Leading, RankFreed): _free,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: Limits) -> Step:
    """Total and pure (see `machine.py`)."""
    return dispatch(TRANSITIONS, state, event, now_s, limits)
