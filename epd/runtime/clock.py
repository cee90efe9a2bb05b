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
