"""I2, with bytes: sources are reused while they are read, a thousand times, and nothing wrong is delivered.

The same without the check delivers wrong bytes, or the test would prove nothing.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_pairs import PLANES
from planes import SESSION, Reader
from seal_source import MAX_NBYTES, pattern

from epd.dataplane.base import DataPlane
from epd.dataplane.poller import PeerOpened
from epd.dataplane.select import Choice, open_plane
from epd.protocol.ids import ReadId, RegionId, Seal
from epd.protocol.messages import RegionDescriptor, Source

ROUNDS = 1_000
SEED = 5
IN_FLIGHT = 4


@contextlib.contextmanager
def source_process(plane: str) -> Iterator["subprocess.Popen[bytes]"]:
    script = Path(__file__).with_name("seal_source.py")
    process = subprocess.Popen(
        [sys.executable, str(script), plane, str(ROUNDS), str(SEED)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdin is not None and process.stdout is not None
    with process, process.stdin, process.stdout:
        yield process
        process.stdin.close()
        process.wait(30)


async def lines(process: "subprocess.Popen[bytes]") -> AsyncIterator[dict[str, Any]]:
    """What it says, each answered with a line, so that it goes on."""
    assert process.stdin is not None and process.stdout is not None
    while True:
        line = await asyncio.to_thread(process.stdout.readline)
        message = json.loads(line)
        if message["number"] == 0:
            return
        process.stdin.write(b"\n")
        yield message


class Tally:
    """Reads into slots of its own, each checked byte by byte when it was delivered."""

    def __init__(self, plane: DataPlane, *, check: bool) -> None:
        self._reader = Reader(plane, check=check)
        region = plane.allocate(1, IN_FLIGHT * MAX_NBYTES, exported=False)[0]
        self._region = region
        self._free = [at * MAX_NBYTES for at in range(IN_FLIGHT)]
        self._running: dict[ReadId, tuple[int, int, int]] = {}
        self.outcomes: Counter[str] = Counter()
        self.wrong_nbytes = 0

    async def open(self, hello: dict[str, Any]) -> PeerOpened:
        regions = [RegionDescriptor(RegionId(r), base, n) for r, base, n in hello["regions"]]
        self._reader.poller.open_peer(SESSION, hello["segment"], regions)
        opened: PeerOpened = await self._reader.result(PeerOpened, SESSION)
        return opened

    async def read(self, number: int, place: list[int]) -> None:
        while not self._free:
            await self._end_one()
        at = self._free.pop()
        region, offset, nbytes, seal = place
        read = self._reader.start(self._region, at, Source(RegionId(region), offset, nbytes, Seal(seal)))
        self._running[read] = (number, at, nbytes)

    async def end(self) -> None:
        while self._running:
            await self._end_one()
        await asyncio.to_thread(self._reader.poller.stop)

    async def _end_one(self) -> None:
        read = next(iter(self._running))
        done = await self._reader.done(read)
        number, at, nbytes = self._running.pop(read)
        self.outcomes[done.outcome] += 1
        if done.outcome == "ok":
            delivered = self._region.view[at : at + nbytes]
            expected = pattern(number, nbytes)
            if delivered != expected:
                self.wrong_nbytes += sum(a != b for a, b in zip(delivered, expected, strict=True))
        self._free.append(at)


async def reuse_while_reading(plane_name: Choice, *, check: bool) -> Tally:
    with source_process(plane_name) as process:
        assert process.stdin is not None and process.stdout is not None
        hello = json.loads(process.stdout.readline())
        plane = open_plane(plane_name, "127.0.0.1")
        try:
            tally = Tally(plane, check=check)
            assert (await tally.open(hello)).ok
            process.stdin.write(b"\n")
            async for message in lines(process):
                await tally.read(message["number"], message["source"])
            await tally.end()
            process.stdin.write(b"\n")
        finally:
            plane.close()
    assert sum(tally.outcomes.values()) == ROUNDS
    return tally


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
async def test_nothing_of_a_source_that_was_reused_is_delivered(plane: Choice) -> None:
    tally = await reuse_while_reading(plane, check=True)
    assert tally.wrong_nbytes == 0
    assert tally.outcomes["seal_mismatch"] > 0
    assert tally.outcomes["ok"] > 0
    assert set(tally.outcomes) == {"ok", "seal_mismatch"}


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
async def test_without_the_check_wrong_bytes_are_delivered(plane: Choice) -> None:
    tally = await reuse_while_reading(plane, check=False)
    assert tally.wrong_nbytes > 0
    assert set(tally.outcomes) == {"ok"}
