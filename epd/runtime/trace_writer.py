"""The thread that writes a trace: encodes, compresses, writes, and begins a new file when one is full.

None of it happens in the node's loop, which only hands over lists of records. The thread shares nothing
with the loop but the queue and two flags.
"""

import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import structlog

from epd.protocol.trace import TraceHeader, Written, encode_block, encode_header

MAX_BACKLOG: Final = 256
"""Lists of records that may wait; a disk that falls further behind ends the trace, not the node."""
RECORDS_PER_BLOCK: Final = 512

_CANNOT_ENCODE: Final = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)

_log = structlog.get_logger()


class _NewFile:
    """Begin a file with these records: the limits of all kinds, the states of all machines."""

    def __init__(self, header: TraceHeader, first: Sequence[Written]) -> None:
        self.header = header
        self.first = first


_Work = Sequence[Written] | _NewFile | threading.Event | None


class TraceWriter:
    """Writes `path`; a full file becomes `path.1`, that one `path.2`, and of these `files - 1` stay.

    Files of an earlier recording with these names are removed. Raises `OSError` if the first one cannot
    be made. Whatever goes wrong later ends the trace with one log line, and `failed` is true.
    """

    def __init__(self, path: Path, header: TraceHeader, file_nbytes: int, files: int) -> None:
        self.full = False
        """The file has its size: a new one is due. Reset by `new_file`."""
        self.failed = False
        self._path = path
        self._file_nbytes = file_nbytes
        self._files = files
        self._records = 0
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        # Unbuffered: what was written is the operating system's, whatever becomes of this process.
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._file_size = 0
        self._put(encode_header(header))
        number = 1
        while (old := self._numbered(number)).exists():
            old.unlink()
            number += 1
        self._thread = threading.Thread(target=self._run, name="epd-trace", daemon=True)
        self._thread.start()

    def write(self, records: Sequence[Written]) -> None:
        """Hand over; the list is the thread's from now on."""
        if self._work.qsize() > MAX_BACKLOG:
            self._fail("the disk takes less than is recorded")
        self._work.put(records)

    def new_file(self, header: TraceHeader, first: Sequence[Written]) -> None:
        """What is handed over from now on goes to a new file that begins with `first`."""
        self.full = False
        self._work.put(_NewFile(header, first))

    def wait(self) -> None:
        """Until all that was handed over is the operating system's."""
        done = threading.Event()
        self._work.put(done)
        if self._thread.is_alive():
            done.wait()

    def close(self) -> None:
        """Write the rest, and end the thread; idempotent."""
        self._work.put(None)
        self._thread.join()

    # -- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
            elif not self.failed:
                try:
                    self._perform(work)
                except OSError as error:
                    self._fail(str(error))
        try:
            self._file.close()
        except OSError as error:  # a late write error; the descriptor is closed all the same
            self._fail(str(error))

    def _perform(self, work: Sequence[Written] | _NewFile) -> None:
        if isinstance(work, _NewFile):
            self._file.close()
            self._make_room()
            self._file = self._path.open("wb", buffering=0)
            self._file_size = 0
            self._put(encode_header(work.header))
            for start in range(0, len(work.first), RECORDS_PER_BLOCK):
                self._put(encode_block(work.first[start : start + RECORDS_PER_BLOCK]))
            return
        try:
            block = encode_block(work)
        except _CANNOT_ENCODE as error:
            self._put(encode_block(_encodable(work)))
            self._fail(str(error))
            return
        self._put(block)
        self._records += len(work)
        if self._file_size >= self._file_nbytes:
            self.full = True

    def _put(self, data: bytes) -> None:
        self._file_size += len(data)
        with memoryview(data) as rest:
            written = 0
            while written < len(rest):
                written += self._file.write(rest[written:]) or 0

    def _make_room(self) -> None:
        """The oldest file goes, every other one gets the next number."""
        if self._files == 1:
            return
        for number in range(self._files - 2, 0, -1):
            if (old := self._numbered(number)).exists():
                old.replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _fail(self, reason: str) -> None:
        if not self.failed:
            self.failed = True
            _log.error("trace ended", path=os.fspath(self._path), records=self._records, reason=reason)


def _encodable(records: Sequence[Written]) -> list[Written]:
    """Those before the first that cannot be encoded."""
    good: list[Written] = []
    for record in records:
        try:
            encode_block([record])
        except _CANNOT_ENCODE:
            break
        good.append(record)
    return good
