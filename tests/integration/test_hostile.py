"""Peers with a good Hello and bad intentions: nothing crashes, hangs, or takes from others."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from node_pairs import empty
from test_nodes import check, encoder_node, prefill_node, request

from epd.node import EncoderNode, PrefillNode
from epd.protocol.ids import (
    Attempt,
    Incarnation,
    LeaseId,
    NodeId,
    Part,
    RegionId,
    Seal,
    SessionId,
    TransferId,
)
from epd.protocol.messages import (
    AnyMessage,
    BufferGrant,
    Cancel,
    ControlMessage,
    EmbeddingMetadata,
    EmbeddingSpec,
    EncodeRequest,
    Failed,
    ForwardDone,
    Heartbeat,
    Hello,
    Item,
    MediaChunk,
    MediaMissing,
    NeedMedia,
    PeerLimits,
    Probe,
    ReadyItem,
    Receipt,
    RegionDescriptor,
    Regions,
    Role,
    Source,
    Submit,
)
from epd.protocol.session import SessionLimits
from epd.protocol.trace import LOGIC_VERSION
from epd.protocol.wire import PROTOCOL_VERSION
from epd.runtime.clock import MonotonicClock
from epd.runtime.endpoint import Endpoint, PeerInfo
from epd.runtime.timers import Timers
from epd.testing.synthetic import synthetic_item

NUMBERS = (0, 1, -1, 127, 128, 2**31, 2**63 - 1, -(2**63))


class Hostile:
    """A bare endpoint of some role; what it sends is the test's to choose."""

    def __init__(self, role: Role, like: Any, data_plane: str = "shm") -> None:
        loop = asyncio.get_running_loop()
        clock = MonotonicClock()
        self._role = role
        self._like = like
        self._data_plane = data_plane
        self.sessions: asyncio.Queue[SessionId] = asyncio.Queue()
        self.heard: list[AnyMessage] = []
        self.answer: Callable[[SessionId, AnyMessage], None] = lambda session, message: None
        self.endpoint = Endpoint(
            hello=self._hello,
            limits=SessionLimits(),
            clock=clock,
            timers=Timers(clock, loop.call_at),
            recorder=None,
            handler=self,
        )

    def _hello(self) -> Hello:
        fingerprint = "synthetic:1" if self._role == "encoder" else ""
        client = self._role == "client"
        return Hello(
            NodeId(f"hostile-{secrets.token_hex(4)}"),
            Incarnation(secrets.randbits(64)),
            self._role,
            PROTOCOL_VERSION,
            LOGIC_VERSION,
            fingerprint,
            "" if client else self._data_plane,
            "" if client else self._like,
            PeerLimits(128, 2**40, 2**40),
        )

    def session_opened(self, session: SessionId, peer: PeerInfo) -> None:
        self.sessions.put_nowait(session)

    def session_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None:
        """As it pleases."""

    def session_suspect(self, session: SessionId, suspect: bool) -> None:
        """As it pleases."""

    def messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None:
        for message in messages:
            self.heard.append(message)
            self.answer(session, message)

    def media_writable(self, session: SessionId) -> None:
        """As it pleases."""

    def load(self) -> Heartbeat:
        return Heartbeat()


@pytest.fixture
async def encoder() -> AsyncIterator[EncoderNode]:
    async with encoder_node() as node:
        yield node


@pytest.fixture
async def prefill(encoder: EncoderNode) -> AsyncIterator[PrefillNode]:
    async with prefill_node(encoder.listen) as node:
        yield node


async def still_serves(prefill: PrefillNode) -> None:
    item = synthetic_item(4096)
    delivery = await prefill.encode(request(secrets.token_hex(4), item))
    check(delivery, item)
    delivery.release()


async def test_an_encoder_takes_hostile_numbers_from_a_prefill_node(
    encoder: EncoderNode, prefill: PrefillNode
) -> None:
    hostile = Hostile("prefill", "")
    session = hostile.endpoint.dial(encoder.listen)
    assert await hostile.sessions.get() == session
    good = synthetic_item(64).described()
    items = [
        (),
        (good,),
        (good,) * 129,
        (Item(Probe("image", -5, -7), b"", -1),),
        (Item(Probe("video", 2**40, 2**40), b"x" * 32, 2**50),),
        (Item(Probe("image", 2**62, 1), b"x" * 32, 1),),
    ]
    transfers = itertools.count(1)
    for wanted, remaining in itertools.product(items, (0, -5, 2**62, 1000)):
        transfer = TransferId(next(transfers))
        where = (transfer, Part(-1), Attempt(0))
        hostile.endpoint.send(session, EncodeRequest(*where, wanted, "model", remaining))
        for number in NUMBERS:
            hostile.endpoint.send(session, BufferGrant(*where, LeaseId(number)))
            hostile.endpoint.send(session, Receipt(*where, LeaseId(number), number, number, True))
            hostile.endpoint.send(session, Receipt(*where, LeaseId(0), number, 2**62, False))
        hostile.endpoint.send_media(session, MediaChunk(b"x" * 32, -1, -1, memoryview(b"junk")))
        hostile.endpoint.send(session, MediaMissing(b"short"))
        await still_serves(prefill)
        hostile.endpoint.send(session, Cancel(*where))
    hostile.endpoint.close(session, "done", "the test is over")
    await hostile.endpoint.close_all(1.0)
    await empty(encoder.listen)
    await empty(prefill.listen)


async def test_a_prefill_node_takes_hostile_numbers_from_an_encoder() -> None:
    """It serves on with the good encoder, and every request ends."""
    choices = itertools.cycle(range(7))
    async with encoder_node() as good:
        hostile = Hostile("encoder", good.plane.segment)
        address = hostile.endpoint.bind("tcp://127.0.0.1:0")

        def answer(session: SessionId, message: AnyMessage) -> None:
            if not isinstance(message, EncodeRequest):
                return
            where = (message.transfer, message.part, message.attempt)
            spec = EmbeddingSpec(16, 1, "float32")
            source = Source(RegionId(10**6), 2**62, spec.nbytes, Seal(1))
            lies: list[ControlMessage] = [
                EmbeddingMetadata(*where, ()),
                EmbeddingMetadata(*where, (EmbeddingSpec(-1, -1, "float32"),) * len(message.items)),
                EmbeddingMetadata(*where, (EmbeddingSpec(2**40, 2**20, "float32"),) * len(message.items)),
                Failed(*where, "no such code", True, 10**9, "?" * 5000),
                ForwardDone(*where, LeaseId(1), -5, (ReadyItem(source, spec),), True),
                EmbeddingMetadata(*where, (spec,) * len(message.items)),
                NeedMedia(b"not a hash"),
            ]
            lie = lies[next(choices)]
            hostile.endpoint.send(session, lie)
            for grant in range(1, 40):
                done = ForwardDone(*where, LeaseId(grant), 0, (ReadyItem(source, spec),), True)
                hostile.endpoint.send(session, done)

        hostile.answer = answer
        async with prefill_node(good.listen, address, timeouts__metadata_s=0.3) as prefill:
            session = await hostile.sessions.get()
            regions = tuple(RegionDescriptor(r.region, r.base, r.nbytes) for r in good.plane.export())
            hostile.endpoint.send(session, Regions(regions))
            delivered = 0
            for number in range(60):
                item = synthetic_item(64 + 4 * number)
                try:
                    delivery = await prefill.encode(request(f"{number}", item, deadline_s=5.0))
                except Exception as error:
                    assert hasattr(error, "code")
                    continue
                check(delivery, item)
                delivery.release()
                delivered += 1
            assert delivered > 10
            assert any(isinstance(message, EncodeRequest) for message in hostile.heard)
            await empty(prefill.listen)
        await hostile.endpoint.close_all(0.0)
        await empty(good.listen)


async def test_a_node_takes_hostile_submits_from_a_client(encoder: EncoderNode, prefill: PrefillNode) -> None:
    for node in (prefill, encoder):
        hostile = Hostile("client", "")
        session = hostile.endpoint.dial(node.listen)
        assert await hostile.sessions.get() == session
        good = synthetic_item(64).described()
        items: list[tuple[Item, ...]] = [
            (),
            (good,) * 200,
            (Item(Probe("image", 1, 1), b"", 0),),
            (Item(Probe("image", 1, 1), b"y" * 32, -1),),
            (Item(Probe("image", 1, 1), b"y" * 32, 2**60),),
            (Item(Probe("audio"), b"y" * 32, 10),),
        ]
        for number, wanted in enumerate(items):
            for remaining in (-1, 0, 500):
                hostile.endpoint.send(session, Submit(number - 3, wanted, "model", remaining, True))
            hostile.endpoint.send_media(session, MediaChunk(b"y" * 32, 0, 10, memoryview(b"0123456789")))
            hostile.endpoint.send(session, MediaMissing(b"y" * 32))
            await still_serves(prefill)
        hostile.endpoint.close(session, "done", "the test is over")
        await hostile.endpoint.close_all(1.0)
        await empty(node.listen)
