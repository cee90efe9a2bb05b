"""The forward worker as a thread, on the CPU: the same code as on a GPU, with nothing queued."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import xxhash
from pools import Memory

from epd.encoders.base import Encoder, MediaItem
from epd.encoders.callables import CallableEncoder
from epd.forward import thread
from epd.forward.base import ForwardItem, ItemResult
from epd.forward.thread import ThreadWorker
from epd.protocol.errors import ForwardFailed
from epd.protocol.messages import DType, EmbeddingSpec, Probe

DIM = 4
HANG_S = 30.0


class Model:
    """What the encoder under test does; `forward` waits for `go` when its media say so."""

    def __init__(self) -> None:
        self.loaded: list[tuple[int, str]] = []
        self.fail_loads = 0
        self.entered = threading.Event()
        self.go = threading.Event()

    def load(self, num_threads: int, device: str) -> None:
        self.loaded.append((num_threads, device))
        if len(self.loaded) <= self.fail_loads:
            raise RuntimeError("no such weights")

    def preprocess(self, item: MediaItem) -> bytes:
        return bytes(item.media)

    def forward(self, batch: list[bytes]) -> list[torch.Tensor]:
        results = []
        for media in batch:
            if media == b"raise":
                raise RuntimeError("as told")
            if media == b"wait":
                self.entered.set()
                assert self.go.wait(HANG_S)
            results.append(rows(media))
        return results

    def encoder(self) -> Encoder:
        return CallableEncoder(
            name="model",
            fingerprint="1",
            default_dtype="bfloat16",
            plan=lambda probe, dtype: EmbeddingSpec(probe.width, DIM, dtype),
            preprocess=self.preprocess,
            forward=self.forward,
            load=self.load,
        )


def rows(media: bytes) -> torch.Tensor:
    return torch.full((3, DIM), float(sum(media)), dtype=torch.bfloat16)


def item(media: bytes, region: int = 0, offset: int = 0, dtype: DType = "bfloat16") -> ForwardItem:
    return ForwardItem(media, Probe("image", width=3), dtype, EmbeddingSpec(3, DIM, dtype), region, offset)


class Node:
    """The events of a worker, in order."""

    def __init__(self, worker: ThreadWorker) -> None:
        self.worker = worker
        self.regions = [Memory(0, 4096), Memory(1, 4096)]
        self._events: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    def worker_ready(self) -> None:
        self._events.put_nowait(("ready",))

    def batch_ended(self, batch: int, results: Sequence[ItemResult]) -> None:
        self._events.put_nowait(("ended", batch, list(results)))

    def worker_died(self, reason: str) -> None:
        self._events.put_nowait(("died", reason))

    def worker_lost(self, reason: str) -> None:
        self._events.put_nowait(("lost", reason))

    async def event(self) -> tuple[Any, ...]:
        async with asyncio.timeout(HANG_S):
            return await self._events.get()

    def nothing_came(self) -> bool:
        return self._events.empty()

    def payload(self, item: ForwardItem) -> bytes:
        region = self.regions[item.region]
        return bytes(region.view[item.offset : item.offset + item.spec.nbytes])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()
    monkeypatch.setattr(thread, "load_encoder", lambda spec: model.encoder())
    return model


@asynccontextmanager
async def started(batch_items: int = 1) -> AsyncIterator[Node]:
    node = Node(ThreadWorker("model", "cpu", 2, batch_items))
    node.worker.start(node.regions, node)
    try:
        yield node
    finally:
        await asyncio.to_thread(node.worker.stop)
        assert not any(one.name == "epd-forward" for one in threading.enumerate())


@pytest.mark.parametrize("batch_items", [1, 4])
async def test_results_are_in_their_places_when_the_batch_has_ended(model: Model, batch_items: int) -> None:
    async with started(batch_items) as node:
        assert await node.event() == ("ready",)
        assert model.loaded == [(2, "cpu")]
        items = [item(b"a"), item(b"raise", 0, 256), item(b"c", 1, 512)]
        node.worker.submit(7, items, digest=True)
        kind, batch, (first, second, third) = await node.event()
        assert (kind, batch, second.error.code) == ("ended", 7, "forward_failed")
        for one, result, media in ((items[0], first, b"a"), (items[2], third, b"c")):
            expected = rows(media).view(torch.uint8).numpy().tobytes()
            assert node.payload(one) == expected
            assert result == ItemResult(None, xxhash.xxh3_128_digest(expected))
        assert node.regions[0].view[24:4096] == bytes(4096 - 24)


@pytest.mark.parametrize(("region", "offset"), [(2, 0), (0, 4096 - 8)], ids=["region", "end"])
async def test_a_place_outside_the_regions_is_not_written(model: Model, region: int, offset: int) -> None:
    async with started() as node:
        await node.event()
        node.worker.submit(1, [item(b"a", region, offset)], digest=False)
        _, _, (result,) = await node.event()
        assert result.error.code == "forward_failed"
        assert bytes(node.regions[0].view) == bytes(4096)


async def test_a_model_that_does_not_load_at_start_ends_the_node(model: Model) -> None:
    model.fail_loads = 1
    async with started() as node:
        kind, reason = await node.event()
        assert (kind, "no such weights" in reason) == ("lost", True)
        assert node.nothing_came()


async def test_a_forward_that_was_told_to_end_and_does_is_a_death_and_a_new_start(model: Model) -> None:
    async with started() as node:
        await node.event()
        node.worker.submit(1, [item(b"wait")], digest=False)
        await asyncio.to_thread(model.entered.wait, HANG_S)
        node.worker.kill()
        assert node.nothing_came()  # a thread cannot be killed: it may still write
        model.go.set()
        assert (await node.event())[0] == "died"
        assert await node.event() == ("ready",)
        node.worker.submit(2, [item(b"b")], digest=False)
        assert (await node.event())[:2] == ("ended", 2)


async def test_a_forward_that_does_not_end_loses_the_worker(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "END_WAIT_S", 0.01)
    async with started() as node:
        await node.event()
        node.worker.submit(1, [item(b"wait")], digest=False)
        await asyncio.to_thread(model.entered.wait, HANG_S)
        node.worker.kill()
        kind, reason = await node.event()
        assert (kind, "did not end" in reason) == ("lost", True)
        model.go.set()


async def test_stop_does_not_return_while_a_forward_may_still_write(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "STOP_WAIT_S", 0.01)
    async with started() as node:
        await node.event()
        node.worker.submit(1, [item(b"wait")], digest=False)
        await asyncio.to_thread(model.entered.wait, HANG_S)
        with pytest.raises(ForwardFailed, match="runs"):
            await asyncio.to_thread(node.worker.stop)
        model.go.set()
        monkeypatch.setattr(thread, "STOP_WAIT_S", HANG_S)
    assert node.nothing_came()  # no event comes after a stop


async def test_work_that_fails_after_it_was_queued_fails_its_batch_and_loses_the_worker(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: thread.Stream) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    async with started() as node:
        await node.event()
        monkeypatch.setattr(thread.Stream, "wait", fail)
        node.worker.submit(1, [item(b"a"), item(b"b")], digest=False)
        assert (await node.event())[0] == "lost"
        _, _, results = await node.event()
        assert [result.error.code for result in results] == ["forward_failed"] * 2


async def test_the_batch_has_ended_only_after_the_stream_has(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, go = threading.Event(), threading.Event()

    def wait(self: thread.Stream) -> None:
        waiting.set()
        assert go.wait(HANG_S)

    async with started() as node:
        await node.event()
        monkeypatch.setattr(thread.Stream, "wait", wait)
        node.worker.submit(1, [item(b"a")], digest=False)
        await asyncio.to_thread(waiting.wait, HANG_S)
        assert node.nothing_came()
        go.set()
        assert (await node.event())[:2] == ("ended", 1)


def test_a_worker_with_no_thread_is_stopped_at_once() -> None:
    ThreadWorker("model", "cpu", 1).stop()
