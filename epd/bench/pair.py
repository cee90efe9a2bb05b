"""A prefill node in this process and a synthetic encoder in another, for the scenarios."""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from epd.config import load_config
from epd.dataplane.base import DataPlane, ReadState
from epd.dataplane.push import PushPlane
from epd.dataplane.select import Choice, open_plane
from epd.node import PrefillNode
from epd.protocol.ids import SessionId
from epd.protocol.messages import RegionDescriptor
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.runtime.keys import new_keys, read_secret_key, write_keys
from epd.testing.synthetic import synthetic_item

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


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
    data_plane: str, regions: int, region_nbytes: int, settings: Mapping[str, Any] = NOTHING
) -> Iterator[Encoder]:
    command = [sys.executable, "-m", "epd.bench.synthetic", data_plane, str(regions), str(region_nbytes)]
    command.append(json.dumps(dict(settings)))
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
    data_plane: Choice,
    regions: int,
    region_nbytes: int,
    *,
    metrics: bool = False,
    curve: bool = False,
    push: bool = False,
    verify: str = "seal",
    trace_folder: str | None = None,
) -> AsyncIterator[Pair]:
    """A warm, connected pair on `mooncake` or `shm`; both record into `trace_folder`, if there is one."""
    settings: dict[str, Any] = {"verify": verify} | ({"metrics_port": 0} if metrics else {})
    if push:
        settings["direction"] = "push"
    with (
        tempfile.TemporaryDirectory() as folder,
        encoder_process(
            data_plane,
            regions,
            region_nbytes,
            settings | (_new_keys(folder) if curve else {}) | _trace(trace_folder, "encoder"),
        ) as encoder,
    ):
        overrides = {
            "role": "prefill",
            "encoders": [encoder.address],
            "data_plane": data_plane,
            "pool.regions": regions,
            "pool.region_nbytes": region_nbytes,
            **settings,
            **(_prefill_keys(folder, encoder.address) if curve else {}),
            **_trace(trace_folder, "prefill"),
        }
        plane = PushPlane("127.0.0.1") if push else open_plane(data_plane, "127.0.0.1")
        watched = _Watched(plane)
        node = PrefillNode(load_config(None, overrides), open_plane_with=lambda: plane)
        async with node:
            connected = Pair(encoder, node)
            await connected.latency_s(synthetic_item(4))
            connected.segment, connected.exported = watched.segment, watched.exported
            yield connected


def _trace(folder: str | None, role: str) -> dict[str, Any]:
    return {} if folder is None else {"trace": f"{folder}/{role}.trace"}


def _new_keys(folder: str) -> dict[str, str]:
    """Keys for both sides; the encoder's settings."""
    for name in ("encoder", "prefill"):
        write_keys(f"{folder}/{name}", new_keys())
    key = read_secret_key(f"{folder}/prefill").public
    return _settings_for(folder, "encoder", f'key = "{key}"\nrole = "prefill"')


def _prefill_keys(folder: str, address: str) -> dict[str, str]:
    key = read_secret_key(f"{folder}/encoder").public
    return _settings_for(folder, "prefill", f'key = "{key}"\nrole = "encoder"\naddresses = ["{address}"]')


def _settings_for(folder: str, name: str, entry: str) -> dict[str, str]:
    peers = Path(folder) / f"{name}.toml"
    peers.write_text(f"[[peer]]\n{entry}\n")
    peers.chmod(0o644)
    return {"security.secret_key": f"{folder}/{name}", "security.peers": str(peers)}


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
