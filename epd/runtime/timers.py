"""One heap of deadlines and one armed loop callback per node.

Deadlines are re-armed for every machine step, so a timer must cost no asyncio handle of its own: a
cancelled entry stays in the heap until it comes up or until such entries outnumber the live ones.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from epd.runtime.clock import Clock

_EARLY_RETRY_S: Final = 0.001
"""uvloop's clock counts milliseconds, so its callbacks come up to one too early."""
_COMPACT_FROM: Final = 64
"""Cancelled entries that are always tolerated."""


class Armed(Protocol):
    """What `call_at` returns: asyncio's `TimerHandle`, or a virtual one."""

    def cancel(self) -> None: ...


CallAt = Callable[[float, Callable[[], None]], Armed]
"""`loop.call_at`, or a virtual clock's: call once at that second of the same clock."""


class TimerHandle:
    """One timer; `cancel` is idempotent and does nothing after it has fired."""

    __slots__ = ("_callback", "_timers", "deadline_s")

    def __init__(self, timers: "Timers", deadline_s: float, callback: Callable[[], None]) -> None:
        self.deadline_s = deadline_s
        self._timers = timers
        self._callback: Callable[[], None] | None = callback

    @property
    def live(self) -> bool:
        return self._callback is not None

    def cancel(self) -> None:
        if self._callback is not None:
            self._callback = None
            self._timers._cancelled()

    def _take(self) -> Callable[[], None] | None:
        callback, self._callback = self._callback, None
        return callback


class Timers:
    """All timers of a node; to be used from its loop only.

    `call_at` must use the clock's seconds (`loop.call_at` and `MonotonicClock` do on Linux).
    A callback that raises goes to `on_error` (set it to a supervisor's `fail`); without one it is
    raised into the loop. Neither loses the other timers.
    """

    def __init__(
        self,
        clock: Clock,
        call_at: CallAt,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self._clock = clock
        self._call_at = call_at
        self.on_error = on_error
        self._heap: list[tuple[float, int, TimerHandle]] = []
        self._sequence = 0
        self._live = 0
        self._armed: Armed | None = None
        self._armed_s = 0.0
        self._firing = False

    def __len__(self) -> int:
        """Timers that have neither fired nor been cancelled."""
        return self._live

    def at(self, deadline_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call `callback` once, when the clock has reached `deadline_s`; equal ones in their order.

        Never calls it from inside `at`, not even if the deadline has passed already.
        """
        handle = TimerHandle(self, deadline_s, callback)
        self._sequence += 1
        heappush(self._heap, (deadline_s, self._sequence, handle))
        self._live += 1
        if not self._firing and (self._armed is None or deadline_s < self._armed_s):
            self._arm(deadline_s)
        return handle

    def after(self, seconds: float, callback: Callable[[], None]) -> TimerHandle:
        """Call `callback` once, `seconds` from now."""
        return self.at(self._clock.now_s() + seconds, callback)

    def close(self) -> None:
        """Cancel everything; nothing of this object stays in the loop."""
        for _, _, handle in self._heap:
            handle._take()
        self._heap.clear()
        self._live = 0
        self._disarm()

    def _cancelled(self) -> None:
        self._live -= 1
        if len(self._heap) > 2 * self._live + _COMPACT_FROM:
            self._heap = [entry for entry in self._heap if entry[2].live]
            heapify(self._heap)
        if self._live == 0 and not self._firing:
            self._disarm()

    def _arm(self, when_s: float) -> None:
        self._disarm()
        self._armed_s = when_s
        self._armed = self._call_at(when_s, self._fire)

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed.cancel()
            self._armed = None

    def _fire(self) -> None:
        """Call what is due by the time we began; what that adds waits for the next turn of the loop."""
        self._armed = None
        now_s = self._clock.now_s()
        last = self._sequence
        later: list[tuple[float, int, TimerHandle]] = []
        self._firing = True
        try:
            while self._heap and self._heap[0][0] <= now_s:
                entry = heappop(self._heap)
                if entry[1] > last:
                    later.append(entry)
                elif (callback := entry[2]._take()) is not None:
                    self._live -= 1
                    self._call(callback)
        finally:
            self._firing = False
            for entry in later:
                heappush(self._heap, entry)
            self._arm_next(now_s)

    def _call(self, callback: Callable[[], None]) -> None:
        if self.on_error is None:
            callback()
            return
        try:
            callback()
        except Exception as error:
            self.on_error(error)

    def _arm_next(self, now_s: float) -> None:
        heap = self._heap
        while heap and not heap[0][2].live:
            heappop(heap)
        if not heap:
            return
        deadline_s = heap[0][0]
        early = now_s < deadline_s < now_s + _EARLY_RETRY_S
        self._arm(now_s + _EARLY_RETRY_S if early else deadline_s)
