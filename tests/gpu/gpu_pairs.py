"""Processes and nodes on a GPU, for the tests and the measurements of this folder."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from epd.config import load_config
from epd.dataplane.base import Piece, ReadState
from epd.dataplane.mooncake_cuda import MooncakeCudaPlane
from epd.node import PrefillNode
from epd.protocol.ids import RegionId, SessionId
from epd.protocol.messages import RegionDescriptor
from epd.request import Delivery, EmbeddingRequest, ImageItem

HERE = Path(__file__).parent
MIB = 1024 * 1024
SESSION = SessionId(7)


class Process:
    """A script of this folder that says one line when it is ready and answers orders."""

    def __init__(self, script: str, *arguments: str) -> None:
        path = os.pathsep.join([str(HERE), *(entry for entry in sys.path if entry)])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.hello = self._hear()

    def ask(self, order: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self._hear()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let it end by itself, a while; then kill it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise OSError("the process has ended")


@contextlib.contextmanager
def encoder(model: str = "PATTERN", **settings: Any) -> Iterator[Process]:
    """An encoder node; `settings` are keys with `__` for the dot."""
    keys = {
        "role": "encoder",
        "model": f"callable:gpu_encoders:{model}",
        "device": "cuda:0",
        "staging__region_nbytes": 256 * MIB,
    } | settings
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        tables: dict[str, list[str]] = {"": []}
        for key, value in keys.items():
            table, _, name = key.rpartition("__")
            tables.setdefault(table, []).append(f"{name} = {json.dumps(value)}")
        for table, lines in tables.items():
            file.write("\n".join([f"[{table}]"] * bool(table) + lines) + "\n")
        file.flush()
        process = Process("gpu_node.py", file.name)
    try:
        yield process
    finally:
        process.close()


@contextlib.asynccontextmanager
async def prefill(encoders: Sequence[Process], **settings: Any) -> AsyncIterator[PrefillNode]:
    keys = {
        "role": "prefill",
        "encoders": [process.hello["listen"] for process in encoders],
        "device": "cuda:0",
        "pool.region_nbytes": 256 * MIB,
    } | {key.replace("__", "."): value for key, value in settings.items()}
    async with PrefillNode(load_config(None, keys)) as node:
        yield node


class Requests:
    """Numbers requests; every item is asked for once."""

    def __init__(self, node: PrefillNode) -> None:
        self._node = node
        self._next = 1

    async def encode(self, *items: ImageItem, deadline_s: float = 60.0) -> Delivery:
        self._next += 1
        return await self._node.encode(EmbeddingRequest(f"r{self._next}", items, deadline_s))


class Reader:
    """A plane with one receive region, opened to a `gpu_source.py`."""

    def __init__(self, source: Process, region_nbytes: int) -> None:
        self.plane = MooncakeCudaPlane("127.0.0.1", "cuda:0")
        self.region = self.plane.allocate(1, region_nbytes, exported=False)[0]
        self._word = self.plane.words(4096)
        self.opened = self.open(source, SESSION)

    def open(self, source: Process, session: SessionId) -> ReadState:
        regions = [RegionDescriptor(RegionId(r), base, n) for r, base, n in source.hello["regions"]]
        return self.plane.open_peer(session, source.hello["segment"], regions)

    def read(self, nbytes: int, session: SessionId = SESSION) -> ReadState:
        """From the start of region 0 to the start of ours; asks without pause."""
        posted = self.plane.post(session, Piece(self.region.address, 0, 0, nbytes))
        if isinstance(posted, ReadState):
            return posted
        while (state := self.plane.poll(posted.ticket)) is ReadState.UNKNOWN:
            pass
        return state

    def seal(self, at: int, session: SessionId = SESSION) -> int:
        state = self.plane.post(session, Piece(self._word.address, 0, at, 8))
        assert state is ReadState.DONE, state
        return int.from_bytes(self._word.view[:8], "little")

    def close(self) -> None:
        self.plane.close()


async def gather_all(calls: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*calls))
