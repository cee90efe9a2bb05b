"""Helpers for tests of real data planes between processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from epd.dataplane.base import DataPlane, Piece, ReadState
from epd.dataplane.poller import PeerOpened, PollerFailed, ReadDone, ReadPoller, ReadRequest, ReadResult
from epd.memory.region import Region
from epd.protocol.ids import ReadId, RegionId, Seal, SessionId
from epd.protocol.messages import RegionDescriptor, Source

SESSION = SessionId(7)


class SourceProcess:
    """`plane_source.py` in its own process; killed at the end, whatever state it is in."""

    def __init__(self, choice: str, count: int, region_nbytes: int) -> None:
        script = Path(__file__).with_name("plane_source.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), choice, str(count), str(region_nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        hello = self._hear()
        self.name: str = hello["name"]
        self.segment: str = hello["segment"]
        self.regions = [RegionDescriptor(RegionId(r), base, n) for r, base, n in hello["regions"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def write(self, region: int, offset: int, data: bytes) -> None:
        self._ask(do="write", region=region, offset=offset, data=data.hex())

    def digest(self, region: int) -> str:
        return str(self._ask(do="digest", region=region)["digest"])

    def stop(self) -> None:
        """Stopped when this returns, not only told to."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the source process has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


class Reader:
    """A poller on a loop, with results that can be awaited."""

    def __init__(self, plane: DataPlane, *, check: bool = True) -> None:
        self.results: list[ReadResult] = []
        self._arrived = asyncio.Event()
        self._next = 1
        self.poller = ReadPoller(plane, self._deliver, asyncio.get_running_loop(), check=check)

    def _deliver(self, results: list[ReadResult]) -> None:
        self.results += results
        self._arrived.set()

    async def result(self, kind: type[ReadResult], key: int) -> Any:
        """The result of that kind for that read or session."""
        while True:
            for result in self.results:
                if isinstance(result, kind) and key == result[0]:
                    return result
                assert not isinstance(result, PollerFailed), result.reason
            self._arrived.clear()
            await self._arrived.wait()

    async def open(self, source: SourceProcess, session: SessionId = SESSION) -> PeerOpened:
        self.poller.open_peer(session, source.segment, source.regions)
        opened: PeerOpened = await self.result(PeerOpened, session)
        return opened

    def start(
        self, to: Region, at: int, source: Source, session: SessionId = SESSION, digest: bytes | None = None
    ) -> ReadId:
        read = ReadId(self._next)
        self._next += 1
        self.poller.read(ReadRequest(read, session, to.address + at, source, digest))
        return read

    async def done(self, read: ReadId) -> ReadDone:
        ended: ReadDone = await self.result(ReadDone, read)
        return ended

    async def read(self, to: Region, at: int, source: Source, session: SessionId = SESSION) -> str:
        return (await self.done(self.start(to, at, source, session))).outcome


def seal_offset(offset: int, nbytes: int) -> int:
    return offset + (nbytes + 7) // 8 * 8


def source_of(region: int, offset: int, nbytes: int, seal: int) -> Source:
    return Source(RegionId(region), offset, nbytes, Seal(seal))


def piece(to: Region, region: int, offset: int, nbytes: int) -> Piece:
    return Piece(to.address, region, offset, nbytes)


def end_of(plane: DataPlane, session: SessionId, wanted: Piece) -> ReadState:
    """Post and poll to the end."""
    answer = plane.post(session, wanted)
    if isinstance(answer, ReadState):
        return answer
    while (state := plane.poll(answer.ticket)) is ReadState.UNKNOWN:
        pass
    return state


def held() -> tuple[int, int, int]:
    """What this process holds: descriptors, threads (the engine's too), mappings of memfds."""
    maps = Path("/proc/self/maps").read_text().count("memfd:epd-")
    executors = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")) - executors, maps
