"""Virtual time, and the processes that live in it: run, slow, stopped, killed."""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from typing import Any, Final

from epd.sim.loop import SimLoop

_TURN_S: Final = 80e-6
"""What a turn of a loop takes, in the mean."""
_PAUSE_CHANCE: Final = 1e-4
_LONGEST_PAUSE_S: Final = 0.3
"""Now and then the host has something else to do."""


class Time:
    """What happens, in order; one for a whole run. Equal times in the order of asking."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, when_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call once, never before what was asked for an earlier time."""
        self._sequence += 1
        heappush(self._events, (max(when_s, self.now_s), self._sequence, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_s + seconds, call, *arguments)

    def run(self, until_s: float, over: Callable[[], bool] = lambda: False) -> None:
        """To that second, or until `over` says so."""
        events = self._events
        while events and events[0][0] <= until_s and not over():
            self.now_s, _, call, arguments = heappop(events)
            call(*arguments)
        if not over():
            self.now_s = until_s


class Process:
    """One process of one host. Its clock started at some time of its own."""

    def __init__(
        self, time: Time, name: str, rng: random.Random, failed: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.slowness = 1.0
        self.when_killed: list[Callable[[], None]] = []
        self._time = time
        self._rng = rng
        self._started_s = rng.uniform(0.0, 1e6)
        self._failed = failed
        self._turn_s: float | None = None
        self._free_s = 0.0
        self.went_on_s = 0.0
        """When it was stopped for the last time and went on, by its own clock."""
        self.loop = SimLoop(self.now_s, self._wake, lambda context: failed(name, context))

    def now_s(self) -> float:
        """Its monotonic clock."""
        return self._time.now_s + self._started_s

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped

    def stop(self) -> None:
        """As SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """As SIGCONT."""
        if self.stopped:
            self.stopped = False
            self.went_on_s = self.now_s()
            self._turn_s = None
            self._wake_when_due()

    def kill(self) -> None:
        """As SIGKILL: no `finally`, no last word; the kernel closes what was open."""
        if self.alive:
            self.alive = False
            for call in self.when_killed:
                call()
            self.loop.kill()  # into the void: whatever it still says or closes is gone already

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in the process's loop; what it raises is told."""
        task = self.loop.create_task(work)  # tidy: its end is looked at
        task.add_done_callback(self._look)

    def _look(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failed(self.name, {"message": "a task failed", "exception": task.exception()})

    def _wake(self, when_s: float) -> None:
        """There will be something to do at that second of its clock."""
        due_s = max(when_s - self._started_s, self._free_s, self._time.now_s)
        if self._turn_s is None or due_s < self._turn_s:
            self._turn_s = due_s
            self._time.at(due_s, self._turn, due_s)

    def _wake_when_due(self) -> None:
        next_s = self.loop.next_s()
        if next_s is not None:
            self._wake(next_s)

    def _turn(self, due_s: float) -> None:
        if due_s != self._turn_s or not self.runs:
            return  # an earlier turn has come; or it is asked again when it goes on
        self._turn_s = None
        self._free_s = self._time.now_s + self._takes_s()
        self.loop.run_turn()
        if self.runs:
            self._wake_when_due()

    def _takes_s(self) -> float:
        if self._rng.random() < _PAUSE_CHANCE:
            return self._rng.uniform(0.0, _LONGEST_PAUSE_S)
        return self._rng.expovariate(1.0) * _TURN_S * self.slowness


def between(rng: random.Random, low: float, high: float) -> float:
    """As often in each power of ten."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))
