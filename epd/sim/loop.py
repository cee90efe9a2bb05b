"""The event loop of one simulated process: asyncio's, run a turn at a time, in a time of its own.

Nothing waits for anything real. What asyncio would do in other threads is done at once, in the turn.
"""

import asyncio
import contextvars
import inspect
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final, TypeVar, TypeVarTuple

_FINALLYS: Final = 100

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimLoop(asyncio.BaseEventLoop):
    """`now_s` is the process's clock. `wake(when_s)` is called whenever there will be something to do,
    `failed` with what a callback raised."""

    def __init__(
        self,
        now_s: Callable[[], float],
        wake: Callable[[float], None],
        failed: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__()
        self._now_s = now_s
        self._wake = wake
        self._failed = failed
        self._soon: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._sequence = 0
        self._killed = False

    # -- for whoever runs it -----------------------------------------------------------------

    def run_turn(self) -> None:
        """What is ready and what has come due, once."""
        now_s, timers = self._now_s(), self._timers
        while timers and timers[0][0] <= now_s:
            self._soon.append(heappop(timers)[2])
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(self._soon)):
                handle = self._soon.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def next_s(self) -> float | None:
        """When there is something to do again."""
        if self._soon:
            return self._now_s()
        while self._timers and self._timers[0][2].cancelled():
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def pending(self) -> int:
        """Callbacks and timers that have not come yet."""
        return len(self._soon) + sum(not timer.cancelled() for _, _, timer in self._timers)

    def tasks(self) -> list[str]:
        """Names of those that have not ended."""
        return sorted(task.get_name() for task in asyncio.all_tasks(self))

    def kill(self) -> None:
        """As SIGKILL: nothing runs any more. What its coroutines have in `finally` runs into the void."""
        self._killed = True
        asyncio._set_running_loop(self)
        try:
            for _ in range(_FINALLYS):  # what ends may start something
                left = [task for task in asyncio.all_tasks(self) if _is_open(task)]
                if not left:
                    break
                for task in left:
                    _end(task.get_coro())
        finally:
            asyncio._set_running_loop(None)
        self._soon.clear()
        self._timers.clear()
        self.close()

    # -- asyncio's interface, where it differs -----------------------------------------------

    def time(self) -> float:
        return self._now_s()

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._killed:
            self._soon.append(handle)
            if len(self._soon) == 1:
                self._wake(self._now_s())
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._killed:
            self._sequence += 1
            heappush(self._timers, (when, self._sequence, handle))
            if self._timers[0][2] is handle:
                self._wake(when)
        return handle

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._killed:
            self._failed(context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is skipped when its time has come."""


def _end(coroutine: Any) -> None:
    """Here and now, not when the garbage collector comes: again for each `finally` that waits."""
    for _ in range(_FINALLYS):
        try:
            coroutine.close()
        except RuntimeError:  # it has ignored its end, and goes on to the next one
            continue
        return


def _is_open(task: asyncio.Task[Any]) -> bool:
    coroutine: Any = task.get_coro()
    return inspect.getcoroutinestate(coroutine) != inspect.CORO_CLOSED
