"""Records a trace while a node runs: the loop's half, about a third of a microsecond a step."""

import os
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import structlog
from msgspec.structs import replace

from epd.protocol.errors import ConfigError
from epd.protocol.ids import Incarnation, NodeId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import Role
from epd.protocol.trace import LIMITS, STATE, STEP, RecordEncoder, StateWritten, TraceHeader, Width
from epd.runtime.timers import TimerHandle, Timers
from epd.runtime.trace_writer import TraceWriter

FLUSH_S: Final = 1.0
"""A node that is killed loses what it recorded for so long at most, and what its writer had in hand."""
FILE_NBYTES: Final = 64 * 1024 * 1024
FILES: Final = 4
_BATCH_RECORDS: Final = 256
"""Few, so that they are encoded while the processor's caches still hold them."""
_BATCHES_AT_ONCE: Final = 8
"""Waking the thread costs as much as encoding a batch."""
_BATCH_VALUES: Final = _BATCH_RECORDS * STEP
_CANNOT_ENCODE: Final = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)

_log = structlog.get_logger()


class Writer(Protocol):
    """Where records go: a `TraceWriter`."""

    full: bool
    failed: bool

    def write(self, records: list[bytes]) -> None: ...

    def new_file(self, header: TraceHeader) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


OpenWriter = Callable[[Path, TraceHeader, int, int], Writer]
"""By path, header, bytes of a file, and how many files are kept. Raises `OSError`."""


class Recorder:
    """Collects one record per step and hands batches to a thread; used from the node's loop only.

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
        started_unix_s: float,
        open_writer: OpenWriter = TraceWriter,
        *,
        file_nbytes: int = FILE_NBYTES,
        files: int = FILES,
    ) -> None:
        self.live: Callable[[], Iterable[StateWritten]] = lambda: ()
        """Kind, key and state of every machine that has one: a new file begins with them."""
        self.path = Path(path)
        self._timers = timers
        self._timer: TimerHandle | None = None
        self._limits: dict[str, Any] = {}
        self._values: list[Any] = []
        self._encoder = RecordEncoder()
        self._encoded: list[bytes] = []
        self._handed_over = 0
        self._closed = False
        self._header = TraceHeader(
            node=node, role=role, incarnation=incarnation, started_unix_s=started_unix_s
        )
        try:
            self._writer = open_writer(self.path, self._header, file_nbytes, files)
        except OSError as error:
            message = f"trace: cannot write {os.fspath(path)!r}: {error.strerror}"
            raise ConfigError(message, key="trace", given=os.fspath(path)) from error

    @property
    def closed(self) -> bool:
        """Nothing is recorded any more, because of `close` or of an error."""
        return self._closed or self._writer.failed

    @property
    def steps(self) -> int:
        """Recorded so far."""
        return self._handed_over + len(self._values) // STEP

    def declare(self, kind: str, limits: Any) -> None:
        """Record the limits that all machines of `kind` are stepped with, once; before their steps."""
        if kind in self._limits or self.closed:
            return
        self._limits[kind] = limits
        self.hand_over()
        self._write(LIMITS, [kind, limits])
        self._pass_on()

    def record(
        self, kind: str, key: Hashable, event: Event, now_s: float, effects: tuple[Effect, ...]
    ) -> None:
        """Record one step, before its machine's new state is kept. Nothing after `close` or an error."""
        values = self._values
        if (not values or len(values) >= _BATCH_VALUES) and not self._begin_batch():
            return
        # Flat: a tuple a step would be one more object a step for the garbage collector to look at.
        values += (kind, key, now_s, event, effects)

    def hand_over(self) -> None:
        """Encode what was collected, and give everything to the thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._encode_steps()
        self._pass_on()

    def flush(self) -> None:
        """Hand everything to the operating system; waits for it."""
        self.hand_over()
        self._writer.wait()

    def close(self) -> None:
        """Flush, close the file and end the thread; idempotent."""
        self.hand_over()
        self._closed = True
        self._writer.close()

    def _begin_batch(self) -> bool:
        """Before a step, so that the tables stand where all recorded steps have brought them."""
        self._encode_steps()
        if self.closed:
            return False
        if len(self._encoded) >= _BATCHES_AT_ONCE:
            self._pass_on()
        if self._writer.full:
            self._pass_on()
            self._header = replace(self._header, file=self._header.file + 1)
            limits = [value for record in self._limits.items() for value in record]
            self._writer.new_file(self._header)
            self._write(LIMITS, limits)
            states = [value for state in self.live() for value in state]
            for start in range(0, len(states), _BATCH_RECORDS * STATE):
                self._write(STATE, states[start : start + _BATCH_RECORDS * STATE])
        if self._timer is None:
            self._timer = self._timers.after(FLUSH_S, self.hand_over)
        return True

    def _encode_steps(self) -> None:
        if self._values:
            self._handed_over += len(self._values) // STEP
            self._write(STEP, self._values)
            self._values.clear()

    def _pass_on(self) -> None:
        if self._encoded:
            self._writer.write(self._encoded)
            self._encoded = []

    def _write(self, width: Width, values: list[Any]) -> None:
        if self.closed:
            return
        try:
            records = self._encoder.encode(width, values)
        except _CANNOT_ENCODE as error:
            self._encoded.append(self._encoder.encode(width, self._encodable(width, values)))
            self._pass_on()
            self._closed = True
            _log.error("trace ended", path=os.fspath(self.path), steps=self.steps, reason=str(error))
            return
        self._encoded.append(records)

    def _encodable(self, width: Width, values: list[Any]) -> list[Any]:
        """Of the records before the first that cannot be encoded."""
        for start in range(0, len(values), width):
            try:
                self._encoder.encode(width, values[start : start + width])
            except _CANNOT_ENCODE:
                return values[:start]
        return values
