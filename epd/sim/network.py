"""The network between simulated hosts: connections as TCP's, and what goes wrong with them.

What has been sent on one connection arrives in its order or not at all. A connection that breaks loses
what was under way behind some frame. A link that is cut in two says nothing to either side: frames stand
until it is whole again.
"""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from epd.protocol.errors import ConfigError
from epd.protocol.wire import Lane
from epd.runtime.addresses import Address
from epd.runtime.lanes import (
    SendResult,
    routing_id_of,
)
from epd.sim.process import Process, Time

if TYPE_CHECKING:
    from epd.sim.lanes import SimDialledLane, SimLane, SimListeningLane

_LATENCY_S: Final = 100e-6
_BYTES_PER_S: Final = 1e9
_STANDING: Final = {Lane.CONTROL: 400, Lane.MEDIA: 8}
"""Frames of one connection that may stand on both sides before there is no room."""
_ASK_AGAIN_S: Final = 0.05

Link = tuple[str, str]


class Pipe:
    """One direction of a connection."""

    __slots__ = ("arrived", "blocked", "flying", "last_s", "reader", "sender")

    def __init__(self, sender: "SimLane", reader: "SimLane") -> None:
        self.sender = sender
        self.reader = reader
        self.flying: deque[bytes] = deque()
        self.arrived = 0
        """Frames that the reader has not received yet."""
        self.last_s = 0.0
        self.blocked = False


class Connection:
    """Between a dialled lane and a listening one."""

    def __init__(self, dialled: "SimDialledLane", listening: "SimListeningLane", routing_id: bytes) -> None:
        self.dialled = dialled
        self.listening = listening
        self.routing_id = routing_id
        self.lane = dialled.lane
        self.whole = True
        self.there = Pipe(dialled, listening)
        self.back = Pipe(listening, dialled)


class Network:
    """`provoked(what)` is called for each rare thing that happens."""

    def __init__(self, time: Time, rng: random.Random, provoked: Callable[[str], None]) -> None:
        self.time = time
        self.rng = rng
        self.provoked = provoked
        self.listening: dict[Address, SimListeningLane] = {}
        self.connections: dict[Connection, None] = {}
        self.hosts: dict[str, Process] = {}
        self._next_port = 20_000
        self._parted: dict[Link, float] = {}
        self._slow_s: dict[Link, float] = {}
        self._standing: dict[Link, list[Callable[[], None]]] = {}
        """What goes on when a link is whole again."""

    # -- faults ------------------------------------------------------------------------------

    def part(self, one: str, other: str, seconds: float) -> None:
        """Nothing gets from host `one` to host `other` for so long."""
        self._parted[one, other] = max(self._parted.get((one, other), 0.0), self.time.now_s + seconds)

    def slow(self, one: str, other: str, latency_s: float) -> None:
        """Until it is said otherwise; 0.0: as before."""
        self._slow_s[one, other] = latency_s

    def heal(self) -> None:
        """No link is parted or slow from now on."""
        self._parted.clear()
        self._slow_s.clear()
        for link in list(self._standing):
            self._go_on(link)

    def open_s(self, one: str, other: str) -> float:
        """When something can get from `one` to `other` again."""
        return max(self._parted.get((one, other), 0.0), self.time.now_s)

    def is_whole(self, one: str, other: str) -> bool:
        """Whether the two reach each other now."""
        return max(self.open_s(one, other), self.open_s(other, one)) <= self.time.now_s

    def latency_s(self, one: str, other: str, nbytes: int) -> float:
        slow_s = self._slow_s.get((one, other), 0.0)
        return self.rng.expovariate(1.0) * (_LATENCY_S + slow_s) + nbytes / _BYTES_PER_S

    def between(self, one: str, other: str) -> list[Connection]:
        """Connections of two hosts."""
        hosts = {one, other}
        return [c for c in self.connections if {c.dialled.host, c.listening.host} == hosts]

    def break_connection(self, connection: Connection) -> None:
        """Both sides learn of it; of what is under way some of the end is lost."""
        if not connection.whole:
            return
        connection.whole = False
        del self.connections[connection]
        for pipe in (connection.there, connection.back):
            for _ in range(self.rng.randint(0, len(pipe.flying))):
                pipe.flying.pop()
        self._lose(connection)

    def drop_one(self, connection: Connection) -> bool:
        """A frame under way is lost, and nothing else: a peer or a proxy that misbehaves."""
        return self._meddle(connection, lambda flying, at: flying.__delitem__(at))

    def double_one(self, connection: Connection) -> bool:
        """A frame under way comes twice."""
        return self._meddle(connection, lambda flying, at: flying.insert(at, flying[at]))

    def _meddle(self, connection: Connection, change: Callable[[deque[bytes], int], None]) -> bool:
        pipes = [pipe for pipe in (connection.there, connection.back) if pipe.flying]
        if not pipes:
            return False
        pipe = self.rng.choice(pipes)
        before = len(pipe.flying)
        change(pipe.flying, self.rng.randrange(before))
        for _ in range(len(pipe.flying) - before):
            self._deliver_later(connection, pipe, 0)
        return True

    # -- connections -------------------------------------------------------------------------

    def bind(self, lane: "SimListeningLane", wanted: Address) -> Address:
        if not wanted.port:
            self._next_port += 1
            wanted = Address(wanted.host, self._next_port)
        if wanted in self.listening:
            raise ConfigError(f"listen: cannot bind {wanted}: in use", key="listen")
        self.listening[wanted] = lane
        return wanted

    def connect(self, lane: "SimDialledLane", until_s: float) -> None:
        """What the kernel and the handshake do, until it is settled."""
        if lane.closed:
            return
        listening = self.listening.get(lane.address)
        here, there = lane.host, lane.address.host
        reaches = self.is_whole(here, there)
        if listening is None and reaches:
            self.time.after(self.latency_s(there, here, 0), lane.lose, "connection refused")
        elif listening is not None and reaches and listening.process.runs:
            connection = Connection(lane, listening, routing_id_of(lane.session))
            self.connections[connection] = None
            listening.accepted[connection.routing_id] = connection
            self.time.after(self.latency_s(there, here, 0), lane.come_up, connection)
        elif self.time.now_s < until_s:
            self.time.after(_ASK_AGAIN_S, self.connect, lane, until_s)
        else:
            lane.lose("handshake failed")

    def send(self, connection: Connection, pipe: Pipe, frame: bytes) -> SendResult:
        if len(pipe.flying) + pipe.arrived >= _STANDING[connection.lane]:
            pipe.blocked = True
            self.provoked("no_room")
            return SendResult.FULL
        pipe.flying.append(frame)
        self._deliver_later(connection, pipe, len(frame))
        return SendResult.SENT

    def _deliver_later(self, connection: Connection, pipe: Pipe, nbytes: int) -> None:
        latency_s = self.latency_s(pipe.sender.host, pipe.reader.host, nbytes)
        pipe.last_s = max(pipe.last_s, self.time.now_s + latency_s)
        self.time.at(pipe.last_s, self._deliver, connection, pipe)

    def _deliver(self, connection: Connection, pipe: Pipe) -> None:
        link = (pipe.sender.host, pipe.reader.host)
        if self.open_s(*link) > self.time.now_s:
            self.provoked("frame_stood")
            self._stand(link, partial(self._deliver, connection, pipe))
        elif pipe.flying:
            frame = pipe.flying.popleft()
            if not pipe.reader.closed:
                pipe.arrived += 1
                pipe.reader.take(connection, pipe, frame)

    def received(self, pipe: Pipe) -> None:
        """The reader has it: there is room for another."""
        pipe.arrived -= 1
        if pipe.blocked:
            pipe.blocked = False
            pipe.sender.wake_up()

    def close_dialled(self, connection: Connection) -> None:
        """By its dialler: what has not arrived may be lost, as nothing lingers."""
        if not connection.whole:
            return
        connection.whole = False
        del self.connections[connection]
        flying = connection.there.flying
        for _ in range(self.rng.randint(0, len(flying))):
            self.provoked("lost_by_close")
            flying.pop()
        connection.back.flying.clear()
        self._lose(connection)

    def _lose(self, connection: Connection) -> None:
        """Each side hears of the end behind the last frame that still comes."""
        here, there = connection.dialled.host, connection.listening.host
        for pipe, tell in (
            (connection.there, partial(connection.listening.lost, connection)),
            (connection.back, partial(connection.dialled.lose, "connection lost")),
        ):
            link = (here, there) if pipe is connection.there else (there, here)
            pipe.last_s = max(pipe.last_s, self.time.now_s + self.latency_s(*link, 0))
            self._tell_lost(pipe, link, tell)

    def _tell_lost(self, pipe: Pipe, link: Link, tell: Callable[[], None]) -> None:
        if self.open_s(*link) > self.time.now_s:
            self._stand(link, partial(self._tell_lost, pipe, link, tell))
        elif pipe.last_s > self.time.now_s or pipe.flying:
            self.time.at(pipe.last_s, self._tell_lost, pipe, link, tell)
        else:
            tell()

    def _stand(self, link: Link, go_on: Callable[[], None]) -> None:
        """Until the link is whole."""
        standing = self._standing.setdefault(link, [])
        standing.append(go_on)
        if len(standing) == 1:
            self.time.at(self.open_s(*link), self._go_on, link)

    def _go_on(self, link: Link) -> None:
        open_s = self.open_s(*link)
        if open_s > self.time.now_s:  # it was parted for longer meanwhile
            self.time.at(open_s, self._go_on, link)
            return
        for go_on in self._standing.pop(link, ()):
            go_on()
