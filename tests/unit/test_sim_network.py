"""The simulated network keeps what TCP and ZeroMQ keep, and breaks what they break."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from epd.protocol.errors import ConfigError
from epd.protocol.ids import SessionId
from epd.protocol.wire import Lane
from epd.runtime.addresses import Address
from epd.runtime.lanes import DialledLane, LaneSocket, ListeningLane, SendResult, routing_id_of
from epd.sim.lanes import SimTransport, open_transport
from epd.sim.network import Network
from epd.sim.process import Process, Time

HERE, THERE = "127.0.2.1", "127.0.1.1"
SESSION = SessionId(5)


class Owner:
    """Keeps what its lanes say."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.woken: list[int] = []
        self.connected: list[LaneSocket] = []
        self.lost: list[str] = []

    def lane_received(self, lane: LaneSocket, parts: list[Any]) -> None:
        self.received.append(parts[-1])

    def lane_woken(self, lane: LaneSocket, count: int) -> None:
        self.woken.append(count)

    def lane_connected(self, lane: LaneSocket) -> None:
        self.connected.append(lane)

    def lane_lost(self, lane: LaneSocket, reason: str) -> None:
        self.lost.append(reason)

    def lane_refused(self, lane: LaneSocket, reason: str) -> None:
        raise AssertionError(reason)

    def lane_failed(self, error: Exception) -> None:
        raise error


class Pair:
    """A listener and one who dials it."""

    def __init__(self, seed: int = 1) -> None:
        self.time = Time()
        self.provoked: Counter[str] = Counter()
        rng = random.Random(seed)
        self.network = Network(self.time, rng, lambda what: self.provoked.update([what]))
        self.dialling, self.listening = Owner(), Owner()
        self.reader = Process(self.time, "reader", random.Random(seed), self._failed)
        self.source = Process(self.time, "source", random.Random(seed), self._failed)
        self.there = self._transport(self.source, THERE)
        self.here = self._transport(self.reader, HERE)
        self.listener: ListeningLane = self.there.listen(Lane.CONTROL, Address(THERE, 0), self.listening)
        self.listener.start_reading()
        self.lane: DialledLane

    def _transport(self, process: Process, host: str) -> SimTransport:
        transport = open_transport(self.network, process, host, 8, 2.0, None, self.dialling.lane_failed)
        assert isinstance(transport, SimTransport)
        return transport

    def _failed(self, process: str, context: dict[str, Any]) -> None:
        raise context["exception"]

    def dial(self, address: Address | None = None) -> None:
        to = address or self.listener.address
        self.lane = self.here.dial(Lane.CONTROL, to, SESSION, "", self.dialling)

    def connect(self) -> None:
        self.dial()
        self.run(1.0)
        assert self.dialling.connected == [self.lane]

    def run(self, seconds: float) -> None:
        self.time.run(self.time.now_s + seconds)

    def send(self, count: int) -> list[bytes]:
        frames = [b"%d" % number for number in range(count)]
        for frame in frames:
            assert self.lane.send(b"", frame) is SendResult.SENT
        return frames


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    made: list[Pair] = []

    def make(seed: int = 1) -> Pair:
        made.append(Pair(seed))
        return made[-1]

    yield make
    for pair in made:
        pair.reader.kill()
        pair.source.kill()


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    pair = make_pair()
    pair.connect()
    return pair


def test_frames_arrive_in_their_order_both_ways(pair: Pair) -> None:
    frames = pair.send(100)
    pair.run(1.0)
    assert pair.listening.received == frames
    for frame in frames:
        assert pair.listener.send(routing_id_of(SESSION), frame) is SendResult.SENT
    pair.run(1.0)
    assert pair.dialling.received == frames


@pytest.mark.parametrize("seed", range(5))
def test_a_connection_that_breaks_loses_an_end_of_what_was_under_way(seed: int, make_pair: MakePair) -> None:
    pair = make_pair(seed)
    pair.connect()
    frames = pair.send(50)
    (connection,) = pair.network.connections
    pair.network.break_connection(connection)
    pair.run(1.0)
    assert pair.listening.received == frames[: len(pair.listening.received)]
    assert pair.dialling.lost == ["connection lost"]
    assert pair.listener.send(routing_id_of(SESSION), b"x") is SendResult.GONE
    assert not pair.network.connections


def test_a_parted_link_says_nothing_and_delivers_when_it_is_whole(pair: Pair) -> None:
    pair.network.part(HERE, THERE, 5.0)
    frames = pair.send(3)
    pair.run(4.0)
    assert (pair.listening.received, pair.dialling.lost) == ([], [])
    pair.run(2.0)
    assert pair.listening.received == frames


def test_what_stands_goes_on_when_everything_is_healed(pair: Pair) -> None:
    pair.network.part(HERE, THERE, 3_600.0)
    frames = pair.send(3)
    (connection,) = pair.network.connections
    pair.run(1.0)
    pair.network.heal()
    pair.run(0.1)
    assert pair.listening.received == frames
    pair.network.part(THERE, HERE, 3_600.0)
    pair.network.break_connection(connection)
    pair.run(1.0)
    assert pair.dialling.lost == []
    pair.network.heal()
    pair.run(0.1)
    assert pair.dialling.lost == ["connection lost"]


def test_one_direction_can_be_parted_alone(pair: Pair) -> None:
    pair.network.part(HERE, THERE, 5.0)
    pair.send(1)
    assert pair.listener.send(routing_id_of(SESSION), b"back") is SendResult.SENT
    pair.run(1.0)
    assert (pair.listening.received, pair.dialling.received) == ([], [b"back"])


def test_who_is_not_there_is_refused(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.dial(Address(THERE, 9))
    pair.run(0.1)
    assert pair.dialling.lost == ["connection refused"]


@pytest.mark.parametrize("stopped", [True, False])
def test_who_stands_still_or_is_cut_off_lets_the_handshake_time_out(
    stopped: bool, make_pair: MakePair
) -> None:
    pair = make_pair()
    if stopped:
        pair.source.stop()
    else:
        pair.network.part(THERE, HERE, 60.0)
    pair.dial()
    pair.run(1.9)
    assert (pair.dialling.connected, pair.dialling.lost) == ([], [])
    pair.run(0.3)
    assert pair.dialling.lost == ["handshake failed"]


def test_nothing_can_be_sent_before_the_peer_has_answered(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.dial()
    assert pair.lane.send(b"", b"early") is SendResult.FULL


def test_who_does_not_read_fills_up_and_there_is_room_when_it_does(pair: Pair) -> None:
    pair.source.stop()
    sent = 0
    while pair.lane.send(b"", b"%d" % sent) is SendResult.SENT:
        sent += 1
    assert 100 < sent < 10_000
    woken = len(pair.dialling.woken)
    pair.run(1.0)
    assert len(pair.dialling.woken) == woken
    pair.source.go_on()
    pair.run(1.0)
    assert len(pair.listening.received) == sent
    assert len(pair.dialling.woken) > woken
    assert pair.lane.send(b"", b"more") is SendResult.SENT


def test_of_a_killed_process_only_a_beginning_of_its_last_words_arrives(pair: Pair) -> None:
    frames = pair.send(20)
    pair.reader.kill()
    pair.run(1.0)
    assert pair.listening.received == frames[: len(pair.listening.received)]
    assert 0 in pair.listening.woken  # it wakes for nothing: that is how a listener hears of a loss
    assert not pair.network.connections


def test_a_killed_listener_is_a_loss_and_its_port_is_free(pair: Pair) -> None:
    pair.source.kill()
    pair.run(1.0)
    assert pair.dialling.lost == ["connection lost"]
    assert not pair.network.listening


def test_a_port_has_one_listener(pair: Pair) -> None:
    with pytest.raises(ConfigError, match="cannot bind"):
        pair.there.listen(Lane.CONTROL, pair.listener.address, pair.listening)


def test_a_frame_can_be_lost_or_doubled_by_somebody_who_meddles(pair: Pair) -> None:
    (connection,) = pair.network.connections
    assert not pair.network.drop_one(connection)  # nothing is under way
    frames = pair.send(10)
    assert pair.network.drop_one(connection)
    pair.run(1.0)
    assert len(pair.listening.received) == 9
    pair.listening.received.clear()
    pair.send(10)
    assert pair.network.double_one(connection)
    pair.run(1.0)
    assert len(pair.listening.received) == 11
    assert set(pair.listening.received) == set(frames)


async def test_a_transport_that_closes_with_open_lanes_is_a_bug(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="1 lanes were not closed"):
        await pair.there.close()
    pair.listener.close()
    await pair.there.close()
