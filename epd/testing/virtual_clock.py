"""A clock that stands still until it is advanced, with the `call_at` that timers need."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

_MAX_CALLS_PER_INSTANT: Final = 100_000


class VirtualCall:
    """A pending call of a `VirtualClock`."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Use as `Clock`, and for timers as `Timers(clock, clock.call_at)`."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s
        self._sequence = 0
        self._calls: list[tuple[float, int, VirtualCall]] = []

    def now_s(self) -> float:
        return self._now_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> VirtualCall:
        """Call once when the time has come, from `advance`; equal times in the order of asking."""
        call = VirtualCall(callback)
        self._sequence += 1
        heappush(self._calls, (when_s, self._sequence, call))
        return call

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`, making every call that comes due at its own time, in order.

        `advance(0.0)` makes the calls that are due already. Raises `RuntimeError` if calls go on
        without end at one instant.
        """
        self.advance_to(self._now_s + seconds)

    def advance_to(self, target_s: float) -> None:
        """Move on to `target_s`, as `advance`."""
        calls_now = 0
        while self._calls and self._calls[0][0] <= target_s:
            when_s, _, call = heappop(self._calls)
            if call.callback is None:
                continue
            calls_now = 0 if when_s > self._now_s else calls_now + 1
            if calls_now > _MAX_CALLS_PER_INSTANT:
                raise RuntimeError(f"calls without end at {self._now_s} s, the last {call.callback!r}")
            self._now_s = max(self._now_s, when_s)
            call.callback()
        self._now_s = max(self._now_s, target_s)

    def next_call_s(self) -> float | None:
        """When the next call is due, or None; for `advance_to`."""
        while self._calls and self._calls[0][2].callback is None:
            heappop(self._calls)
        return self._calls[0][0] if self._calls else None
