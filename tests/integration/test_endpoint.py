"""Sessions over real sockets: what opens, what ends, who is told, and that nothing is left."""

import asyncio
import contextlib
import inspect
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
import zmq
from msgspec.structs import replace
from session_nodes import (
    FAIL_AFTER_S,
    PATIENT,
    Process,
    RawPeer,
    Suspect,
    TestNode,
    Writable,
    count_descriptors,
    frame,
    frame_from,
    hello,
    last_word_from,
    parts_from,
    until_disconnected,
    welcome_of,
    word_from,
)

from epd.protocol.errors import Busy, ConfigError, Malformed
from epd.protocol.ids import SessionId
from epd.protocol.messages import (
    AnyMessage,
    ControlMessage,
    Goodbye,
    Heartbeat,
    MediaChunk,
    Regions,
    Rejected,
    Welcome,
)
from epd.protocol.session import OUTSIDE, SESSION_OVER, FrameReceived, FrameSent, SessionLimits
from epd.protocol.wire import HEADER_NBYTES, MEDIA_CHUNK_NBYTES, Lane, decode_body
from epd.runtime import dialler, endpoint
from epd.runtime.addresses import Address, resolve
from epd.runtime.endpoint import EARLY_MESSAGES
from epd.runtime.lanes import READ_BATCH
from epd.runtime.outbox import MAX_MEDIA_MESSAGES

LOOPBACK = "tcp://127.0.0.1:0"
Make = Callable[..., TestNode]


@contextlib.asynccontextmanager
async def nodes_without_leaks() -> AsyncIterator[Make]:
    """Makes nodes; closes them, in the order of making, and looks for what is left."""
    await asyncio.to_thread(count_descriptors)  # the loop's own descriptors and threads exist from now on
    before = count_descriptors()
    nodes: list[TestNode] = []

    def made(name: str, role: Any, *, listens: bool = False, **given: Any) -> TestNode:
        options = {key: given.pop(key) for key in ("limits", "max_peers") if key in given}
        node = TestNode(hello(name, role, **given), **options)
        nodes.append(node)
        if listens:
            node.address = node.endpoint.bind(LOOPBACK)
        return node

    try:
        yield made
    finally:
        for node in nodes:
            await node.endpoint.close_all(1.0)
    for node in nodes:
        node.check()
        counts = node.endpoint.counts()
        assert counts["sessions"] == counts["sockets"] == counts["queued_messages"] == 0
    assert count_descriptors() == before


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    async with nodes_without_leaks() as made:
        yield made


@pytest.fixture
def raw() -> Iterator[RawPeer]:
    peer = RawPeer()
    yield peer
    peer.close()


@pytest.fixture
async def encoder(make: Make) -> TestNode:
    return make("enc", "encoder", listens=True)


@pytest.fixture
async def prefill(make: Make) -> TestNode:
    return make("pre", "prefill")


async def meet(prefill: TestNode, encoder: TestNode) -> SessionId:
    """A session in force on both sides, media lane included."""
    session = prefill.endpoint.dial(encoder.address)
    await prefill.until(lambda: session in prefill.endpoint.peers())
    await encoder.until(lambda: session in encoder.endpoint.peers())
    return session


async def raw_session(raw: RawPeer, encoder: TestNode, **given: Any) -> tuple[Any, int, Welcome]:
    """A session that a raw peer dialled: its control socket, its number, and the welcome."""
    session = secrets.randbits(64)
    control = raw.dial(encoder.address, session)
    control.send(frame(session, 0, hello("raw", "prefill", **given)))
    welcome = await word_from(control)
    assert isinstance(welcome, Welcome)
    return control, session, welcome


def chunk(number: int, nbytes: int = MEDIA_CHUNK_NBYTES) -> MediaChunk:
    return MediaChunk(bytes(32), number, 0, memoryview(bytes([number % 256]) * nbytes))


# -- opening ---------------------------------------------------------------------------------


async def test_both_sides_are_told_who_the_other_is(prefill: TestNode, encoder: TestNode) -> None:
    session = await meet(prefill, encoder)
    there, here = prefill.endpoint.peers()[session], encoder.endpoint.peers()[session]
    assert (there.node, there.incarnation, there.role) == ("enc", encoder.hello.incarnation, "encoder")
    assert (here.node, here.incarnation, here.role) == ("pre", prefill.hello.incarnation, "prefill")
    assert (there.address, there.fingerprint, there.segment) == (
        encoder.address,
        "model-a",
        "segment-of-enc",
    )


async def test_what_is_sent_as_a_session_opens_arrives_after_the_other_side_has_opened(
    prefill: TestNode, encoder: TestNode
) -> None:
    regions = Regions(())
    encoder.on_opened = lambda session: encoder.endpoint.send(session, regions)
    session = prefill.endpoint.dial(encoder.address)
    assert not prefill.endpoint.send(session, Goodbye("too early"))
    await prefill.received(1)
    opened, batch = prefill.seen
    assert opened == prefill.opens[0]
    assert batch == (session, [regions])


async def test_what_one_turn_has_for_one_peer_is_one_frame_for_each_early_messages(
    prefill: TestNode, encoder: TestNode
) -> None:
    session = await meet(prefill, encoder)
    words: list[ControlMessage] = [Goodbye(f"{number}") for number in range(2 * EARLY_MESSAGES + 3)]
    for word in words:
        assert prefill.endpoint.send(session, word)
    assert await encoder.received(len(words)) == words
    frames = [words[:EARLY_MESSAGES], words[EARLY_MESSAGES : 2 * EARLY_MESSAGES], words[2 * EARLY_MESSAGES :]]
    assert [batch.messages for batch in encoder.batches] == frames


async def test_more_than_a_frame_holds_is_split_and_stays_in_order(
    prefill: TestNode, encoder: TestNode
) -> None:
    session = await meet(prefill, encoder)
    words: list[ControlMessage] = [Goodbye(f"{number}" * 5000) for number in range(100)]
    for word in words:
        prefill.endpoint.send(session, word)
    assert await encoder.received(100) == words
    assert len(encoder.batches) > 5


async def test_a_message_no_frame_can_hold_is_refused_to_the_one_who_sends_it(
    prefill: TestNode, encoder: TestNode
) -> None:
    session = await meet(prefill, encoder)
    with pytest.raises(Malformed):
        prefill.endpoint.send(session, Goodbye("x" * 65536))
    with pytest.raises(Malformed):
        prefill.endpoint.send_media(session, chunk(0, MEDIA_CHUNK_NBYTES + 1))
    assert prefill.endpoint.send(session, Goodbye("still there"))
    assert await encoder.received(1) == [Goodbye("still there")]


async def test_a_trace_has_numbers_and_sizes_of_frames_and_no_bodies(
    prefill: TestNode, encoder: TestNode
) -> None:
    session = await meet(prefill, encoder)
    prefill.endpoint.send(session, Goodbye("x" * 1000))
    await encoder.received(1)
    sent = [e for _, e, _ in prefill.steps if isinstance(e, FrameSent) and e.lane is Lane.CONTROL]
    received = [e for _, e, _ in encoder.steps if isinstance(e, FrameReceived) and e.lane is Lane.CONTROL]
    assert [event.sequence for event in sent] == [0, 1]
    [got] = received
    assert (got.sequence, got.nbytes) == (1, sent[1].nbytes)
    assert 1000 < got.nbytes < 1000 + 2 * HEADER_NBYTES


async def test_heartbeats_keep_the_load_of_the_peer_current(make: Make) -> None:
    quick = SessionLimits(0.01, 3600.0, 3600.0)
    encoder = make("enc", "encoder", listens=True, limits=quick)
    prefill = make("pre", "prefill", limits=quick)
    session = await meet(prefill, encoder)
    # its first words to us come behind its heartbeats
    for number in range(1000):
        if prefill.endpoint.peers()[session].heartbeat == Heartbeat(1, 2, 3):
            break
        encoder.endpoint.send(session, Goodbye("after a heartbeat, perhaps"))
        await prefill.received(number + 1)
    assert prefill.endpoint.peers()[session].heartbeat == Heartbeat(1, 2, 3)
    assert not any(isinstance(message, Heartbeat) for message in prefill.messages_seen)


async def test_a_listener_that_does_not_accept_yet_keeps_its_peers_waiting(make: Make) -> None:
    encoder, prefill = make("enc", "encoder"), make("pre", "prefill")
    address = encoder.endpoint.bind(LOOPBACK, accept=False)
    session = prefill.endpoint.dial(address)
    other = make("other", "encoder", listens=True)
    await meet(prefill, other)  # connections are made meanwhile
    assert not encoder.seen
    encoder.endpoint.accept()
    await encoder.opened()
    await prefill.until(lambda: session in prefill.endpoint.peers())


# -- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "differs", [{"fingerprint": "model-b"}, {"data_plane": "mooncake/tcp"}], ids=["fingerprint", "data plane"]
)
async def test_a_node_that_does_not_match_is_rejected_with_both_values(
    make: Make, encoder: TestNode, differs: dict[str, str]
) -> None:
    prefill = make("pre", "prefill", **differs)
    lost = await prefill.ended(prefill.endpoint.dial(encoder.address))
    assert lost.code == "rejected"
    for key, value in differs.items():
        assert value in lost.reason
        assert getattr(encoder.hello, key) in lost.reason
    assert lost.peer is None
    assert not encoder.seen
    assert encoder.endpoint.counts()["sessions"] == 0


async def test_a_prefill_node_without_a_model_takes_its_first_encoders_and_refuses_others(
    make: Make, encoder: TestNode, prefill: TestNode
) -> None:
    """Both dials begin before either is answered."""
    other = make("other", "encoder", listens=True, fingerprint="model-b")

    def take(session: SessionId) -> None:
        theirs = prefill.endpoint.peers()[session].fingerprint
        prefill.hello = hello("pre", "prefill", fingerprint=theirs)

    prefill.on_opened = take
    sessions = {prefill.endpoint.dial(encoder.address), prefill.endpoint.dial(other.address)}
    await prefill.until(lambda: prefill.lost and prefill.opens)
    [opened], [lost] = prefill.opens, prefill.lost
    assert {opened.session, lost.session} == sessions
    assert lost.code == "rejected"
    assert "model-a" in lost.reason
    assert "model-b" in lost.reason


async def test_peers_are_capped_on_both_sides(make: Make, prefill: TestNode) -> None:
    encoder = make("enc", "encoder", listens=True, max_peers=1)
    await meet(prefill, encoder)
    second = make("second", "prefill", max_peers=1)
    dialled = second.endpoint.dial(encoder.address)
    with pytest.raises(Busy):
        second.endpoint.dial(encoder.address)
    assert (await second.ended(dialled)).code == "busy"
    assert len(encoder.endpoint.peers()) == 1


async def test_a_draining_node_takes_no_new_sessions_and_keeps_the_ones_it_has(
    make: Make, encoder: TestNode, prefill: TestNode
) -> None:
    session = await meet(prefill, encoder)
    encoder.endpoint.goodbye("maintenance")
    assert await prefill.received(1) == [Goodbye("maintenance")]
    assert prefill.endpoint.peers()[session].draining
    second = make("second", "prefill")
    assert (await second.ended(second.endpoint.dial(encoder.address))).code == "draining"
    assert encoder.endpoint.send(session, Goodbye("still there"))
    await prefill.received(2)


# -- dialling --------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_a_refused_connection_ends_the_dial_with_the_address(prefill: TestNode) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    lost = await prefill.ended(prefill.endpoint.dial(address))
    assert (lost.code, lost.peer) == ("peer_unreachable", None)
    assert lost.reason == f"{address}: connection refused"


async def test_an_unresolvable_name_ends_its_dial_and_stalls_nobody(
    monkeypatch: pytest.MonkeyPatch, prefill: TestNode, encoder: TestNode
) -> None:
    """The resolver does not answer until the other session has worked."""
    answer = asyncio.Event()

    async def slow(address: Address) -> list[Address]:
        if address.host == "no.such.host.invalid":
            await answer.wait()
        return await resolve(address)

    monkeypatch.setattr(dialler, "resolve", slow)
    bad = prefill.endpoint.dial("tcp://no.such.host.invalid:1")
    session = await meet(prefill, encoder)
    prefill.endpoint.send(session, Goodbye("meanwhile"))
    await encoder.received(1)
    assert not prefill.lost
    answer.set()
    lost = await prefill.ended(bad)
    assert lost.code == "peer_unreachable"
    assert "no.such.host.invalid" in lost.reason


async def test_every_address_of_a_name_is_tried(
    monkeypatch: pytest.MonkeyPatch, prefill: TestNode, encoder: TestNode
) -> None:
    port = int(encoder.address.rpartition(":")[2])

    async def two(address: Address) -> list[Address]:
        if address.host != "two.invalid":
            return [address]
        return [Address("127.0.0.1", free_port()), Address("127.0.0.1", port)]

    monkeypatch.setattr(dialler, "resolve", two)
    session = prefill.endpoint.dial(f"tcp://two.invalid:{port}")
    await prefill.opened()
    assert session in prefill.endpoint.peers()


async def test_a_name_is_resolved_again_at_every_dial(
    monkeypatch: pytest.MonkeyPatch, prefill: TestNode, encoder: TestNode
) -> None:
    """A pod that came back has another address under its old name."""
    answers = iter([free_port(), int(encoder.address.rpartition(":")[2])])

    async def moved(address: Address) -> list[Address]:
        return [Address("127.0.0.1", next(answers))] if address.host == "pod.invalid" else [address]

    monkeypatch.setattr(dialler, "resolve", moved)
    assert (await prefill.ended(prefill.endpoint.dial("tcp://pod.invalid:7101"))).code == "peer_unreachable"
    session = prefill.endpoint.dial("tcp://pod.invalid:7101")
    await prefill.opened()
    assert session in prefill.endpoint.peers()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:70000", "tcp://127.0.0.1", "udp://a:1", "tcp://a:12x"])
async def test_a_malformed_address_is_refused_at_once(prefill: TestNode, address: str) -> None:
    with pytest.raises(ConfigError):
        prefill.endpoint.dial(address)
    assert prefill.endpoint.counts()["sessions"] == 0


async def test_a_port_in_use_is_a_configuration_error_and_leaves_nothing_bound(
    make: Make, encoder: TestNode
) -> None:
    second = make("second", "encoder")
    with pytest.raises(ConfigError, match="cannot bind"):
        second.endpoint.bind(encoder.address)
    with pytest.raises(ConfigError, match="media_listen"):
        second.endpoint.bind(LOOPBACK, encoder.address)
    assert second.endpoint.counts()["sockets"] == 0
    second.endpoint.bind(LOOPBACK)


async def test_a_peer_that_never_answers_is_given_up(make: Make, raw: RawPeer) -> None:
    prefill = make("pre", "prefill", limits=SessionLimits(connect_s=0.05))
    _, address = raw.listen()
    lost = await prefill.ended(prefill.endpoint.dial(address))
    assert lost.code == "peer_unreachable"
    assert "no welcome" in lost.reason


# -- strangers and liars ---------------------------------------------------------------------


async def test_strangers_are_counted_by_reason_and_disturb_nobody(
    prefill: TestNode, encoder: TestNode, raw: RawPeer
) -> None:
    session = await meet(prefill, encoder)
    own = secrets.randbits(64)
    stranger = raw.dial(encoder.address, own)
    good = bytearray(frame(own, 3, Goodbye("x")))
    for at, byte in ((0, 0), (6, 1), (24, good[24] ^ 1)):
        bad = bytearray(good)
        bad[at] = byte
        stranger.send(bad)
    stranger.send(b"GET / HTTP/1.1")
    stranger.send_multipart([b"two", b"parts"])
    stranger.send(frame(session, 1, Goodbye("not yours")))
    stranger.send(frame(own, 0, Goodbye("no hello")))
    stranger.send(frame(own, 0) + b"")
    code, reason = await last_word_from(stranger)
    assert (code, reason) == ("session_lost", SESSION_OVER)
    await frame_from(stranger)
    assert encoder.endpoint.rejected_frames == {
        "magic": 1,
        "lane": 1,
        "length": 1,
        "size": 1,
        "parts": 1,
        "stranger": 1,
        "session_over": 2,
    }
    prefill.endpoint.send(session, Goodbye("undisturbed"))
    assert await encoder.received(1) == [Goodbye("undisturbed")]
    assert not encoder.lost


async def test_a_garbled_hello_is_counted_and_makes_no_session(encoder: TestNode, raw: RawPeer) -> None:
    session = secrets.randbits(64)
    stranger = raw.dial(encoder.address, session)
    garbled = bytearray(frame(session, 0, hello("raw", "prefill")))
    garbled[HEADER_NBYTES] = 0xC1
    stranger.send(garbled)
    stranger.send(frame(session, 0, hello("raw", "prefill")))
    await encoder.opened()
    assert encoder.endpoint.rejected_frames == {"body": 1}


async def test_who_speaks_another_version_is_told_both(encoder: TestNode, raw: RawPeer) -> None:
    session = secrets.randbits(64)
    stranger = raw.dial(encoder.address, session)
    newer = bytearray(frame(session, 0, hello("raw", "prefill")))
    newer[4] = 9
    stranger.send(newer)
    code, reason = await last_word_from(stranger)
    assert code == "rejected"
    assert "9" in reason
    assert "1" in reason


async def test_a_dialler_whose_peer_speaks_another_version_gives_up_at_once(
    prefill: TestNode, raw: RawPeer
) -> None:
    router, address = raw.listen()
    session = prefill.endpoint.dial(address)
    routing_id, _ = await parts_from(router)
    newer = bytearray(frame(session, OUTSIDE, Rejected("rejected", "who are you")))
    newer[4] = 9
    router.send_multipart([routing_id, newer])
    lost = await prefill.ended(session)
    assert (lost.code, lost.reason) == ("rejected", "protocol version 9, ours is 1")


async def test_a_garbled_body_of_a_peer_ends_its_session_and_says_so(encoder: TestNode, raw: RawPeer) -> None:
    control, session, _ = await raw_session(raw, encoder)
    garbled = bytearray(frame(session, 1, Goodbye("x")))
    garbled[HEADER_NBYTES] = 0xC1
    control.send(garbled)
    lost = await encoder.ended(SessionId(session))
    assert lost.code == "malformed"
    assert (await last_word_from(control))[0] == "malformed"
    assert encoder.endpoint.counts()["sessions"] == 0


@pytest.mark.parametrize("twice", [hello("raw", "prefill"), Rejected("rejected", "in sequence")])
async def test_session_messages_inside_a_session_are_malformed(
    encoder: TestNode, raw: RawPeer, twice: AnyMessage
) -> None:
    control, session, _ = await raw_session(raw, encoder)
    control.send(frame(session, 1, Goodbye("not delivered"), twice))
    assert (await encoder.ended(SessionId(session))).code == "malformed"
    assert not encoder.batches


async def test_two_chunks_in_a_media_frame_are_malformed(encoder: TestNode, raw: RawPeer) -> None:
    _, session, welcome = await raw_session(raw, encoder)
    media = raw.dial(welcome.media_address, session)
    media.send(frame(session, 0, chunk(0, 10), chunk(1, 10), lane=Lane.MEDIA))
    assert (await encoder.ended(SessionId(session))).code == "malformed"
    assert not encoder.batches


async def test_a_gap_ends_the_session_on_the_side_that_sees_it_and_the_other_is_told(
    encoder: TestNode, raw: RawPeer
) -> None:
    control, session, _ = await raw_session(raw, encoder)
    control.send(frame(session, 1, Goodbye("delivered")))
    control.send(frame(session, 3, Goodbye("after the gap")))
    lost = await encoder.ended(SessionId(session))
    assert (lost.code, "gap" in lost.reason) == ("session_lost", True)
    assert encoder.messages_seen == [Goodbye("delivered")]
    assert "gap" in (await last_word_from(control))[1]


async def test_a_gap_at_the_dialler_ends_the_session_and_the_listener_is_told(
    prefill: TestNode, raw: RawPeer
) -> None:
    router, address = raw.listen()
    _, media_address = raw.listen()
    session = prefill.endpoint.dial(address)
    routing_id, _ = await parts_from(router)
    welcome = welcome_of(hello("raw", "encoder"), media_address)
    router.send_multipart([routing_id, frame(session, 0, welcome)])
    router.send_multipart([routing_id, frame(session, 2, Goodbye("after the gap"))])
    assert "gap" in (await prefill.ended(session)).reason
    assert "gap" in (await last_word_from(router))[1]
    assert not prefill.batches


async def test_a_frame_of_an_ended_session_is_answered_and_its_sender_ends_it_too(
    encoder: TestNode, raw: RawPeer
) -> None:
    control, session, _ = await raw_session(raw, encoder)
    control.send(frame(session, 1, hello("raw", "prefill")))  # ends it
    await encoder.ended(SessionId(session))
    assert (await last_word_from(control))[0] == "malformed"
    control.send(frame(session, 2, Goodbye("late")))
    assert (await last_word_from(control)) == ("session_lost", SESSION_OVER)
    assert encoder.endpoint.rejected_frames["session_over"] == 1
    assert not encoder.batches


async def test_a_dialler_that_is_told_its_session_is_over_ends_it(prefill: TestNode, raw: RawPeer) -> None:
    router, address = raw.listen()
    _, media_address = raw.listen()
    session = prefill.endpoint.dial(address)
    routing_id, _ = await parts_from(router)
    router.send_multipart([routing_id, frame(session, 0, welcome_of(hello("raw", "encoder"), media_address))])
    router.send_multipart([routing_id, frame(session, OUTSIDE, Rejected("session_lost", SESSION_OVER))])
    lost = await prefill.ended(session)
    assert (lost.code, lost.reason) == ("session_lost", SESSION_OVER)


# -- ends ------------------------------------------------------------------------------------


async def test_a_newer_session_of_a_node_ends_its_older_one_first_on_both_sides(
    prefill: TestNode, encoder: TestNode
) -> None:
    older = await meet(prefill, encoder)
    newer = await meet(prefill, encoder)
    for node in (prefill, encoder):
        kinds = [(type(event).__name__, event.session) for event in node.seen]
        assert kinds == [("Opened", older), ("Lost", older), ("Opened", newer)]
        assert list(node.endpoint.peers()) == [newer]


async def test_a_hello_that_was_overtaken_by_a_later_dial_ends_nothing(
    encoder: TestNode, raw: RawPeer
) -> None:
    incarnation = secrets.randbits(64)
    control, session, _ = await raw_session(raw, encoder, incarnation=incarnation, dial=2)
    late = secrets.randbits(64)
    stranger = raw.dial(encoder.address, late)
    stranger.send(frame(late, 0, hello("raw", "prefill", incarnation=incarnation, dial=1)))
    assert await last_word_from(stranger) == ("session_lost", "session over")
    control.send(frame(session, 1, Heartbeat()))
    assert list(encoder.endpoint.peers()) == [session]
    assert encoder.lost == []


@pytest.mark.parametrize(
    ("incarnation", "dial"),
    [(7, 3), (7, 0), (8, 1)],
    ids=["dialled later", "not told", "another incarnation"],
)
async def test_any_other_hello_of_a_node_ends_its_session_and_that_is_told_so(
    encoder: TestNode, raw: RawPeer, incarnation: int, dial: int
) -> None:
    """A dead incarnation's `Hello` may come after its successor's, too: that one dials again."""
    control, session, _ = await raw_session(raw, encoder, incarnation=7, dial=2)
    _, newer, _ = await raw_session(raw, encoder, incarnation=incarnation, dial=dial)
    assert (await last_word_from(control))[0] == "session_lost"
    assert list(encoder.endpoint.peers()) == [newer]
    assert [lost.session for lost in encoder.lost] == [session]


async def test_a_welcome_of_a_node_ends_our_older_session_with_it_first(
    prefill: TestNode, raw: RawPeer
) -> None:
    """Its listener has not ended the older one: it is stopped, say, behind another address."""
    sessions = []
    for incarnation in range(2):
        router, address = raw.listen()
        _, media_address = raw.listen()
        session = prefill.endpoint.dial(address)
        routing_id, _ = await parts_from(router)
        welcome = welcome_of(hello("raw", "encoder", incarnation=incarnation), media_address)
        router.send_multipart([routing_id, frame(session, 0, welcome)])
        await prefill.opened(incarnation + 1)
        sessions.append(session)
    kinds = [(type(event).__name__, event.session) for event in prefill.seen]
    assert kinds == [("Opened", sessions[0]), ("Lost", sessions[0]), ("Opened", sessions[1])]


async def test_all_that_a_dead_dialler_had_sent_is_read_before_its_loss(encoder: TestNode) -> None:
    """More frames than one batch, all there before the loop looks, and a send that names the loss first."""
    count = 3 * READ_BATCH - 1
    raw = RawPeer()
    control, session, _ = await raw_session(raw, encoder)
    # From here on the loop has no turn until everything has happened.
    with until_disconnected(encoder.endpoint._listening[Lane.CONTROL]):
        for number in range(1, count + 1):
            control.send(frame(session, number, Goodbye(f"{number}")))
        control.close(int(FAIL_AFTER_S * 1000))
        raw.context.term()
    encoder.endpoint.send(SessionId(session), Goodbye("to nobody"))
    assert (await encoder.ended(SessionId(session))).code == "session_lost"
    assert encoder.messages_seen == [Goodbye(f"{number}") for number in range(1, count + 1)]


async def test_all_that_a_dialler_sent_just_before_it_closed_arrives_and_the_end_is_in_order(
    make: Make,
) -> None:
    """The listener speaks all the time: what it says into a connection that closes resets that connection."""
    prefill = make("pre", "prefill")
    encoder = make("enc", "encoder", listens=True, limits=SessionLimits(0.001, 10.0, 20.0))
    words: list[ControlMessage] = [Goodbye(f"{number:06d}" * 10000) for number in range(60)]
    for closed in range(1, 13):
        session = await meet(prefill, encoder)
        for word in words:
            assert prefill.endpoint.send(session, word)
        if closed < 12:
            prefill.endpoint.close(session, "draining", "enough")
        else:
            await prefill.close(FAIL_AFTER_S)
        assert (await encoder.ended(session)).code == "draining"
        assert encoder.messages_seen == words * closed


async def dialled_by(prefill: TestNode, raw: RawPeer) -> tuple[Any, SessionId, bytes]:
    """A session in force with a raw listener, both lanes: its control socket, number and routing id."""
    router, address = raw.listen()
    media, media_address = raw.listen()
    session = prefill.endpoint.dial(address)
    routing_id, _ = await parts_from(router)
    router.send_multipart([routing_id, frame(session, 0, welcome_of(hello("raw", "encoder"), media_address))])
    await frame_from(media, Lane.MEDIA)
    return router, session, routing_id


async def test_a_dialler_that_closes_reads_on_until_the_listener_has_answered(
    prefill: TestNode, raw: RawPeer
) -> None:
    router, session, routing_id = await dialled_by(prefill, raw)
    closing = asyncio.create_task(prefill.endpoint.close_all(3600.0))
    assert (await last_word_from(router))[0] == "draining"
    for number in (1, 5):  # in sequence or not: nothing but the answer matters any more
        router.send_multipart([routing_id, frame(session, number, Goodbye("not read by anybody"))])
    await prefill.turn()
    counts = prefill.endpoint.counts()
    assert (counts["sessions"], counts["closing"], counts["sockets"]) == (1, 1, 2)
    assert not closing.done()
    router.send_multipart([routing_id, frame(session, OUTSIDE, Rejected("session_lost", SESSION_OVER))])
    async with asyncio.timeout(FAIL_AFTER_S):
        await closing
    assert [lost.code for lost in prefill.lost] == ["draining"]
    assert not prefill.batches


async def test_a_dialler_that_closes_waits_no_longer_than_the_connection_lasts(
    prefill: TestNode, raw: RawPeer
) -> None:
    router, _, _ = await dialled_by(prefill, raw)
    closing = asyncio.create_task(prefill.endpoint.close_all(3600.0))
    assert (await last_word_from(router))[0] == "draining"
    router.close(0)
    async with asyncio.timeout(FAIL_AFTER_S):
        await closing
    assert [lost.code for lost in prefill.lost] == ["draining"]


async def test_a_listener_that_does_not_answer_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, make: Make, raw: RawPeer
) -> None:
    monkeypatch.setattr(endpoint, "CLOSE_LINGER_S", 0.01)
    prefill = make("pre", "prefill")
    router, session, _ = await dialled_by(prefill, raw)
    monitor = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    raw.sockets.append(monitor)
    monitor.setsockopt(zmq.RCVTIMEO, int(FAIL_AFTER_S * 1000))
    prefill.endpoint.close(session, "draining", "enough")
    assert prefill.endpoint.counts()["closing"] == 1
    await asyncio.to_thread(monitor.recv_multipart)
    router.disable_monitor()
    assert prefill.endpoint.counts()["sessions"] == 0


async def test_a_node_that_stops_at_once_leaves_nothing_of_a_session_that_still_waits(
    prefill: TestNode, raw: RawPeer
) -> None:
    _, session, _ = await dialled_by(prefill, raw)
    prefill.endpoint.close(session, "draining", "enough")
    assert prefill.endpoint.counts()["closing"] == 1
    await prefill.close(0.0)
    counts = prefill.endpoint.counts()
    assert counts["sessions"] == counts["closing"] == counts["sockets"] == 0


@pytest.mark.slow
async def test_a_dialler_that_closes_still_sends_what_its_socket_had_no_room_for(
    prefill: TestNode, raw: RawPeer
) -> None:
    router, session, routing_id = await dialled_by(prefill, raw)
    count = 60_000
    for number in range(count):
        assert prefill.endpoint.send(session, Goodbye(f"{number:06d}" * 40))
    closing = asyncio.create_task(prefill.endpoint.close_all(3600.0))
    await prefill.until(lambda: prefill.lost)
    assert prefill.endpoint.counts()["queued_messages"] > 0
    read = 0
    while (received := await frame_from(router)).sequence != OUTSIDE:
        read += sum(isinstance(message, Goodbye) for message in decode_body(received))
    assert read == count
    router.send_multipart([routing_id, frame(session, OUTSIDE, Rejected("session_lost", SESSION_OVER))])
    async with asyncio.timeout(FAIL_AFTER_S):
        await closing


async def test_a_listener_answers_the_last_word_of_a_dialler(encoder: TestNode, raw: RawPeer) -> None:
    control, session, _ = await raw_session(raw, encoder)
    control.send(frame(session, OUTSIDE, Rejected("draining", "bye")))
    assert (await encoder.ended(SessionId(session)))[2:] == ("draining", "bye")
    assert (await last_word_from(control)) == ("session_lost", SESSION_OVER)


async def test_a_session_that_is_closed_tells_both_sides_why(prefill: TestNode, encoder: TestNode) -> None:
    session = await meet(prefill, encoder)
    prefill.endpoint.close(session, "data_plane", "had enough")
    assert prefill.lost[-1][2:] == ("data_plane", "had enough")
    assert not prefill.endpoint.send(session, Goodbye("too late"))
    assert (await encoder.ended(session))[2:] == ("data_plane", "had enough")


async def test_what_a_listener_sent_just_before_it_closed_arrives(
    prefill: TestNode, encoder: TestNode
) -> None:
    session = await meet(prefill, encoder)
    words: list[ControlMessage] = [Goodbye(f"{number:06d}" * 2000) for number in range(100)]
    for word in words:
        encoder.endpoint.send(session, word)
    await encoder.close()
    lost = await prefill.ended(session)
    assert lost.code == "draining"
    assert prefill.messages_seen == words


async def test_a_listener_waits_for_the_dialler_to_close(encoder: TestNode, raw: RawPeer) -> None:
    control, session, _ = await raw_session(raw, encoder)
    encoder.endpoint.close(SessionId(session), "draining", "bye")
    assert (await last_word_from(control)) == ("draining", "bye")
    assert encoder.lost[-1][2:] == ("draining", "bye")
    assert encoder.endpoint.counts()["sessions"] == 1
    assert encoder.endpoint.peers() == {}
    control.close(0)
    await encoder.close(30.0)  # ends by the loss of the connection: nothing else would in that time
    assert encoder.endpoint.counts()["sessions"] == 0


async def test_a_silent_peer_is_suspect_then_dead_and_learns_of_it(make: Make, encoder: TestNode) -> None:
    """The encoder's heartbeats are an hour apart."""
    prefill = make("pre", "prefill", limits=SessionLimits(0.02, 0.05, 0.2))
    session = await meet(prefill, encoder)
    lost = await prefill.ended(session)
    assert prefill.seen[-2:] == [Suspect(session, True), lost]
    assert lost[2:] == ("session_lost", "no frame for 0.2 s")
    assert lost.peer is not None
    assert lost.peer.suspect
    assert (await encoder.ended(session))[2:] == ("session_lost", "no frame for 0.2 s")


async def lose_media_lane(raw: RawPeer, encoder: TestNode, session: int, welcome: Welcome) -> None:
    """One that was there; the listener has not been told yet when this returns."""
    media = raw.dial(welcome.media_address, session)
    media.send(frame(session, 0, chunk(0, 10), lane=Lane.MEDIA))
    await encoder.received(1)
    with until_disconnected(encoder.endpoint._listening[Lane.MEDIA]):
        media.close(0)


async def test_a_lost_media_lane_ends_the_session_at_the_listener(make: Make, raw: RawPeer) -> None:
    encoder = make("enc", "encoder", listens=True, limits=replace(PATIENT, drain_s=0.05))
    control, session, welcome = await raw_session(raw, encoder)
    await lose_media_lane(raw, encoder, session, welcome)
    lost = await encoder.ended(SessionId(session))
    assert lost[2:] == ("session_lost", "media lane: connection lost")
    assert "media lane" in (await last_word_from(control))[1]


async def test_what_is_on_the_control_lane_still_arrives_when_the_media_lane_has_closed(
    encoder: TestNode, raw: RawPeer
) -> None:
    control, session, welcome = await raw_session(raw, encoder)
    await lose_media_lane(raw, encoder, session, welcome)
    assert encoder.endpoint.send_media(SessionId(session), chunk(0, 10))  # names the loss
    control.send(frame(session, 1, Goodbye("the last word but one")))
    await encoder.received(2)
    control.send(frame(session, OUTSIDE, Rejected("draining", "bye")))
    assert (await encoder.ended(SessionId(session)))[2:] == ("draining", "bye")


async def test_a_lost_media_lane_ends_the_session_at_the_dialler(prefill: TestNode, raw: RawPeer) -> None:
    router, address = raw.listen()
    media, media_address = raw.listen()
    session = prefill.endpoint.dial(address)
    routing_id, _ = await parts_from(router)
    router.send_multipart([routing_id, frame(session, 0, welcome_of(hello("raw", "encoder"), media_address))])
    first = await frame_from(media, Lane.MEDIA)
    assert (first.sequence, decode_body(first)) == (0, [])
    media.close(0)
    lost = await prefill.ended(session)
    assert lost.code == "session_lost"
    assert "media lane" in lost.reason
    assert "media lane" in (await last_word_from(router))[1]


async def test_closing_twice_and_closing_in_the_middle_of_a_dial_are_fine(
    prefill: TestNode, raw: RawPeer
) -> None:
    _, address = raw.listen()
    session = prefill.endpoint.dial(address)
    await asyncio.gather(prefill.endpoint.close_all(1.0), prefill.endpoint.close_all(1.0))
    await prefill.endpoint.close_all(1.0)
    assert [lost.session for lost in prefill.lost] == [session]
    with pytest.raises(Busy):
        prefill.endpoint.dial(address)


async def test_a_close_that_is_cancelled_still_closes_every_socket(encoder: TestNode, raw: RawPeer) -> None:
    await raw_session(raw, encoder)
    closing = asyncio.create_task(encoder.endpoint.close_all(30.0))
    await encoder.until(lambda: encoder.lost)
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    assert encoder.endpoint.counts()["sockets"] == 0


@pytest.mark.slow
async def test_300_sessions_open_and_close_and_leave_no_descriptor(make: Make) -> None:
    """The fixture compares descriptors."""
    encoder = make("enc", "encoder", listens=True, max_peers=300)
    clients = [make(f"client-{number}", "client", max_peers=100) for number in range(3)]
    for number in range(300):
        client = clients[number // 100]
        # Names of their own on both sides: a node has one session with another.
        client.hello = hello(f"client-{number}", "client")
        encoder.hello = hello(f"enc-{number}", "encoder")
        client.endpoint.dial(encoder.address)
        await client.opened(number % 100 + 1)
    for client in clients:
        await client.opened(100)
    assert len(encoder.endpoint.peers()) == 300
    for client in clients:
        for session in list(client.endpoint.peers()):
            client.endpoint.close(session, "draining", "enough")
    await encoder.until(lambda: len(encoder.lost) == 300)
    assert encoder.endpoint.counts()["sessions"] == 0


# -- media -----------------------------------------------------------------------------------


async def test_media_given_before_the_peers_media_lane_is_there_go_when_it_comes(
    prefill: TestNode, encoder: TestNode
) -> None:
    encoder.on_opened = lambda session: encoder.endpoint.send_media(session, chunk(7))
    prefill.endpoint.dial(encoder.address)
    [received] = await prefill.received(1)
    assert isinstance(received, MediaChunk)
    assert received.offset == 7


@pytest.mark.parametrize("from_dialler", [True, False])
async def test_media_stand_in_a_bounded_queue_and_arrive_whole_and_in_order(
    prefill: TestNode, encoder: TestNode, from_dialler: bool
) -> None:
    session = await meet(prefill, encoder)
    sender, receiver = (prefill, encoder) if from_dialler else (encoder, prefill)
    count, given = 40, 0

    def give(_: SessionId) -> None:
        nonlocal given
        while given < count and sender.endpoint.send_media(session, chunk(given)):
            given += 1
            assert sender.endpoint.counts()["queued_chunks"] <= MAX_MEDIA_MESSAGES

    sender.on_writable = give
    give(session)
    assert given == MAX_MEDIA_MESSAGES
    for number, received in enumerate(await receiver.received(count)):
        assert isinstance(received, MediaChunk)
        assert received.offset == number
        assert bytes(received.data) == bytes([number]) * MEDIA_CHUNK_NBYTES
    assert any(isinstance(event, Writable) for event in sender.seen)


async def test_pictures_do_not_keep_control_messages_waiting(encoder: TestNode, raw: RawPeer) -> None:
    """The media lane's reader does not read at all; its queue fills, the control lane goes on."""
    control, number, welcome = await raw_session(raw, encoder)
    session = SessionId(number)
    media = raw.dial(welcome.media_address, number)
    media.send(frame(number, 0, lane=Lane.MEDIA))
    control.send(frame(number, 1, Goodbye("media lane is there, perhaps")))
    await encoder.received(1)
    while encoder.endpoint.send_media(session, chunk(0)):
        pass
    assert encoder.endpoint.counts()["queued_chunks"] == MAX_MEDIA_MESSAGES
    encoder.endpoint.send(session, Goodbye("not behind the pictures"))
    assert await word_from(control) == Goodbye("not behind the pictures")


async def test_a_peer_that_reads_nothing_loses_its_session_when_its_queue_is_full(
    encoder: TestNode, raw: RawPeer
) -> None:
    _, session, _ = await raw_session(raw, encoder)
    word = Goodbye("x" * 60000)
    while encoder.endpoint.send(SessionId(session), word):
        pass
    lost = await encoder.ended(SessionId(session))
    assert lost.code == "busy"


# -- other processes -------------------------------------------------------------------------


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.close()


async def test_a_killed_listener_is_noticed_and_its_successor_gets_nothing_of_the_old_session(
    prefill: TestNode, processes: list[Process]
) -> None:
    processes.append(Process("listen", LOOPBACK))
    address = await processes[0].said()
    session = prefill.endpoint.dial(address)
    await prefill.opened()
    prefill.endpoint.send(session, Goodbye("to the first"))
    assert await processes[0].said() == "to the first"
    processes[0].kill()
    prefill.endpoint.send(session, Goodbye("to nobody"))
    assert (await prefill.ended(session)).code == "session_lost"
    processes.append(Process("listen", address))
    assert await processes[1].said() == address
    second = prefill.endpoint.dial(address)
    await prefill.opened(2)
    prefill.endpoint.send(second, Goodbye("to the second"))
    assert await processes[1].said() == "to the second"


async def test_a_killed_dialler_is_noticed_without_waiting_for_silence(
    encoder: TestNode, processes: list[Process]
) -> None:
    processes.append(Process("dial", encoder.address, ""))
    session = SessionId(await processes[0].said())
    await encoder.opened()
    processes[0].kill()
    lost = await encoder.ended(session)
    assert (lost.code, "connection lost" in lost.reason) == ("session_lost", True)
    assert encoder.endpoint.counts()["sessions"] == 0


async def test_the_last_words_of_a_process_that_ends_in_order_arrive(
    encoder: TestNode, processes: list[Process]
) -> None:
    processes.append(Process("dial", encoder.address, "500"))
    session = SessionId(await processes[0].said())
    lost = await encoder.ended(session)
    assert lost.code == "draining"
    assert encoder.messages_seen == [Goodbye(f"{number}") for number in range(500)]


# -- the other loop --------------------------------------------------------------------------

ARGUMENTS = {"make", "prefill", "encoder", "raw", "processes"}
SCENARIOS = [
    test
    for name, test in list(globals().items())
    if name.startswith("test_") and ARGUMENTS.issuperset(inspect.signature(test).parameters)
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda test: test.__name__)
def test_on_uvloop(scenario: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Everything above that is not parametrized, as it runs in production."""
    wanted = inspect.signature(scenario).parameters

    async def run() -> None:
        given: dict[str, Any] = {}
        async with nodes_without_leaks() as make, contextlib.AsyncExitStack() as stack:
            given = {"make": make, "processes": [], "raw": RawPeer()}
            stack.callback(given["raw"].close)
            stack.callback(lambda: [process.close() for process in given["processes"]])
            for name, role in (("prefill", "prefill"), ("encoder", "encoder")):
                if name in wanted:
                    given[name] = make(name[:3], role, listens=role == "encoder")
            await scenario(**{name: given[name] for name in wanted})

    uvloop.new_event_loop().close()  # uvloop keeps two descriptors of its own from its first loop on
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
