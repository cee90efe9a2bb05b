"""An encoder is killed, or stopped for longer than `dead after`, in each of the seven states and in mid-read.

The prefill node runs in this process, on a plane with hold points; the encoders are processes with
hold points of their own. Nobody sleeps: every wait is for something that was reached.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from typing import Any

import pytest
from node_pairs import PLANES, empty

from epd.config import load_config
from epd.dataplane.faulty import FaultyPlane
from epd.dataplane.select import Choice, open_plane
from epd.memory.tensors import host_bytes
from epd.node import PrefillNode
from epd.protocol import prefill_types as t
from epd.protocol import slots
from epd.protocol.errors import EpdError
from epd.protocol.machine import Effect, Event
from epd.protocol.placement import plan_parts
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.testing.processes import HeldProcess, held_encoder
from epd.testing.synthetic import pattern, synthetic_item

MIB = 1024 * 1024
TIMEOUTS = {
    "timeouts.heartbeat_s": 0.1,
    "timeouts.suspect_after_s": 0.3,
    "timeouts.dead_after_s": 1.0,
    "timeouts.dedup_retention_s": 0.3,
}
SIGNALS = ("kill", "stop")
ITEM = synthetic_item(3 * MIB)


class Watch:
    """A recorder that wakes whoever waits for a step."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[Event, tuple[Effect, ...]], bool], asyncio.Future[None]]] = []

    def declare(self, kind: str, limits: Any) -> None:
        """A trace's business."""

    def record(
        self, kind: str, key: Hashable, event: Event, now_s: float, effects: tuple[Effect, ...]
    ) -> None:
        for matches, done in self._waiting:
            if not done.done() and matches(event, effects):
                done.set_result(None)

    async def wait(self, matches: Callable[[Event, tuple[Effect, ...]], bool]) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((matches, done))
        async with asyncio.timeout(30):
            await done


class World:
    """Two encoders and our prefill node."""

    def __init__(self, node: PrefillNode, plane: FaultyPlane, encoders: list[HeldProcess]) -> None:
        self.node = node
        self.plane = plane
        self.encoders = encoders
        self.watch = Watch()
        self._requests = 0
        node.prefill._transfers.recorder = self.watch
        node.buffers._slots.recorder = self.watch

    def submit(self, item: ImageItem = ITEM, deadline_s: float = 30.0) -> "asyncio.Future[Delivery]":
        self._requests += 1
        done: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        request = EmbeddingRequest(f"request-{self._requests}", [item], deadline_s)
        self.node.submit(request, done.set_result)
        return done

    def serving(self, item: ImageItem = ITEM) -> HeldProcess:
        """The encoder that the next request for this item goes to."""
        (plan,) = plan_parts((item.described(),), self.node.prefill.encoders.loads(), 128)
        assert plan.session is not None
        address = self.node.endpoint.peers()[plan.session].address
        return next(encoder for encoder in self.encoders if encoder.listen == address)

    async def connected(self) -> None:
        while len(self.node.prefill.encoders.loads()) < len(self.encoders):
            await self.watch_news()

    async def watch_news(self) -> None:
        """One request: the loop goes on, and the node with it."""
        delivery = await self.submit(synthetic_item(0))
        assert delivery.error is None
        delivery.release()


@pytest.fixture
def encoders(plane_name: str) -> Iterator[list[HeldProcess]]:
    settings = TIMEOUTS | {"data_plane": plane_name, "staging.regions": 1, "log_format": "json"}
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(held_encoder(settings, encoder="synthetic")) for _ in range(2)]


@pytest.fixture
async def world(plane_name: Choice, encoders: list[HeldProcess]) -> AsyncIterator[World]:
    overrides = TIMEOUTS | {
        "role": "prefill",
        "encoders": [encoder.listen for encoder in encoders],
        "pool.regions": 1,
        "pool.region_nbytes": 4 * MIB,
    }
    plane = FaultyPlane(open_plane(plane_name, "127.0.0.1"))
    async with PrefillNode(load_config(None, overrides), open_plane_with=lambda: plane) as node:
        world = World(node, plane, encoders)
        await world.connected()
        yield world


@pytest.fixture
def plane_name(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "shm"))


def strike(victim: HeldProcess, how: str) -> None:
    victim.kill() if how == "kill" else victim.stop()


def check_whole(delivery: Delivery, item: ImageItem = ITEM) -> None:
    assert delivery.error is None, delivery.error
    assert bytes(host_bytes(delivery.views[0])) == pattern(item.media, delivery.specs[0].nbytes)


async def finish(world: World, victim: HeldProcess, how: str, pending: "asyncio.Future[Delivery]") -> None:
    """The request ends whole; the node goes on serving; the survivors hold nothing in the end."""
    async with asyncio.timeout(30):
        delivery = await pending
    check_whole(delivery)
    if how == "stop":
        victim.go_on()  # whatever it still sends must not reach a byte that we hold
    following = synthetic_item(64 * 1024)
    async with asyncio.timeout(30):
        after = await world.submit(following)
    check_whole(after, following)
    after.release()
    check_whole(delivery)
    delivery.release()
    await empty(world.node.listen)
    for encoder in world.encoders:
        if encoder is not victim or how == "stop":
            await empty(encoder.listen)


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("point", ["plan", "forward"])
async def test_lost_while_requested_and_while_buffer_registered(world: World, point: str, how: str) -> None:
    victim = world.serving()
    victim.hold(point)
    pending = world.submit()
    await asyncio.to_thread(victim.wait_reached, point)
    strike(victim, how)
    if how == "stop":
        await world.watch.wait(lambda event, _: isinstance(event, t.SessionEnded))
        victim.release(point)
    await finish(world, victim, how, pending)


@pytest.mark.parametrize("how", SIGNALS)
async def test_lost_while_metadata(world: World, how: str) -> None:
    """Sizes are known; there is no room until somebody else's delivery is released."""
    blocker_item = synthetic_item(2 * MIB)
    blocker = await world.submit(blocker_item)
    victim = world.serving()
    asked = asyncio.ensure_future(
        world.watch.wait(lambda _, effects: any(isinstance(e, t.AskRoom) for e in effects))
    )
    pending = world.submit()
    await asked
    lost = asyncio.ensure_future(world.watch.wait(lambda event, _: isinstance(event, t.SessionEnded)))
    strike(victim, how)
    await lost
    check_whole(blocker, blocker_item)
    blocker.release()
    await finish(world, victim, how, pending)


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("plane_name", PLANES, indirect=True)
async def test_lost_while_forward_done_in_mid_read(world: World, how: str) -> None:
    """The read's pieces are posted to a peer that is gone, or stands still until our side aborts them."""
    victim = world.serving()
    reached = world.plane.hold("payload")
    pending = world.submit()
    await asyncio.to_thread(reached.wait, 30)
    strike(victim, how)
    world.plane.release("payload")
    await finish(world, victim, how, pending)


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("state", ["rdma-written", "consumed", "freed"])
async def test_lost_after_delivery(world: World, state: str, how: str) -> None:
    """What was delivered is ours, whatever becomes of its encoder."""
    victim = world.serving()
    delivery = await world.submit()
    if state != "rdma-written":
        delivery.take()
    if state == "freed":
        delivery.release()
    strike(victim, how)
    if state != "freed":
        check_whole(delivery)
        delivery.release()
    pending = world.submit()
    await finish(world, victim, how, pending)


@pytest.mark.parametrize("plane_name", PLANES, indirect=True)
async def test_a_slot_whose_read_is_not_terminal_is_not_leased(world: World) -> None:
    reached = world.plane.hold("payload", survives_abort=True)
    late = world.submit(deadline_s=1.0)
    await asyncio.to_thread(reached.wait, 30)
    ended = await late
    assert ended.error is not None
    assert ended.error.code == "deadline"
    assert world.node.buffers.counts()["quarantined"] == 1
    asked = asyncio.ensure_future(
        world.watch.wait(lambda _, effects: any(isinstance(e, t.AskRoom) for e in effects))
    )
    waiting = world.submit()  # needs the same room
    await asked
    await world.watch_news()
    assert world.node.buffers.counts()["room_waiters"] == 1
    assert not waiting.done()
    freed = asyncio.ensure_future(
        world.watch.wait(lambda _, effects: any(isinstance(e, slots.FreeExtents) for e in effects))
    )
    world.plane.release("payload")
    await freed
    delivery = await waiting
    check_whole(delivery)
    delivery.release()
    await empty(world.node.listen)


@pytest.mark.parametrize("point", ["payload", "seal"])
@pytest.mark.parametrize("plane_name", PLANES, indirect=True)
async def test_a_source_reused_early_is_seen_by_its_seal_and_never_delivered(
    world: World, point: Any
) -> None:
    victim = world.serving()
    reached = world.plane.hold(point)
    mismatched = asyncio.ensure_future(
        world.watch.wait(
            lambda event, _: isinstance(event, slots.ReadTerminal) and event.outcome == "seal_mismatch"
        )
    )
    pending = world.submit()
    await asyncio.to_thread(reached.wait, 30)
    assert await asyncio.to_thread(victim.reuse_early) >= 1
    world.plane.release(point)
    await mismatched
    delivery = await pending
    check_whole(delivery)
    delivery.release()


async def test_without_any_encoder_a_request_ends_by_its_deadline(world: World) -> None:
    for encoder in world.encoders:
        encoder.kill()
    delivery = await world.submit(deadline_s=1.5)
    assert isinstance(delivery.error, EpdError)
    assert delivery.error.code in ("no_encoder", "session_lost", "deadline")
    await empty(world.node.listen)
