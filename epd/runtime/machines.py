"""Hosts the machines of one kind: feeds events, keeps states and deadlines, performs effects.

One table belongs to one actor and is used from the node's loop only. Keys are ints, strings, or
tuples of them. A key without an entry is in the machine's `INITIAL` state; one whose state is
`final`, or `INITIAL` again, has no entry, so what has ended leaves nothing behind (I4).
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, Final, Protocol

from epd.protocol.errors import EpdError
from epd.protocol.machine import Effect, Event, Ignored, State, Step, TimerExpired
from epd.runtime.clock import Clock
from epd.runtime.timers import TimerHandle, Timers

STORY_STEPS: Final = 16
"""At least so many of a machine's last steps stand in the error when it fails (at most twice)."""

_Told = tuple[float, Event, tuple[Effect, ...]]

Observe = Callable[[Any, Any, Any, Event, float, tuple[Effect, ...]], None]
"""`(key, before, after, event, now_s, effects)` of one step, before its effects are performed."""


class Machine(Protocol):
    """A machine module: total and pure (see `epd.protocol.machine`)."""

    @property
    def INITIAL(self) -> Any: ...  # noqa: N802 - the name of the module's constant

    @property
    def step(self) -> Callable[[Any, Any, float, Any], Step]: ...


class StepRecorder(Protocol):
    """Takes one record per step; `epd.runtime.recorder.Recorder`, or a test's list."""

    def declare(self, kind: str, limits: Any) -> None: ...

    def record(
        self,
        kind: str,
        key: Hashable,
        event: Event,
        now_s: float,
        effects: tuple[Effect, ...],
    ) -> None: ...


_Record = Callable[[str, Hashable, Event, float, tuple[Effect, ...]], None]


class MachineFailed(EpdError):
    """A machine broke its contract (it raised, or its deadline does not move): our own bug.

    `kind`, `key`, `state` and `event` say where; `story` has its last steps, one a line.
    """

    kind: str
    key: Hashable
    state: Any
    event: Event
    story: tuple[str, ...]


class _Entry:
    __slots__ = ("state", "story", "timer")

    def __init__(self, state: Any) -> None:
        self.state = state
        self.timer: TimerHandle | None = None
        self.story: list[_Told] = []


class MachineTable:
    """All machines of one kind.

    `machine` is a module with `INITIAL` and `step`. `perform(key, effects)` does the IO of one step;
    it is not called for a step without effects, and may feed (see `feed`). `ignored` counts the
    `Ignored` effects by (kind, state, event). Each of `observers` sees every step, and changes nothing.
    """

    def __init__(
        self,
        kind: str,
        machine: Machine,
        limits: Any,
        clock: Clock,
        timers: Timers,
        recorder: StepRecorder | None,
        perform: Callable[[Any, tuple[Effect, ...]], None],
    ) -> None:
        self.kind = kind
        self.ignored: Counter[tuple[str, str, str]] = Counter()
        self._initial = machine.INITIAL
        self._step = machine.step
        self._limits = limits
        self._clock = clock
        self._timers = timers
        self.observers: tuple[Observe, ...] = ()
        self._recorder: StepRecorder | None = None
        self._record: _Record | None = None
        self.recorder = recorder
        self._perform = perform
        self._entries: dict[Hashable, _Entry] = {}
        self._waiting: deque[tuple[Hashable, Event]] = deque()
        self._performing = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def recorder(self) -> StepRecorder | None:
        """Takes every step from now on. Set it before the first one: a replay starts from `INITIAL`."""
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: StepRecorder | None) -> None:
        self._recorder = recorder
        self._record = None
        if recorder is not None:
            self._record = recorder.record
            recorder.declare(self.kind, self._limits)

    def live(self) -> Iterator[tuple[str, Hashable, State]]:
        """Kind, key and state of every machine that has an entry."""
        return ((self.kind, key, entry.state) for key, entry in self._entries.items())

    def keys(self) -> tuple[Hashable, ...]:
        """Keys that have an entry, oldest first; a copy."""
        return tuple(self._entries)

    def states(self) -> tuple[Any, ...]:
        """Of all keys that have an entry, oldest first; a copy."""
        return tuple(entry.state for entry in self._entries.values())

    def state(self, key: Hashable) -> Any:
        """The state of `key`, `INITIAL` if it has no entry."""
        entry = self._entries.get(key)
        return self._initial if entry is None else entry.state

    def feed(self, key: Hashable, event: Event) -> None:
        """Step the machine of `key` and perform the effects.

        Safe from inside `perform`: such an event waits until all effects of the running step are
        performed, in the order of feeding; `state(key)` changes only then. (This holds per table:
        a feed of another table is not kept waiting.) Raises `MachineFailed` if the step raises, and
        whatever `perform` raises; events that waited are then dropped with the incarnation.
        """
        if self._performing:
            self._waiting.append((key, event))
            return
        self._performing = True
        waiting = self._waiting
        try:
            self._advance(key, event)
            while waiting:
                self._advance(*waiting.popleft())
        finally:
            self._performing = False
            waiting.clear()

    def close(self) -> None:
        """Forget all machines and their timers; for the end of an incarnation."""
        for entry in self._entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
        self._entries.clear()

    def _advance(self, key: Hashable, event: Event) -> None:
        now_s = self._clock.now_s()
        entry = self._entries.get(key)
        before = self._initial if entry is None else entry.state
        try:
            state, effects = self._step(before, event, now_s, self._limits)
        except Exception as error:
            # Recorded without effects, so that a replay of the trace fails at the same step.
            if self._record is not None:
                self._record(self.kind, key, event, now_s, ())
            raise self._failure(key, event, f"{type(error).__name__}: {error}") from error
        if self._record is not None:
            self._record(self.kind, key, event, now_s, effects)
        for observe in self.observers:
            observe(key, before, state, event, now_s, effects)
        if state.final or self._is_initial(state):
            if entry is not None:
                self._drop(key, entry)
        else:
            if entry is None:
                entry = self._entries[key] = _Entry(state)
            entry.state = state
            story = entry.story
            story.append((now_s, event, effects))
            if len(story) >= 2 * STORY_STEPS:
                del story[:STORY_STEPS]
            self._arm(key, entry)
        if effects:
            for effect in effects:
                if type(effect) is Ignored:
                    self.ignored[(self.kind, type(before).__name__, effect.event)] += 1
            self._perform(key, effects)

    def _is_initial(self, state: Any) -> bool:
        initial = self._initial
        return state is initial or (type(state) is type(initial) and bool(state == initial))

    def _drop(self, key: Hashable, entry: _Entry) -> None:
        del self._entries[key]
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None

    def _arm(self, key: Hashable, entry: _Entry) -> None:
        """Keep an armed timer as long as it comes no later than the deadline; most only move back."""
        deadline_s = entry.state.deadline_s
        timer = entry.timer
        if timer is not None:
            if deadline_s is not None and timer.deadline_s <= deadline_s:
                return
            timer.cancel()
            entry.timer = None
        if deadline_s is not None:
            entry.timer = self._timers.at(deadline_s, partial(self._expire, key, entry))

    def _expire(self, key: Hashable, entry: _Entry) -> None:
        entry.timer = None
        state = entry.state
        if state.deadline_s > self._clock.now_s():
            self._arm(key, entry)
            return
        self.feed(key, TimerExpired())
        now = self._entries.get(key)
        if now is entry and now.state == state and not self._performing:
            raise self._failure(
                key,
                TimerExpired(),
                "its own TimerExpired left the deadline where it was",
            )

    def _failure(self, key: Hashable, event: Event, what: str) -> MachineFailed:
        entry = self._entries.get(key)
        state = self._initial if entry is None else entry.state
        told = () if entry is None else entry.story
        story = tuple(f"{now_s:.6f} {fed!r} -> {list(effects)!r}" for now_s, fed, effects in told)
        error = MachineFailed(
            f"{self.kind} {key!r}: {event!r} in {type(state).__name__}: {what}",
            kind=self.kind,
            key=key,
            state=state,
            event=event,
            story=story,
        )
        error.add_note("\n".join(("its last steps:", *story, f"then {event!r} in {state!r}")))
        return error
