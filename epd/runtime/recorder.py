"""Writes a trace file while a node runs."""

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from epd.protocol.errors import ConfigError
from epd.protocol.ids import Incarnation, NodeId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import Role
from epd.protocol.trace import TraceHeader, append_header, append_limits, append_step
from epd.runtime.clock import unix_s
from epd.runtime.timers import TimerHandle, Timers

FLUSH_NBYTES: Final = 64 * 1024
FLUSH_S: Final = 1.0
"""A node that is killed loses at most this much of its trace, or `FLUSH_NBYTES`."""

_CANNOT_ENCODE: Final = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)

_log = structlog.get_logger()


class Recorder:
    """Appends one record per step to a buffer, and that to `path`; used from the node's loop only.

    Replaces a file that is there. Raises `ConfigError` if it cannot be made. Whatever goes wrong
    later (a full disk, a value that cannot be encoded) ends the trace with one log line; it never
    stops the node.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        node: NodeId,
        role: Role,
        incarnation: Incarnation,
        timers: Timers,
    ) -> None:
        self.path = Path(path)
        self.steps = 0
        self._timers = timers
        self._timer: TimerHandle | None = None
        self._declared: set[str] = set()
        self._buffer = bytearray()
        try:
            # Unbuffered: the buffer above is the only one, and is flushed when we say so.
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            message = f"trace: cannot write {str(self.path)!r}: {error.strerror}"
            raise ConfigError(message, key="trace", given=str(self.path)) from error
        header = TraceHeader(node=node, role=role, incarnation=incarnation, started_unix_s=unix_s())
        append_header(self._buffer, header)
        self.flush()

    @property
    def closed(self) -> bool:
        """Nothing is recorded any more, because of `close` or of an error."""
        return self._file.closed

    def declare(self, kind: str, limits: Any) -> None:
        """Record the limits that all machines of `kind` are stepped with, once; before their steps."""
        if kind in self._declared or self._file.closed:
            return
        self._declared.add(kind)
        try:
            append_limits(self._buffer, kind, limits)
        except _CANNOT_ENCODE as error:
            self._give_up(error)
            return
        self._flush_in_time()

    def record(
        self, kind: str, key: Hashable, event: Event, now_s: float, effects: tuple[Effect, ...]
    ) -> None:
        """Record one step; a few microseconds. Nothing after `close` or an error."""
        if self._file.closed:
            return
        try:
            append_step(self._buffer, kind, key, event, now_s, effects)
        except _CANNOT_ENCODE as error:
            self._give_up(error)
            return
        self.steps += 1
        if len(self._buffer) >= FLUSH_NBYTES:
            self.flush()
        elif self._timer is None:
            self._flush_in_time()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._buffer or self._file.closed:
            return
        try:
            with memoryview(self._buffer) as rest:
                written = 0
                while written < len(rest):
                    written += self._file.write(rest[written:]) or 0
        except OSError as error:
            self._give_up(error)
        self._buffer.clear()

    def close(self) -> None:
        """Flush, and close the file; idempotent."""
        self.flush()
        self._close_file()

    def _flush_in_time(self) -> None:
        if self._timer is None:
            self._timer = self._timers.after(FLUSH_S, self.flush)

    def _give_up(self, error: Exception) -> None:
        _log.error("trace ended", path=str(self.path), steps=self.steps, reason=str(error))
        if not isinstance(error, OSError):
            self.flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._close_file()

    def _close_file(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # a late write error; the descriptor is closed all the same
            _log.error("trace ended", path=str(self.path), steps=self.steps, reason=str(error))
