"""Time as a value that is handed in, so that tests and the simulator may own it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds; never compared with another node's."""
        ...


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


def unix_s() -> float:
    """Seconds of the wall clock, for people to read; it jumps, so nothing is decided by it."""
    return time.time()
