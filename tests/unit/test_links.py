"""Links: one session to each configured address, whatever happens to it."""

import itertools
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

from epd.protocol.errors import Busy, ConfigError
from epd.protocol.ids import Incarnation, NodeId, SessionId
from epd.protocol.messages import PeerLimits
from epd.runtime.links import FIRST_PAUSE_S, LONGEST_PAUSE_S, Links
from epd.runtime.peers import PeerInfo
from epd.runtime.timers import Timers
from epd.testing.virtual_clock import VirtualClock

A, B = "tcp://a:1", "tcp://b:1"


class Dialled:
    """An endpoint that only counts: (time, address, session)."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.dials: list[tuple[float, str]] = []
        self.last: dict[str, SessionId] = {}
        self.busy = False
        self._numbers = itertools.count(1)

    def dial(self, address: str) -> SessionId:
        self.dials.append((self.clock.now_s(), address))
        if self.busy:
            raise Busy("full")
        self.last[address] = SessionId(next(self._numbers))
        return self.last[address]


class World:
    def __init__(self, *addresses: str, jitter: float = 1.0) -> None:
        self.clock = VirtualClock()
        self.timers = Timers(self.clock, self.clock.call_at)
        self.endpoint = Dialled(self.clock)
        self.links = Links(self.endpoint, addresses, self.timers, self.clock, jitter=lambda: jitter)

    def open(self, address: str, incarnation: int = 1) -> None:
        self.links.session_opened(self.endpoint.last[address], peer(incarnation))

    def end(self, address: str, code: str = "session_lost") -> None:
        self.links.session_ended(self.endpoint.last[address], code, "on purpose")

    def pause_after(self, address: str, code: str = "session_lost") -> float:
        """How long after this end the next dial comes."""
        ended_s, before = self.clock.now_s(), len(self.endpoint.dials)
        self.end(address, code)
        self.clock.advance(2 * LONGEST_PAUSE_S)
        assert len(self.endpoint.dials) == before + 1
        return self.endpoint.dials[-1][0] - ended_s


def peer(incarnation: int) -> PeerInfo:
    limits = PeerLimits(1, 1, 1)
    return PeerInfo(NodeId("enc"), Incarnation(incarnation), "encoder", "", "", "", "", limits, 1)


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    with capture_logs() as captured:
        yield captured
    structlog.reset_defaults()


def warnings(logs: list[EventDict]) -> list[str]:
    return [str(entry["code"]) for entry in logs if entry["event"] == "no session"]


def test_each_address_is_dialled_once_at_the_start_and_no_more_while_its_session_lives() -> None:
    world = World(A, B, A)
    world.links.start()
    world.open(A, 1)
    world.open(B, 2)
    world.clock.advance(1000.0)
    assert [address for _, address in world.endpoint.dials] == [A, B]


def test_a_malformed_address_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="encoders"):
        World("tcp://a:70000")


def test_pauses_double_up_to_the_longest() -> None:
    world = World(A)
    world.links.start()
    pauses = [round(world.pause_after(A, "peer_unreachable"), 6) for _ in range(8)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_pauses_are_spread_over_half_of_their_length() -> None:
    world = World(A, jitter=0.0)
    world.links.start()
    assert world.pause_after(A) == pytest.approx(FIRST_PAUSE_S / 2)


@pytest.mark.parametrize("code", ["rejected", "wrong_role"])
def test_who_refuses_us_is_tried_slowly_and_reported_once(code: str, logs: list[EventDict]) -> None:
    world = World(A)
    world.links.start()
    assert [world.pause_after(A, code) for _ in range(3)] == [LONGEST_PAUSE_S] * 3
    assert warnings(logs) == [code]


def test_a_failure_is_reported_once_until_something_else_happens(logs: list[EventDict]) -> None:
    world = World(A)
    world.links.start()
    for code in ("peer_unreachable", "peer_unreachable", "rejected", "peer_unreachable"):
        world.pause_after(A, code)
    world.open(A)
    world.pause_after(A, "peer_unreachable")
    assert warnings(logs) == ["peer_unreachable", "rejected", "peer_unreachable", "peer_unreachable"]


def test_only_a_session_that_lived_makes_the_next_pause_short_again() -> None:
    world = World(A)
    world.links.start()
    for _ in range(4):
        world.pause_after(A, "peer_unreachable")
    world.open(A)
    assert world.pause_after(A) == pytest.approx(1.6)
    world.open(A)
    world.clock.advance(LONGEST_PAUSE_S)
    assert world.pause_after(A) == pytest.approx(FIRST_PAUSE_S)


def test_of_two_addresses_of_one_node_the_older_rests_until_the_newer_ends(logs: list[EventDict]) -> None:
    world = World(A, B)
    world.links.start()
    world.open(A, 7)
    world.end(A)  # as the endpoint does when the node's newer session opens
    world.open(B, 7)
    world.clock.advance(1000.0)
    assert [address for _, address in world.endpoint.dials] == [A, B]
    assert [entry["address"] for entry in logs if entry["event"] == "two addresses of one node"] == [A]
    world.end(B)
    world.clock.advance(2 * LONGEST_PAUSE_S)
    assert {address for _, address in world.endpoint.dials[2:]} == {A, B}


def test_a_restarted_node_is_no_second_address() -> None:
    world = World(A, B)
    world.links.start()
    world.open(A, 1)
    world.open(B, 2)
    world.end(A)
    world.clock.advance(LONGEST_PAUSE_S)
    world.open(A, 3)
    world.end(A)
    world.clock.advance(2 * LONGEST_PAUSE_S)
    assert [address for _, address in world.endpoint.dials] == [A, B, A, A]


def test_a_full_endpoint_is_tried_again() -> None:
    world = World(A)
    world.endpoint.busy = True
    world.links.start()
    world.endpoint.busy = False
    world.clock.advance(FIRST_PAUSE_S)
    assert len(world.endpoint.dials) == 2


def test_sessions_of_others_are_ignored() -> None:
    world = World(A)
    world.links.start()
    world.links.session_opened(SessionId(999), peer(1))
    world.links.session_ended(SessionId(999), "session_lost", "not ours")
    world.clock.advance(1000.0)
    assert len(world.endpoint.dials) == 1


def test_after_stop_nothing_is_dialled_and_no_timer_is_left() -> None:
    world = World(A, B)
    world.links.start()
    world.end(A)
    world.links.stop()
    world.links.stop()
    world.end(B)
    assert len(world.timers) == 0
    world.clock.advance(1000.0)
    assert len(world.endpoint.dials) == 2
