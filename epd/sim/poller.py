"""The read poller without its thread: its turns are timers of the process's loop."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from epd.dataplane.poller import Opener, ReadPoller

_MIN_PAUSE_S: Final = 100e-6
_MAX_PAUSE_S: Final = 0.1
_PAUSE_PER_AGE: Final = 1 / 16
"""A read that hangs is asked for seldom, or a night of them would take a night."""
_LAST_TURNS: Final = 10_000


class _Opened:
    def join(self) -> None:
        """It has ended when it was told."""


class SimPoller(ReadPoller):
    """See `ReadPoller`. `opening_s` says how long the opening of a peer takes."""

    def __init__(self, *arguments: Any, opening_s: Callable[[], float], **options: Any) -> None:
        self._opening_s = opening_s
        self._next: asyncio.TimerHandle | None = None
        self._is_turning = False
        super().__init__(*arguments, **options)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """What is still read ends by its abort, which takes no time here."""
        super()._put((self._stop, (timeout_s,)))
        for _ in range(_LAST_TURNS):
            if not self._turn():
                break
        self._unschedule()
        return not (self._reads or self._openers)

    def _begin(self) -> None:
        """No thread."""

    def _put(self, command: Any) -> None:
        super()._put(command)
        self._schedule(0.0)

    def _pause(self, pause_s: float | None) -> Any:
        return self._next_command()

    def _beside(self, work: Callable[[], None]) -> Opener:
        self._loop.call_later(self._opening_s(), work)
        return _Opened()

    def _schedule(self, seconds: float) -> None:
        when_s = self._loop.time() + seconds
        if self._next is not None:
            if self._next.when() <= when_s:
                return
            self._next.cancel()
        self._next = self._loop.call_at(when_s, self._run_turn)

    def _unschedule(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _run_turn(self) -> None:
        self._next = None
        if not self._turn():
            return
        pause_s = self._pause_s()
        if pause_s is not None:
            age_s = (self._now_s() - self._last_post_s) * _PAUSE_PER_AGE
            self._schedule(min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, pause_s, age_s)))
