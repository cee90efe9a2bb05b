"""Records a trace while a node runs: the loop's half, which costs a fraction of a microsecond a step."""

import os
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from epd.protocol.errors import ConfigError
from epd.protocol.ids import Incarnation, NodeId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import Role
from epd.protocol.trace import StateWritten, TraceHeader, Written
from epd.runtime.clock import unix_s
from epd.runtime.timers import TimerHandle, Timers
from epd.runtime.trace_writer import RECORDS_PER_BLOCK, TraceWriter

FLUSH_S: Final = 1.0
"""A node that is killed loses what was recorded for so long, and what its writer had in hand."""
FILE_NBYTES: Final = 64 * 1024 * 1024
FILES: Final = 4


class Recorder:
    """Collects one record per step and hands them to a thread; used from the node's loop only.

    Replaces a file that is there. Raises `ConfigError` if it cannot be made. Whatever goes wrong
    later (a full disk, a value that cannot be encoded) ends the trace with one log line; it never
    stops the node. A file of `file_nbytes` (compressed) is followed by a new one, `files` are kept.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        node: NodeId,
        role: Role,
        incarnation: Incarnation,
        timers: Timers,
        *,
        file_nbytes: int = FILE_NBYTES,
        files: int = FILES,
    ) -> None:
        self.steps = 0
        self.live: Callable[[], Iterable[StateWritten]] = lambda: ()
        """Kind, key and state of every machine that has one: a new file begins with them."""
        self._timers = timers
        self._timer: TimerHandle | None = None
        self._declared: dict[str, Any] = {}
        self._pending: list[Written] = []
        self._closed = False
        self._header = TraceHeader(node=node, role=role, incarnation=incarnation, started_unix_s=unix_s())
        try:
            self._writer = TraceWriter(Path(path), self._header, file_nbytes, files)
        except OSError as error:
            message = f"trace: cannot write {os.fspath(path)!r}: {error.strerror}"
            raise ConfigError(message, key="trace", given=os.fspath(path)) from error

    @property
    def closed(self) -> bool:
        """Nothing is recorded any more, because of `close` or of an error."""
        return self._closed or self._writer.failed

    def declare(self, kind: str, limits: Any) -> None:
        """Record the limits that all machines of `kind` are stepped with, once; before their steps."""
        if kind in self._declared or self.closed:
            return
        self._declared[kind] = limits
        self._pending.append((kind, limits))
        self._hand_over_in_time()

    def record(
        self, kind: str, key: Hashable, event: Event, now_s: float, effects: tuple[Effect, ...]
    ) -> None:
        """Record one step, before its machine's new state is kept. Nothing after `close` or an error."""
        writer = self._writer
        if self._closed or writer.failed:
            return
        if writer.full:
            # Only here: the tables stand where all steps before this one have brought them.
            self._begin_file()
        pending = self._pending
        pending.append((kind, key, now_s, event, effects))
        self.steps += 1
        if len(pending) >= RECORDS_PER_BLOCK:
            self.hand_over()
        elif self._timer is None:
            self._hand_over_in_time()

    def hand_over(self) -> None:
        """Give what was collected to the thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending and not self.closed:
            pending, self._pending = self._pending, []
            self._writer.write(pending)

    def flush(self) -> None:
        """Hand everything to the operating system; waits for it."""
        self.hand_over()
        self._writer.wait()

    def close(self) -> None:
        """Flush, close the file and end the thread; idempotent."""
        self.hand_over()
        self._closed = True
        self._writer.close()

    def _begin_file(self) -> None:
        self.hand_over()
        self._header = replace(self._header, file=self._header.file + 1)
        first: list[Written] = list(self._declared.items())
        first.extend(self.live())
        self._writer.new_file(self._header, first)

    def _hand_over_in_time(self) -> None:
        if self._timer is None:
            self._timer = self._timers.after(FLUSH_S, self.hand_over)
