"""The transition relation of the machines, in few enough words to be compared.

A `Transition` is one step without its numbers: the types of the state before, the event, the state after and
the effects (which, not how many or in which order), each with what else has few values: flags that are set,
the lane, whether there is an error, the sort of a log entry. A step that moved several of a request's parts
or of a part's items is a transition for each. So they are finite whatever a node did, and small explorations
have met most of them.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any, Final, NamedTuple

from epd.protocol.group import Entry
from epd.protocol.machine import Effect, Event, State
from epd.protocol.messages import ErrorValue

MACHINES: Final = {
    "encoder": "part",
    "group": "group",
    "jobs": "job",
    "prefill": "request",
    "push": "push",
    "rank": "rank",
    "reads": "read",
    "session": "session",
    "slots": "slot",
    "sources": "source",
}
"""What a machine is called here, by the kind under which nodes record it."""


class Transition(NamedTuple):
    """`moved`: what the step made of a state inside of the state, `Granted->Read`; empty if of none."""

    machine: str
    state: str
    event: str
    after: str
    effects: tuple[str, ...] = ()
    moved: str = ""

    def __str__(self) -> str:
        states = self.state if self.after == self.state else f"{self.state}->{self.after}"
        inside = f" ({self.moved})" if self.moved else ""
        did = f"  {' '.join(self.effects)}" if self.effects else ""
        return f"{self.machine}: {states}{inside} on {self.event}{did}"


def transitions_of(
    machine: str, before: State, event: Event, after: State, effects: Iterable[Effect]
) -> list[Transition]:
    """The step, abstracted."""
    did = tuple(sorted({_words(effect) for effect in effects}))
    return [
        Transition(machine, _words(before), _words(event), _words(after), did, moved)
        for moved in _moved(before, after)
    ]


def _words(value: Any) -> str:
    """The type, and of what it holds that which has few values: `Open(dialler, suspect)`."""
    name = type(value).__name__
    facets = [facet for field in value.__struct_fields__ if (facet := _facet(field, getattr(value, field)))]
    return f"{name}({', '.join(facets)})" if facets else name


def _facet(field: str, value: Any) -> str | None:
    match value:
        case True | ErrorValue():
            return field
        case Enum():
            return value.name.lower()
        case Entry():
            return type(value).__name__
        case _:
            return None


def _moved(before: State, after: State) -> set[str]:
    """What is inside when the step makes or ends it does not count."""
    ours, theirs = _inside(before), _inside(after)
    if len(ours) != len(theirs):
        return {""}
    pairs = zip(ours, theirs, strict=True)
    return {f"{_words(was)}->{_words(now)}" for was, now in pairs if was != now} or {""}


def _inside(state: Any) -> tuple[State, ...]:
    """The states that this one holds, of its parts or its items."""
    for field in state.__struct_fields__:
        value = getattr(state, field)
        if isinstance(value, tuple) and value and isinstance(value[0], State):
            return value
    return ()
