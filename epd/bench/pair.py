"""A prefill node in this process and a synthetic encoder in another, for the scenarios."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from epd.config import load_config
from epd.dataplane.base import DataPlane, ReadState
from epd.dataplane.select import Choice, open_plane
from epd.node import PrefillNode
from epd.protocol.ids import SessionId
from epd.protocol.messages import RegionDescriptor
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.testing.synthetic import synthetic_item


class Encoder(NamedTuple):
    address: str
    data_plane: str
    pid: int


class Pair:
    """A connected pair. `segment` and `exported` name the encoder's memory for raw references."""

    def __init__(self, encoder: Encoder, node: PrefillNode) -> None:
        self.encoder = encoder
        self.node = node
        self.segment = ""
        self.exported: tuple[RegionDescriptor, ...] = ()
        self._requests = 0

    def submit(self, item: ImageItem) -> "asyncio.Future[Delivery]":
        """One request; the future is done, in the loop, when it is delivered."""
        self._requests += 1
        done: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self.node.submit(EmbeddingRequest(f"bench-{self._requests}", [item], 120.0), done.set_result)
        return done

    async def latency_s(self, item: ImageItem) -> float:
        """From submit to delivered."""
        start_s = time.perf_counter()
        delivery = await self.submit(item)
        took_s = time.perf_counter() - start_s
        if delivery.error is not None:
            raise delivery.error
        delivery.release()
        return took_s

    async def run_many(self, item: ImageItem, transfers: int, concurrency: int) -> float:
        """Wall seconds for `transfers` requests, `concurrency` at a time; no task per request."""
        ended = started = 0
        finished = asyncio.get_running_loop().create_future()

        def start() -> None:
            nonlocal started
            started += 1
            self._requests += 1
            self.node.submit(EmbeddingRequest(f"bench-{self._requests}", [item], 120.0), end)

        def end(delivery: Delivery) -> None:
            nonlocal ended
            ended += 1
            if delivery.error is not None and not finished.done():
                finished.set_exception(delivery.error)
            delivery.release()
            if started < transfers:
                start()
            elif ended == transfers and not finished.done():
                finished.set_result(None)

        start_s = time.perf_counter()
        for _ in range(min(concurrency, transfers)):
            start()
        await finished
        return time.perf_counter() - start_s


@contextlib.contextmanager
def encoder_process(
    data_plane: str, regions: int, region_nbytes: int, *, metrics: bool = False
) -> Iterator[Encoder]:
    command = [sys.executable, "-m", "epd.bench.synthetic", data_plane, str(regions), str(region_nbytes)]
    command += ["metrics"] if metrics else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        yield Encoder(ready["listen"], ready["data_plane"], ready["pid"])
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


@contextlib.asynccontextmanager
async def pair(
    data_plane: Choice, regions: int, region_nbytes: int, *, metrics: bool = False
) -> AsyncIterator[Pair]:
    """A warm, connected pair on `mooncake` or `shm`."""
    with encoder_process(data_plane, regions, region_nbytes, metrics=metrics) as encoder:
        overrides = {
            "role": "prefill",
            "encoders": [encoder.address],
            "data_plane": data_plane,
            "pool.regions": regions,
            "pool.region_nbytes": region_nbytes,
            "metrics_port": 0 if metrics else None,
        }
        plane = open_plane(data_plane, "127.0.0.1")
        watched = _Watched(plane)
        node = PrefillNode(load_config(None, overrides), open_plane_with=lambda: plane)
        async with node:
            connected = Pair(encoder, node)
            await connected.latency_s(synthetic_item(4))
            connected.segment, connected.exported = watched.segment, watched.exported
            yield connected


class _Watched:
    """Notes what the encoder announced when the node opens it."""

    def __init__(self, plane: DataPlane) -> None:
        self.segment = ""
        self.exported: tuple[RegionDescriptor, ...] = ()
        open_peer = plane.open_peer

        def noting(session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> ReadState:
            self.segment, self.exported = segment, tuple(regions)
            return open_peer(session, segment, regions)

        plane.open_peer = noting  # type: ignore[method-assign]  # a bench's only look inside
