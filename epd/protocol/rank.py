"""The machine of one rank of a group: it applies rank 0's log in order, and nothing else (I6).

An entry is applied in its place or not at all: a repeat is ignored, and after a gap this rank can
never be like the others again, so its incarnation ends, and the group's with it (`group.py`).
"""

from collections.abc import Callable
from typing import ClassVar, Final

import msgspec

from epd.protocol.group import AnyEntry, Cancel, Deliver, Fail, Rank
from epd.protocol.ids import Incarnation
from epd.protocol.machine import Effect, Event, Ignored, State, Step, dispatch, ignored


class Limits(msgspec.Struct, frozen=True):
    """This machine has no deadlines."""


class Outside(State):
    """In no group."""

    deadline_s: None = None
    final: ClassVar[bool] = True


class Following(State):
    """All entries up to `applied` were applied, in order."""

    group: Incarnation
    rank: Rank
    applied: int = 0
    deadline_s: None = None
    final: ClassVar[bool] = False


class Over(State):
    """The group's incarnation has ended; this rank starts again."""

    deadline_s: None = None
    final: ClassVar[bool] = True


AnyState = Outside | Following | Over
INITIAL: Final = Outside()


class Joined(Event):
    """Rank 0 was told that we are there, with nothing held and nothing applied."""

    group: Incarnation
    rank: Rank


class EntryReceived(Event):
    group: Incarnation
    number: int
    entry: AnyEntry


class GroupEnded(Event):
    """Rank 0's word, or the connection to it has ended."""

    group: Incarnation


AnyEvent = Joined | EntryReceived | GroupEnded


class Apply(Effect):
    """Perform the entry: start the read, hand the delivery or the error to `poll()`, free the lease."""

    number: int
    entry: AnyEntry


class SendApplied(Effect):
    """To rank 0; only of what `poll()` shows, because only that has to wait for the others."""

    number: int


class EndIncarnation(Effect):
    reason: str


AnyEffect = Apply | SendApplied | EndIncarnation | Ignored


def _join(_: Outside, event: Joined, now_s: float, limits: Limits) -> Step:
    return Step(Following(event.group, event.rank), ())


def _apply(state: Following, event: EntryReceived, now_s: float, limits: Limits) -> Step:
    due = state.applied + 1
    if event.group != state.group or event.number < due:
        return ignored(state, event)
    if event.number > due:
        return Step(Over(), (EndIncarnation(f"entry {event.number} of the log where {due} was due"),))
    effects: tuple[Effect, ...] = (Apply(event.number, event.entry),)
    if isinstance(event.entry, Deliver | Fail | Cancel):
        effects = (*effects, SendApplied(event.number))
    return Step(Following(state.group, state.rank, due), effects)


def _end(state: Following, event: GroupEnded, now_s: float, limits: Limits) -> Step:
    if event.group != state.group:
        return ignored(state, event)
    return Step(Over(), (EndIncarnation("the group has ended"),))


TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (Outside, Joined): _join,
    (Following, EntryReceived): _apply,
    (Following, GroupEnded): _end,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: Limits) -> Step:
    """Total and pure (see `machine.py`)."""
    return dispatch(TRANSITIONS, state, event, now_s, limits)
