"""A read over loopback from another process, for each data plane: the whole way the bytes go.

`python -m epd.cli.doctor_selftest PLANE` is that process: it owns the memory, says where it is as one
line of JSON, and ends when its input does.
"""

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from epd.dataplane.base import Piece, ReadState
from epd.dataplane.select import Choice, open_plane
from epd.protocol.errors import DataPlaneError, EpdError
from epd.protocol.ids import RegionId, SessionId
from epd.protocol.messages import RegionDescriptor

PLANES: Final[tuple[Choice, ...]] = ("shm", "mooncake")
_NBYTES: Final = 1024 * 1024
_PIECES: Final = 4
_WAIT_S: Final = 20.0


class SelfTest(NamedTuple):
    """`data_plane` is what was really used; `error` why the bytes did not arrive."""

    data_plane: str
    ok: bool
    nbytes: int
    error: str | None


def self_test(choice: Choice) -> SelfTest:
    """Read 1 MiB of another process in four pieces and compare every byte."""
    try:
        with _source(choice) as source:
            return _read(choice, source)
    except (EpdError, OSError) as error:
        return SelfTest(choice, ok=False, nbytes=0, error=str(error))


def _read(choice: Choice, source: dict[str, Any]) -> SelfTest:
    plane = open_plane(choice, "127.0.0.1")
    try:
        region = plane.allocate(1, _NBYTES, exported=False)[0]
        session = SessionId(1)
        exported = [RegionDescriptor(RegionId(one[0]), one[1], one[2]) for one in source["regions"]]
        if plane.open_peer(session, source["segment"], exported) is not ReadState.DONE:
            return SelfTest(plane.name, ok=False, nbytes=0, error="the other process cannot be reached")
        step = _NBYTES // _PIECES
        for at in range(0, _NBYTES, step):
            ended = plane.read_now(session, Piece(region.address + at, 0, at, step))
            if ended is not ReadState.DONE:
                return SelfTest(plane.name, ok=False, nbytes=at, error=f"a read ended as {ended.value}")
        if hashlib.sha256(region.view).hexdigest() != source["sha256"]:
            return SelfTest(plane.name, ok=False, nbytes=_NBYTES, error="other bytes arrived")
        return SelfTest(plane.name, ok=True, nbytes=_NBYTES, error=None)
    finally:
        plane.close()


@contextlib.contextmanager
def _source(choice: Choice) -> Iterator[dict[str, Any]]:
    """The other process. Raises `DataPlaneError` with its last words if it does not start."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, choice],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            _, words = process.communicate(timeout=_WAIT_S)
            said = [one for one in words.splitlines() if one.startswith("epd: ")]
            raise DataPlaneError(said[-1].removeprefix("epd: ") if said else "the other process has died")
        yield json.loads(line)
    finally:
        process.stdin.close()
        try:
            process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        if process.stderr is not None:
            process.stderr.close()


def _own_memory(choice: Choice) -> None:
    plane = open_plane(choice, "127.0.0.1")
    try:
        region = plane.allocate(1, _NBYTES, exported=True)[0]
        region.view[:] = hashlib.shake_128(b"epd").digest(_NBYTES)
        exported = [[one.region, one.base, one.nbytes] for one in plane.export()]
        digest = hashlib.sha256(region.view).hexdigest()
        said = {"segment": plane.segment, "regions": exported, "sha256": digest}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        plane.close()


def main() -> int:
    choice: Choice = "mooncake" if sys.argv[1] == "mooncake" else "shm"
    try:
        _own_memory(choice)
    except EpdError as error:
        sys.stderr.write(f"epd: {error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
