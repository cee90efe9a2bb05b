"""Whoever reaches our ports gets nothing without a key, and no more than is his with one."""

import asyncio
import secrets
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from session_nodes import PATIENT, RawPeer, TestNode, frame, hello, last_word_from, word_from
from test_nodes import check, encoder_node, prefill_node, request

from epd.client import NodeClient
from epd.protocol.errors import EpdError, PeerUnreachable
from epd.protocol.ids import SessionId
from epd.protocol.messages import Goodbye, Welcome
from epd.protocol.rates import RateLimits
from epd.protocol.session import SessionLimits
from epd.protocol.wire import Lane
from epd.runtime.addresses import Address
from epd.runtime.curve import apply_dialler
from epd.runtime.keys import KeyPair, PeerEntry, Peers, Security, new_keys, security_for, write_keys
from epd.runtime.zmq_lanes import ZmqListeningLane, open_context
from epd.testing.synthetic import synthetic_item

LOOPBACK = "tcp://127.0.0.1:0"
ENCODER, PREFILL, CLIENT, STRANGER = (new_keys() for _ in range(4))
HASTY = SessionLimits(3600.0, 3600.0, 3600.0, connect_s=2.0, drain_s=2.0)


def encoder_security() -> Security:
    known = [PeerEntry(PREFILL.public, "prefill", "pre"), PeerEntry(CLIENT.public, "client")]
    return Security(ENCODER, Peers(known))


@pytest.fixture
async def encoder() -> AsyncIterator[TestNode]:
    node = TestNode(hello("enc", "encoder"), PATIENT, security=encoder_security())
    node.address = node.endpoint.bind(LOOPBACK)
    yield node
    await node.close()


@pytest.fixture
async def prefill(encoder: TestNode) -> AsyncIterator[TestNode]:
    known = [PeerEntry(ENCODER.public, "encoder", "enc", (encoder.address,))]
    node = TestNode(hello("pre", "prefill"), PATIENT, security=Security(PREFILL, Peers(known)))
    yield node
    await node.close()


@pytest.fixture
def raw() -> Iterator[RawPeer]:
    peer = RawPeer()
    yield peer
    peer.close()


def dial_with(raw: RawPeer, keys: KeyPair, address: str, session: int) -> Any:
    """A control lane of a peer that lies about anything but its key."""
    socket = raw.context.socket(zmq.DEALER)
    raw.sockets.append(socket)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 30_000)
    socket.setsockopt(zmq.ROUTING_ID, session.to_bytes(8, "little"))
    apply_dialler(socket, keys, ENCODER.public)
    socket.connect(address)
    return socket


async def meet(prefill: TestNode, encoder: TestNode) -> SessionId:
    session = prefill.endpoint.dial(encoder.address)
    await prefill.until(lambda: session in prefill.endpoint.peers())
    await encoder.until(lambda: session in encoder.endpoint.peers())
    return session


async def refused(node: TestNode, address: str) -> str:
    session = node.endpoint.dial(address)
    return (await node.ended(session)).reason


async def test_two_endpoints_with_each_others_keys_meet(prefill: TestNode, encoder: TestNode) -> None:
    await meet(prefill, encoder)
    assert not encoder.endpoint.rejected_frames


async def test_strangers_without_a_key_or_with_wrong_ones_are_refused_and_counted(
    prefill: TestNode, encoder: TestNode
) -> None:
    session = await meet(prefill, encoder)
    known = Peers([PeerEntry(ENCODER.public, "encoder", "enc", (encoder.address,))])
    wrong = Peers([PeerEntry(STRANGER.public, "encoder", "enc", (encoder.address,))])
    reasons = []
    for security in (None, Security(STRANGER, known), Security(PREFILL, wrong)):
        node = TestNode(hello("pre", "prefill"), HASTY, security=security)
        reasons.append(await refused(node, encoder.address))
        assert not node.opens
        await node.close()
    assert all("handshake failed" in reason for reason in reasons)
    assert "not admitted" in reasons[1]
    assert encoder.endpoint.rejected_frames["handshake"] == 3
    assert list(encoder.endpoint.peers()) == [session]


async def test_a_listener_with_keys_and_no_authenticator_refuses_everybody() -> None:
    context = open_context(1)
    received: list[Any] = []

    class Owner:
        def lane_received(self, lane: Any, parts: list[Any]) -> None:
            received.append(parts)

        def __getattr__(self, name: str) -> Any:
            return lambda *given: None

    lane = ZmqListeningLane(context, Lane.CONTROL, Address("127.0.0.1", 0), 5.0, Owner(), ENCODER)
    lane.start_reading()
    known = Peers([PeerEntry(ENCODER.public, "encoder", "enc", (str(lane.address),))])
    limits = SessionLimits(3600.0, 3600.0, 3600.0, connect_s=0.5)
    node = TestNode(hello("pre", "prefill"), limits, security=Security(PREFILL, known))
    try:
        await refused(
            node, str(lane.address)
        )  # not even the handshake ends: nobody is there to admit anybody
        assert not received
        assert not node.opens
    finally:
        await node.close()
        lane.close()
        context.term()


@pytest.mark.parametrize(
    ("keys", "node", "role", "words"),
    [
        (PREFILL, "other", "prefill", "this key is node 'pre''s, not 'other''s"),
        (PREFILL, "pre", "client", "this key is one of role 'prefill', not 'client'"),
        (CLIENT, "pre", "client", "node 'pre' has another key"),
        (CLIENT, "pre", "prefill", "this key is one of role 'client', not 'prefill'"),
    ],
)
async def test_a_known_key_with_a_forged_hello_is_refused_and_ends_nobodys_session(
    prefill: TestNode, encoder: TestNode, raw: RawPeer, keys: KeyPair, node: str, role: Any, words: str
) -> None:
    session = await meet(prefill, encoder)
    forged = secrets.randbits(64)
    control = dial_with(raw, keys, encoder.address, forged)
    forgery = hello(node, role, incarnation=prefill.hello.incarnation, dial=10**6)
    control.send(frame(forged, 0, forgery))
    assert await last_word_from(control) == ("rejected", words)
    assert encoder.endpoint.rejected_frames["forged_hello"] == 1
    assert list(encoder.endpoint.peers()) == [session]


async def test_a_forged_incarnation_does_not_keep_its_owner_out(
    prefill: TestNode, encoder: TestNode, raw: RawPeer
) -> None:
    """As a client, in the name of nobody, with the incarnation of a prefill node and a later dial."""
    forged = secrets.randbits(64)
    control = dial_with(raw, CLIENT, encoder.address, forged)
    forgery = hello("nobody", "client", incarnation=prefill.hello.incarnation, dial=10**6)
    control.send(frame(forged, 0, forgery))
    assert isinstance(await word_from(control), Welcome)
    await meet(prefill, encoder)
    assert len(encoder.endpoint.peers()) == 2


async def test_a_frame_of_anothers_session_is_a_strangers(
    prefill: TestNode, encoder: TestNode, raw: RawPeer
) -> None:
    """On the media lane, before its owner has connected it: the routing id alone proves nothing."""
    session = secrets.randbits(64)
    control = dial_with(raw, PREFILL, encoder.address, session)
    control.send(frame(session, 0, hello("pre", "prefill")))
    welcome = await word_from(control)
    assert isinstance(welcome, Welcome)
    thief = dial_with(raw, CLIENT, welcome.media_address, session)
    thief.send(frame(session, 0, lane=Lane.MEDIA))
    thief.send(frame(session, 5, lane=Lane.MEDIA))
    async with asyncio.timeout(10):
        while encoder.endpoint.rejected_frames["stranger"] < 2:
            await encoder.turn()
    assert session in encoder.endpoint.peers()


async def test_an_encoder_that_says_it_is_another_is_refused(encoder: TestNode) -> None:
    known = [PeerEntry(ENCODER.public, "encoder", "another", (encoder.address,))]
    node = TestNode(hello("pre", "prefill"), PATIENT, security=Security(PREFILL, Peers(known)))
    assert await refused(node, encoder.address) == "this key is node 'another''s, not 'enc''s"
    await node.close()


# -- one peer among others -------------------------------------------------------------------


@pytest.mark.parametrize("secured", [False, True])
async def test_a_peer_that_sends_too_fast_loses_its_session_and_others_go_on(
    raw: RawPeer, secured: bool
) -> None:
    security = encoder_security() if secured else None
    rates = RateLimits(frames=5000, records=1000, media_nbytes=1e6)
    encoder = TestNode(hello("enc", "encoder"), PATIENT, security=security, rates=rates)
    encoder.address = encoder.endpoint.bind(LOOPBACK)
    known = Peers([PeerEntry(ENCODER.public, "encoder", "enc", (encoder.address,))])
    prefill = TestNode(
        hello("pre", "prefill"), PATIENT, security=Security(PREFILL, known) if secured else None
    )
    other = await meet(prefill, encoder)
    session = secrets.randbits(64)
    if secured:
        control = dial_with(raw, CLIENT, encoder.address, session)
    else:
        control = raw.dial(encoder.address, session)
    control.send(frame(session, 0, hello("fast", "client")))
    assert isinstance(await word_from(control), Welcome)
    for sequence in range(1, 3):
        control.send(frame(session, sequence, *[Goodbye("x")] * 800))
    assert await last_word_from(control) == ("too_fast", "more than 1000 records a second")
    assert (await encoder.ended(SessionId(session))).code == "too_fast"
    for sequence in range(3, 2000):  # and it does not stop
        control.send(frame(session, sequence, Goodbye("x")))
    before = len(encoder.messages_seen)
    prefill.endpoint.send(other, Goodbye("still here"))
    await encoder.received(before + 1)
    assert encoder.messages_seen[before] == Goodbye("still here")
    assert list(encoder.endpoint.peers()) == [other]
    assert encoder.endpoint.rejected_frames["too_fast"] >= 1
    await prefill.close()
    await encoder.close()


# -- whole nodes, from files -----------------------------------------------------------------


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, keys in (("enc", ENCODER), ("pre", PREFILL)):
            write_keys(str(folder / name), keys)
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600

    def settings(self, name: str, *entries: PeerEntry) -> dict[str, Any]:
        lines = []
        for entry in entries:
            lines += ["[[peer]]", f'key = "{entry.key}"', f'role = "{entry.role}"']
            lines += [f'node = "{entry.node}"'] if entry.node else []
            lines += [f"addresses = {list(entry.addresses)}"]
        peers = self.folder / f"{name}.toml"
        peers.write_text("\n".join(lines))
        peers.chmod(0o644)
        return {"node": name, "security__secret_key": str(self.folder / name), "security__peers": str(peers)}


@pytest.mark.parametrize("plane", ["shm", "mooncake"])
async def test_two_nodes_with_keys_serve_each_other_and_no_stranger(tmp_path: Path, plane: str) -> None:
    files = Files(tmp_path)
    client = PeerEntry(CLIENT.public, "client")
    theirs = files.settings("enc", PeerEntry(PREFILL.public, "prefill", "pre"), client)
    async with encoder_node(data_plane=plane, **theirs) as encoder:
        ours = files.settings("pre", PeerEntry(ENCODER.public, "encoder", "enc", (encoder.listen,)), client)
        async with prefill_node(encoder.listen, data_plane=plane, **ours) as prefill:

            async def serves() -> None:
                item = synthetic_item(2**20)
                delivery = await prefill.encode(request(secrets.token_hex(4), item))
                check(delivery, item)
                delivery.release()

            await serves()
            for node, keys in ((encoder, ENCODER), (prefill, PREFILL)):
                strangers: list[Security | None] = [
                    None,
                    security_for(STRANGER, node.listen, keys.public),
                    security_for(CLIENT, node.listen, STRANGER.public),
                ]
                for stranger in strangers:
                    with pytest.raises(PeerUnreachable, match="handshake failed"):
                        async with NodeClient(node.listen, connect_s=2.0, security=stranger):
                            pass
                forger = security_for(PREFILL if node is encoder else ENCODER, node.listen, keys.public)
                with pytest.raises(EpdError, match="this key is one of role"):
                    async with NodeClient(node.listen, security=forger):
                        pass
                assert node.endpoint.rejected_frames["handshake"] == 3
                assert node.endpoint.rejected_frames["forged_hello"] == 1
                async with NodeClient(
                    node.listen, security=security_for(CLIENT, node.listen, keys.public)
                ) as known:
                    assert "sessions" in (await known.inventory()).counts
                await serves()
