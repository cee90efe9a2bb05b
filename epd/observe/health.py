"""Whether a node lives and can serve: told by its loop, asked from another thread.

A loop that stands still cannot say so; whoever asks sees that its last beat is too long ago.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Literal

from epd.observe.families import Histogram

BEAT_S: Final = 0.5
STALLED_AFTER_S: Final = 10.0
"""A loop that has not turned for so long is unhealthy: its sessions are being given up by its peers."""

Word = Literal["loading", "ready", "draining", "unhealthy"]


class Health:
    """`loading` until `started`, then `ready` while `can_serve()`, until `draining` or `failed`.

    `word` and `is_alive` may be asked from any thread: they only read.
    """

    def __init__(self, can_serve: Callable[[], bool], *, now_s: Callable[[], float] = time.monotonic) -> None:
        self.started = False
        self.draining = False
        self.failed = False
        self._can_serve = can_serve
        self._now_s = now_s
        self._beat_s = now_s()

    def beat(self) -> None:
        """The loop has turned."""
        self._beat_s = self._now_s()

    @property
    def word(self) -> Word:
        if not self.is_alive:
            return "unhealthy"
        if self.draining:
            return "draining"
        return "ready" if self.started and self._can_serve() else "loading"

    @property
    def is_alive(self) -> bool:
        return not self.failed and self._now_s() - self._beat_s <= STALLED_AFTER_S


class LoopWatch:
    """Beats from the loop that makes it, measures how late that is, and calls `on_beat`."""

    def __init__(self, health: Health, on_beat: Callable[[], None]) -> None:
        self.lag = Histogram()
        self._health = health
        self._on_beat = on_beat
        self._loop = asyncio.get_running_loop()
        self._arm()

    def close(self) -> None:
        """Nothing stays in the loop; idempotent."""
        self._handle.cancel()

    def _arm(self) -> None:
        self._due_s = time.monotonic() + BEAT_S
        self._handle = self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        self.lag.observe(max(0.0, time.monotonic() - self._due_s))
        self._health.beat()
        self._on_beat()
        self._arm()
