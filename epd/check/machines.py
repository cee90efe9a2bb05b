"""The shipped machines as the checker runs them: memoised, and with every cell of their tables counted.

Time is left out of the explored states. Events are fed at second 0, so deadlines are constants, and
`TimerExpired` is fed at the deadline that is to pass, whenever the explorer likes.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, NamedTuple

from epd.check.relation import Transition, transitions_of
from epd.protocol import encoder, group, jobs, prefill, rank, reads, session, slots, sources
from epd.protocol import prefill_types as t
from epd.protocol.machine import Effect, Event, Step

PAUSE_S: Final = 5.0
METADATA_S: Final = 10.0
ROOM_S: Final = 20.0
WARNING_S: Final = 30.0
DEADLINE_S: Final = 100.0
READ_S: Final = 50.0

StepFunction = Callable[[Any, Any, float, Any], Step]
Patch = Callable[[StepFunction], StepFunction]
"""Wraps a machine's step: how a bug is seeded."""
Cell = tuple[str, str, str]
"""Machine, state, event."""


class Kind(NamedTuple):
    initial: Any
    step: StepFunction
    limits: Any
    tables: tuple[Mapping[tuple[type, type], Any], ...]


def shipped(attempts: int) -> dict[str, Kind]:
    """The machines of a node pair; a request makes at most so many `attempts` of a part."""
    request_limits = t.Limits(METADATA_S, ROOM_S, WARNING_S, attempts, PAUSE_S, PAUSE_S)
    slot_limits = slots.Limits(READ_S, 4.0)  # a second per row of 4 B: sizes have deadlines of their own
    tables = (prefill.TRANSITIONS, prefill.PART_TRANSITIONS)
    return {
        "request": Kind(prefill.INITIAL, prefill.step, request_limits, tables),
        "slot": Kind(slots.INITIAL, slots.step, slot_limits, (slots.TRANSITIONS,)),
        "read": Kind(reads.INITIAL, reads.step, reads.Limits(3), (reads.TRANSITIONS,)),
        "part": Kind(encoder.INITIAL, encoder.step, encoder.Limits(), (encoder.TRANSITIONS,)),
        "job": Kind(jobs.INITIAL, jobs.step, jobs.Limits(), (jobs.TRANSITIONS,)),
        "group": Kind(group.INITIAL, group.step, group.Limits(), (group.TRANSITIONS,)),
        "rank": Kind(rank.INITIAL, rank.step, rank.Limits(), (rank.TRANSITIONS,)),
        "session": Kind(session.INITIAL, session.step, session.SessionLimits(), (session.TRANSITIONS,)),
        "source": Kind(sources.INITIAL, sources.step, sources.Limits(), (sources.TRANSITIONS,)),
    }


def cells_of(kinds: Mapping[str, Kind]) -> set[Cell]:
    """Every cell of the tables."""
    return {
        (name, state.__name__, event.__name__)
        for name, kind in kinds.items()
        for table in kind.tables
        for state, event in table
    }


class Machines:
    """Steps the machines; `visited` are the cells that were and `relation` what they did there, `log` takes
    a line per step if it is a list."""

    def __init__(self, kinds: Mapping[str, Kind], patches: Mapping[str, Patch]) -> None:
        self._kinds = dict(kinds)
        for name, patch in patches.items():
            kind = self._kinds[name]
            self._kinds[name] = kind._replace(step=patch(kind.step))
        self._memo: dict[tuple[str, Any, Any, float], Step] = {}
        self.visited: set[Cell] = set()
        self.relation: set[Transition] = set()
        self.log: list[str] | None = None

    def initial(self, name: str) -> Any:
        return self._kinds[name].initial

    def step(self, name: str, state: Any, event: Event, now_s: float = 0.0) -> Step:
        key = (name, state, event, now_s)
        step = self._memo.get(key)
        if step is None:
            kind = self._kinds[name]
            step = self._memo[key] = kind.step(state, event, now_s, kind.limits)
            self._note(name, state, event)
            self.relation.update(transitions_of(name, state, event, step.state, step.effects))
        return step

    def _note(self, name: str, state: Any, event: Event) -> None:
        happened = type(event).__name__
        self.visited.add((name, type(state).__name__, happened))
        number = getattr(event, "part", None)
        parts = getattr(state, "parts", ())
        if name == "request" and number is not None and 0 <= number < len(parts):
            part = parts[number]
            if getattr(event, "attempt", part.attempt) == part.attempt:
                self.visited.add((name, type(part).__name__, happened))


class Table:
    """Machines of one kind; like the runtime's, an event fed by an effect waits for the other effects.

    Keys whose machine is final, or in its initial state, have no entry.
    """

    def __init__(
        self,
        name: str,
        machines: Machines,
        states: tuple[tuple[Any, Any], ...],
        perform: Callable[[Any, tuple[Effect, ...]], None],
    ) -> None:
        self._name, self._machines, self._perform = name, machines, perform
        self.states: dict[Any, Any] = dict(states)
        self._waiting: deque[tuple[Hashable, Event, float]] = deque()
        self._busy = False

    def state(self, key: Hashable) -> Any:
        return self.states.get(key, self._machines.initial(self._name))

    def feed(self, key: Hashable, event: Event, now_s: float = 0.0) -> None:
        self._waiting.append((key, event, now_s))
        if self._busy:
            return
        self._busy = True
        while self._waiting:
            key, event, now_s = self._waiting.popleft()
            before = self.state(key)
            after, effects = self._machines.step(self._name, before, event, now_s)
            if self._machines.log is not None:
                self._machines.log.append(described(self._name, key, before, event, after, effects))
            self.put(key, after)
            self._perform(key, effects)
        self._busy = False

    def put(self, key: Hashable, state: Any) -> None:
        if state.final or state == self._machines.initial(self._name):
            self.states.pop(key, None)
        else:
            self.states[key] = state

    def frozen(self) -> tuple[tuple[Any, Any], ...]:
        return tuple(sorted(self.states.items(), key=lambda entry: entry[0]))


def described(
    name: str, key: Hashable, before: Any, event: Event, after: Any, effects: tuple[Effect, ...]
) -> str:
    """One machine's step for people: `slot 1: Leased->Quarantined on LeaseReturned  AbortRead`."""
    keys = ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
    moved = type(before).__name__
    if type(after) is not type(before):
        moved = f"{moved}->{type(after).__name__}"
    did = "  ".join(type(effect).__name__ for effect in effects)
    return f"{name} {keys}: {moved} on {type(event).__name__}" + (f"  {did}" if did else "")
