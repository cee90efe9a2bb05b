"""What all machines share: the step, its total dispatch, and the base types of its values.

A machine is a module with states, events and effects as frozen structs, a table
`TRANSITIONS[(state type, event type)] -> handler`, and `step(state, event, now_s, limits)`:
total, pure, no clock, randomness, ids or IO inside; they arrive in events. The order of effects is
meaningful. `state.deadline_s` (or None) is the one deadline of a state; the runtime feeds
`TimerExpired` only when the *current* state's deadline has passed. A trace record is one step.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class State(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Base of all states: hashable, encodable."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Event(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all events: hashable, encodable; never holds payload or media bytes."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Effect(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all effects."""


class TimerExpired(Event):
    """The deadline of the current state has passed."""


class Ignored(Effect):
    """The event changed nothing here; counted, by the event's name."""

    event: str


class Step(NamedTuple):
    state: Any
    effects: tuple[Effect, ...]


Handler = Callable[[Any, Any, float, Any], Step]
Table = Mapping[tuple[type, type], Handler]


def ignored(state: Any, event: Event) -> Step:
    """The event changes nothing in this state."""
    return Step(state, (Ignored(type(event).__name__),))


def dispatch(table: Table, state: Any, event: Event, now_s: float, limits: Any) -> Step:
    """Total: a pair that is not in the table changes nothing and is reported as `Ignored`."""
    handler = table.get((type(state), type(event)))
    if handler is None:
        return ignored(state, event)
    return handler(state, event, now_s, limits)
