"""An actor: one task that reads a mailbox in batches and handles each message synchronously."""

from abc import ABC, abstractmethod
from typing import Final, Generic, TypeVar

import structlog

from epd.runtime.clock import Clock, MonotonicClock
from epd.runtime.mailbox import Mailbox

M = TypeVar("M")

SLOW_HANDLER_S: Final = 0.05
"""A handler that blocks the loop for longer delays every heartbeat of the node: worth a warning."""

_log = structlog.get_logger()


class Actor(ABC, Generic[M]):
    """State lives in machines, IO in `handle`; long work belongs to a child that tells its result."""

    def __init__(self, name: str, mailbox: Mailbox[M], clock: Clock | None = None) -> None:
        self.name = name
        self.mailbox = mailbox
        self.slow_messages = 0
        self._handler_clock = clock or MonotonicClock()

    @abstractmethod
    def handle(self, message: M) -> None:
        """Act on one message, without waiting. Raising ends the node's incarnation."""

    async def run(self) -> None:
        """Handle messages until the mailbox is closed and empty; closes it on every path."""
        clock = self._handler_clock
        mailbox = self.mailbox
        handle = self.handle
        try:
            while batch := await mailbox.receive():
                before_s = clock.now_s()
                for message in batch:
                    handle(message)
                    after_s = clock.now_s()
                    if after_s - before_s > SLOW_HANDLER_S:
                        self._warn_slow(message, after_s - before_s)
                    before_s = after_s
        finally:
            mailbox.close()

    def _warn_slow(self, message: M, took_s: float) -> None:
        self.slow_messages += 1
        _log.warning("slow handler", actor=self.name, message=type(message).__name__, took_s=round(took_s, 4))
