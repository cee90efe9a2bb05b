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
from epd.node import EncoderNode, PrefillNode
from epd.protocol.errors import NoEncoder
from epd.protocol.ids import RegionId, SessionId
from epd.protocol.sources import SEAL_WORD
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.runtime import links
from epd.testing.processes import NodeProcess, node_process
from epd.testing.synthetic import PatternWorker, SyntheticEncoder, pattern, synthetic_item

HOST = "127.0.0.1"
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


@pytest.mark.slow
def test_a_node_that_pushes_says_what_that_opens_and_where_it_cannot_be_had(tmp_path: Path) -> None:
    settings = {**PREFILL, "encoders": ["tcp://127.0.0.1:9"], "log_format": "json"}
    with (tmp_path / "log").open("wb+") as log, node_process(settings, log.fileno()) as node:
        assert node.ready["data_plane"] == "mooncake/tcp"
        assert node.terminate() == 0
        log.seek(0)
        assert b"whoever reaches Mooncake's ports, can write this node's pool" in log.read()
    command = [sys.executable, "-m", "epd.cli.node", "--role", "encoder", "--set", "direction=push"]
    refused = subprocess.run(
        command, env={**os.environ, "MC_TCP_PROTO": "1"}, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "direction = push: MC_TCP_PROTO=1 ends writes before they have arrived" in refused.stderr


@pytest.mark.slow
async def test_a_pair_of_which_one_side_pushes_is_refused_and_both_are_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    encoder = EncoderNode(
        load_config(None, {"role": "encoder", "data_plane": "mooncake"}),
        encoder=SyntheticEncoder(),
        worker=PatternWorker(),
    )
    async with encoder, prefill(encoder.listen) as node:
        with pytest.raises(NoEncoder):
            await node.encode(EmbeddingRequest("mixed", [synthetic_item(4)], 0.5))
    out, err = capfd.readouterr()
    assert "data planes differ" in out + err
    assert "'push:mooncake/tcp'" in out + err
    assert "'mooncake/tcp'" in out + err


class LosesASeal(PushPlane):
    """Says once that a seal was written, and writes something else."""

    lost = False

    def _submit(self, name: str, local: int, source: int, nbytes: int) -> int:
        if nbytes == SEAL_WORD.size and not self.lost:
            self.lost = True
            local = self._scratch.address
        return super()._submit(name, local, source, nbytes)


@pytest.mark.slow
async def test_a_write_that_did_not_bring_the_seal_is_not_delivered_but_done_again() -> None:
    encoder = EncoderNode(
        load_config(None, {"role": "encoder", "data_plane": "mooncake", "direction": "push"}),
        encoder=SyntheticEncoder(),
        worker=PatternWorker(),
        open_plane_with=lambda: LosesASeal(HOST),
    )
    async with encoder, prefill(encoder.listen) as node:
        item = synthetic_item(MIB)
        delivery = await node.encode(EmbeddingRequest("again", [item], 20.0))
        assert wrong_bytes(delivery, [item]) == 0
        assert node.transfer.outcomes == {"seal_mismatch": 1, "ok": 1}
        delivery.release()


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
        """One round."""
        _, ended, session, source = await self.stop_one()
        self.cancel()
        (await ended).release()
        self._node.endpoint.close(session, "dead", "what the node does after dead_after_s")
        item, ended = self.submit()
        delivery = await ended
        assert delivery.error is None
        assert wrong_bytes(delivery, [item]) == 0
        source.go_on()
        await self.settled(source)
        self.rounds += 1
        self.wrong_nbytes += wrong_bytes(delivery, [item])
        delivery.release()

    async def stop_one(self) -> tuple[ImageItem, "asyncio.Future[Delivery]", SessionId, NodeProcess]:
        """A request whose writer stands still in that session, some of its bytes written and some not."""
        while True:
            while (await self._client.inventory()).counts["encoders"] < len(self._sources):
                pass
            self._memory[WATCHED : WATCHED + len(POISON)] = POISON
            item, ended = self.submit()
            stopped = await asyncio.to_thread(self._stop_writer)
            if stopped is not None:
                session, source = stopped
                nbytes = ITEM_NBYTES - 4 * self._requests
                if bytes(self._memory[:nbytes]) != pattern(item.media, nbytes):
                    return item, ended, session, source
                source.go_on()
            (await ended).release()

    async def settled(self, source: NodeProcess) -> None:
        """Until nothing that it had begun to write is under way."""
        async with NodeClient(source.listen) as client:
            while (await client.inventory()).counts["writes"]:
                pass

    def cancel(self) -> None:
        """The newest request."""
        self._node.cancel(f"late-{self._requests}")

    def submit(self) -> tuple[ImageItem, "asyncio.Future[Delivery]"]:
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
            prefill(one.listen, other.listen, plane=lambda: plane(HOST)) as node,
            NodeClient(node.listen) as client,
        ):
            late = LateWriters(node, [one, other], client)
            while late.rounds < rounds:
                await late.play()
            return late


@pytest.mark.slow
async def test_a_writer_that_says_nothing_is_asked_and_then_shut_out() -> None:
    """Without anybody's help: the read's deadline, the question, the fence, the other encoder."""
    impatient = {
        "timeouts.read_base_s": 0.05,
        "timeouts.read_min_bandwidth_bytes_per_s": 1e9,
        "timeouts.heartbeat_s": 0.1,
        "timeouts.suspect_after_s": 0.3,
    }
    with push_source() as one, push_source() as other:
        async with (
            prefill(one.listen, other.listen, settings=impatient) as node,
            NodeClient(node.listen) as client,
        ):
            late = LateWriters(node, [one, other], client)
            item, ended, _, source = await late.stop_one()
            delivery = await ended
            assert node.pushed is not None
            assert node.pushed.fenced == 1
            source.go_on()
            await late.settled(source)
            assert wrong_bytes(delivery, [item]) == 0
            delivery.release()
            await empty(node.listen)


class Irrevocable(PushPlane):
    def revoke_window(self, session: SessionId) -> bool:
        return False


@pytest.mark.slow
async def test_what_was_being_written_through_a_window_that_cannot_be_revoked_stays_out_of_use() -> None:
    with push_source() as one, push_source() as other:
        settings = {"pool.regions": 2, "metrics_port": 0}
        async with (
            prefill(one.listen, other.listen, settings=settings, plane=lambda: Irrevocable(HOST)) as node,
            NodeClient(node.listen) as client,
        ):
            late = LateWriters(node, [one, other], client)
            _, ended, session, _ = await late.stop_one()
            late.cancel()
            (await ended).release()
            node.endpoint.close(session, "dead", "what the node does after dead_after_s")
            for _ in range(3):  # there is room for them, elsewhere
                item, ended = late.submit()
                delivery = await ended
                assert wrong_bytes(delivery, [item]) == 0
                delivery.release()
            counts = (await client.inventory()).counts
            assert (counts["windows_held"], counts["quarantined"], counts["writes"]) == (1, 1, 1)
            shown = {(s.family, s.labels): s.value for s in node._samples()}
            assert shown["epd_push_windows", ("held",)] == 1
            assert shown["epd_push_quarantined_bytes", ()] == ITEM_NBYTES - 4


@pytest.fixture
def quick_redials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LONGEST_PAUSE_S", 0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_redials")
async def test_a_late_writer_writes_into_nobody_elses_slot() -> None:
    # Two at a time: an engine that was refused three times in a row waits for a second.
    for late in await asyncio.gather(late_writers(50, PushPlane), late_writers(50, PushPlane)):
        assert (late.rounds, late.wrong_nbytes) == (50, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_redials")
async def test_without_the_fence_a_late_writer_does() -> None:
    """So the test above can fail; and deregistering alone is no fence."""
    late = await late_writers(5, Unfenced)
    assert late.wrong_nbytes > MIB
