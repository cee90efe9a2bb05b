"""The thread that writes a trace: compresses, writes, and begins a new file when one is full.

It shares nothing with the node's loop but a queue of encoded records and two flags, and needs the
interpreter for next to nothing.
"""

import os
import queue
import threading
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import structlog
from isal import isal_zlib

from epd.protocol.trace import TraceHeader, encode_header, frame_block

MAX_BACKLOG: Final = 512
"""Lists of blocks that may wait; a disk that falls further behind ends the trace, not the node."""

_LEVEL: Final = 0
"""ISA-L's fastest: a sixth of what zlib's fastest costs, for a fifth more bytes. Any zlib reads it."""

_log = structlog.get_logger()


class _NewFile(NamedTuple):
    header: TraceHeader


_Work = list[bytes] | _NewFile | threading.Event | None


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
        self._blocks = 0
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        # Unbuffered: what was written is the operating system's, whatever becomes of this process.
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._file_size = 0
        self._put(encode_header(header))
        number = 1
        while (old := self._numbered(number)).exists():
            old.unlink()
            number += 1
        self._begin()

    def write(self, records: list[bytes]) -> None:
        """Hand over what a `RecordEncoder` made; each becomes a block."""
        if self._work.qsize() > MAX_BACKLOG:
            self._fail("the disk takes less than is recorded")
        self._work.put(records)

    def new_file(self, header: TraceHeader) -> None:
        """What is handed over from now on goes to a new file."""
        self.full = False
        self._work.put(_NewFile(header))

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="epd-trace", daemon=True)
        self._thread.start()

    def _fail(self, reason: str) -> None:
        if not self.failed:
            self.failed = True
            _log.error("trace ended", path=os.fspath(self._path), blocks=self._blocks, reason=reason)

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

    def _perform(self, work: list[bytes] | _NewFile) -> None:
        if isinstance(work, _NewFile):
            self._file.close()
            self._make_room()
            self._file = self._path.open("wb", buffering=0)
            self._file_size = 0
            self._put(encode_header(work.header))
            return
        self._put(b"".join(frame_block(isal_zlib.compress(records, _LEVEL)) for records in work))
        self._blocks += len(work)
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
