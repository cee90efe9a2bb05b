"""Push through whole nodes over Mooncake's TCP: what arrives, and what a late writer can do."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_pairs import empty

from epd.client import NodeClient
from epd.config import load_config
from epd.dataplane.mappings import Window
from epd.dataplane.push import PushPlane
from epd.memory.pool import Extent
from epd.node import PrefillNode
from epd.protocol.ids import RegionId, SessionId
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.runtime import links
from epd.testing.processes import NodeProcess
from epd.testing.synthetic import pattern, synthetic_item

MIB = 1024 * 1024
REGION_NBYTES = 32 * MIB
PREFILL = {"role": "prefill", "data_plane": "mooncake", "direction": "push", "pool.regions": 1}


@contextlib.contextmanager
def push_source(regions: int = 2) -> Iterator[NodeProcess]:
    command = [sys.executable, str(Path(__file__).with_name("push_source.py")), str(regions)]
    process = subprocess.Popen(
        [*command, str(REGION_NBYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield NodeProcess(process, json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@contextlib.asynccontextmanager
async def prefill(
    *encoders: str, settings: dict[str, Any] | None = None, plane: Callable[[], PushPlane] | None = None
) -> AsyncIterator[PrefillNode]:
    given = PREFILL | {"encoders": list(encoders), "pool.region_nbytes": REGION_NBYTES} | (settings or {})
    async with PrefillNode(load_config(None, given), open_plane_with=plane) as node:
        yield node


def wrong_bytes(delivery: Delivery, items: list[ImageItem]) -> int:
    wrong = 0
    for view, item in zip(delivery.views, items, strict=True):
        assert isinstance(view, memoryview)
        expected = pattern(item.media, view.nbytes)
        if bytes(view) != expected:
            wrong += sum(got != wanted for got, wanted in zip(bytes(view), expected, strict=True))
    return wrong


@pytest.mark.slow
async def test_what_an_encoder_writes_arrives_whole_and_leaves_nothing() -> None:
    with push_source() as source:
        async with prefill(source.listen, settings={"pool.regions": 2}) as node:
            assert node.data_plane == "mooncake/tcp"
            for nbytes in (4, 1000, 65_536, MIB, REGION_NBYTES - 8):
                item = synthetic_item(nbytes)
                delivery = await node.encode(EmbeddingRequest(f"{nbytes} B", [item], 20.0))
                assert wrong_bytes(delivery, [item]) == 0, nbytes
                delivery.release()
            many = [synthetic_item(4000 + 4 * number) for number in range(40)]
            delivery = await node.encode(EmbeddingRequest("many", many, 20.0))
            assert wrong_bytes(delivery, many) == 0
            delivery.release()
            await empty(node.listen)
            await empty(source.listen)


# -- late writers --------------------------------------------------------------------------------

ITEM_NBYTES = 16 * MIB
WATCHED = 256 * 1024
"""An offset that the first of a write's pieces reaches early."""
POISON = b"\xee" * 64


class Unfenced(PushPlane):
    """Deregisters a window and leaves it open: what is no fence."""

    def _shut(self, window: Window) -> bool:
        return True


class LateWriters:
    """A prefill node with room for one item, and two encoders. One is stopped in the middle of its write,
    the other writes for the next owner of the same memory, and then the first goes on."""

    def __init__(self, node: PrefillNode, sources: list[NodeProcess], client: NodeClient) -> None:
        self._node = node
        self._sources = {source.listen: source for source in sources}
        self._client = client
        self._memory = node.pool.view(Extent(RegionId(0), 0, REGION_NBYTES))
        self._requests = 0
        self.rounds = 0
        self.wrong_nbytes = 0

    async def play(self) -> None:
        """One round; it does not count if the write had ended before its writer stood still."""
        while (await self._client.inventory()).counts["encoders"] < len(self._sources):
            pass
        self._memory[WATCHED : WATCHED + len(POISON)] = POISON
        first, ended = self._submit()
        stopped = await asyncio.to_thread(self._stop_writer)
        if stopped is None:  # it was delivered before anybody looked
            (await ended).release()
            return
        session, source = stopped
        nbytes = ITEM_NBYTES - 4 * self._requests
        whole = bytes(self._memory[:nbytes]) == pattern(first.media, nbytes)
        self._node.cancel(f"late-{self._requests}")
        (await ended).release()
        self._node.endpoint.close(session, "dead", "what the node does after dead_after_s")
        second, ended = self._submit()
        delivery = await ended
        assert delivery.error is None
        assert wrong_bytes(delivery, [second]) == 0
        source.go_on()
        async with NodeClient(source.listen) as client:
            while (await client.inventory()).counts["writes"]:
                pass
        if not whole:
            self.rounds += 1
            self.wrong_nbytes += wrong_bytes(delivery, [second])
        delivery.release()

    def _submit(self) -> tuple[ImageItem, "asyncio.Future[Delivery]"]:
        self._requests += 1
        item = synthetic_item(ITEM_NBYTES - 4 * self._requests)  # other media, so another pattern
        ended: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._node.submit(EmbeddingRequest(f"late-{self._requests}", [item], 60.0), ended.set_result)
        return item, ended

    def _stop_writer(self) -> tuple[SessionId, NodeProcess] | None:
        """Wait in a thread until bytes arrive; then whose they are."""
        pause = threading.Event()
        while self._memory[WATCHED : WATCHED + len(POISON)] == POISON:
            pause.wait(100e-6)
        assert self._node.pushed is not None
        writes = list(self._node.pushed._writes.values())
        if not writes:
            return None
        session = writes[0].request.session
        source = self._sources[self._node.endpoint.peers()[session].address]
        source.stop()
        return session, source


async def late_writers(rounds: int, plane: type[PushPlane]) -> LateWriters:
    with push_source() as one, push_source() as other:
        async with (
            prefill(one.listen, other.listen, plane=lambda: plane("127.0.0.1")) as node,
            NodeClient(node.listen) as client,
        ):
            late = LateWriters(node, [one, other], client)
            while late.rounds < rounds:
                await late.play()
            return late


@pytest.fixture
def quick_redials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LONGEST_PAUSE_S", 0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_redials")
async def test_a_late_writer_writes_into_nobody_elses_slot() -> None:
    late = await late_writers(100, PushPlane)
    assert late.wrong_nbytes == 0


@pytest.mark.slow
@pytest.mark.usefixtures("quick_redials")
async def test_without_the_fence_a_late_writer_does() -> None:
    """So the test above can fail; and deregistering alone is no fence."""
    late = await late_writers(5, Unfenced)
    assert late.wrong_nbytes > MIB
