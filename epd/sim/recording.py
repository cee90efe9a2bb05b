"""What a simulated node's recorder writes: a digest of every step, and the trace itself if it is wanted."""

import os
from pathlib import Path

import xxhash

from epd.protocol.trace import TraceHeader, encode_header
from epd.runtime.trace_writer import TraceWriter


class DigestWriter:
    """Takes the place of a `TraceWriter`; adds all that is recorded to `digest`, and nothing to a disk."""

    full = False
    failed = False

    def __init__(self, digest: "xxhash.xxh3_128", header: TraceHeader) -> None:
        self._digest = digest
        self._digest.update(encode_header(header))
        self.closed = False

    def write(self, records: list[bytes]) -> None:
        if not self.closed:
            for record in records:
                self._digest.update(record)

    def new_file(self, header: TraceHeader) -> None:
        """It is never full."""

    def wait(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        self.closed = True


class FileWriter(DigestWriter):
    """The same, and a file that `epd trace` and `epd replay` read."""

    def __init__(self, digest: "xxhash.xxh3_128", header: TraceHeader, path: Path) -> None:
        super().__init__(digest, header)
        self._file = _Direct(path, header, 1 << 62, 1)

    def write(self, records: list[bytes]) -> None:
        super().write(records)
        if not self.closed:
            self._file.write(records)

    def close(self) -> None:
        super().close()
        self._file.close()


class _Direct(TraceWriter):
    """Writes in the caller's turn: a thread would make two runs differ."""

    def _begin(self) -> None:
        """No thread."""

    def write(self, records: list[bytes]) -> None:
        self._perform(records)

    def close(self) -> None:
        self._file.close()


def trace_path(folder: str | os.PathLike[str], name: str, incarnation: int) -> Path:
    """Of the `incarnation`th node that had that name."""
    return Path(folder) / f"{name}-{incarnation}.trace"
