"""Lanes over the simulated network, and what makes them: what an endpoint takes for ZeroMQ."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from epd.protocol.ids import SessionId
from epd.protocol.wire import Lane
from epd.runtime.addresses import Address
from epd.runtime.keys import Security
from epd.runtime.lanes import (
    DialledLane,
    LaneOwner,
    LaneSocket,
    ListeningLane,
    SendResult,
    Transport,
)
from epd.sim.network import Connection, Network, Pipe
from epd.sim.process import Process

_SWALLOWED: Final = 0.1
"""Of the wake-ups so many are lost to a send that came between, as ZeroMQ's are."""


def open_transport(
    network: Network,
    process: Process,
    host: str,
    max_peers: int,
    handshake_s: float,
    security: Security | None,
    on_error: Callable[[Exception], None],
) -> Transport:
    """An `OpenTransport`, with the first three bound."""
    transport = SimTransport(network, process, host, handshake_s)
    process.when_killed.append(transport.kill)
    return transport


class SimLane(LaneSocket):
    """One end; what has arrived stands in an inbox, in its order."""

    def __init__(self, network: Network, process: Process, host: str, lane: Lane, owner: LaneOwner) -> None:
        super().__init__(lane, owner, process.loop)
        self.network = network
        self.process = process
        self.host = host
        self._inbox: deque[tuple[Pipe, list[Any]]] = deque()
        self._reading = False

    def start_reading(self) -> None:
        self._reading = True
        self._read_soon()

    def read(self) -> int:
        if self._again is not None and self.network.rng.random() < _SWALLOWED:
            self._again.cancel()
            self._again = None
        return super().read()

    def wake_up(self) -> None:
        """As its descriptor does."""
        if self._reading:
            self._read_soon()

    def take(self, connection: Connection, pipe: Pipe, frame: bytes) -> None:
        """A frame has arrived."""
        self._inbox.append((pipe, self._parts(connection, frame)))
        self.wake_up()

    def _parts(self, connection: Connection, frame: bytes) -> list[Any]:
        return [frame]

    def _receive(self) -> list[Any] | None:
        if not self._inbox:
            return None
        pipe, parts = self._inbox.popleft()
        self.network.received(pipe)
        return parts

    def _close(self) -> None:
        self._end_reading()
        self._inbox.clear()


class SimListeningLane(SimLane, ListeningLane):
    def __init__(
        self, network: Network, process: Process, host: str, lane: Lane, owner: LaneOwner, wanted: Address
    ) -> None:
        super().__init__(network, process, host, lane, owner)
        self.accepted: dict[bytes, Connection] = {}
        self.address = network.bind(self, wanted)

    def send(self, routing_id: bytes, frame: bytes) -> SendResult:
        connection = self.accepted.get(routing_id)
        if connection is None:
            return SendResult.GONE
        if not connection.whole:
            return SendResult.SENT  # the kernel took it; nobody has told us yet
        return self.network.send(connection, connection.back, frame)

    def lost(self, connection: Connection) -> None:
        """The connection is gone: only a wake-up for nothing says so."""
        if self.accepted.get(connection.routing_id) is connection:
            del self.accepted[connection.routing_id]
            if self.process.alive:
                self.wake_up()

    def close(self) -> None:
        if self.closed:
            return
        self._close()
        del self.network.listening[self.address]
        for connection in list(self.accepted.values()):
            self.network.break_connection(connection)
        self.accepted.clear()

    def _parts(self, connection: Connection, frame: bytes) -> list[Any]:
        return [connection.routing_id, frame]


class SimDialledLane(SimLane, DialledLane):
    def __init__(
        self,
        transport: "SimTransport",
        lane: Lane,
        address: Address,
        session: SessionId,
        owner: LaneOwner,
    ) -> None:
        super().__init__(transport.network, transport.process, transport.host, lane, owner)
        self.address = address
        self.session = session
        self.is_up = False
        self._transport = transport
        self._connection: Connection | None = None
        self._reading = True

    def come_up(self, connection: Connection) -> None:
        """The peer has answered."""
        if self.closed:
            self.network.break_connection(connection)
        else:
            self._connection = connection
            self.process.loop.call_soon(self._up)

    def _up(self) -> None:
        if self.closed:
            return
        self.is_up = True
        self._guarded(lambda: self._owner.lane_connected(self))
        self.wake_up()

    def lose(self, reason: str) -> None:
        """Refused or lost."""
        if not self.closed:
            self.process.loop.call_soon(self._lost, reason)

    def _lost(self, reason: str) -> None:
        if not self.closed:
            self._guarded(self.read_all)
        if not self.closed:
            self._guarded(lambda: self._owner.lane_lost(self, reason))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._owner.lane_failed(error)

    def send(self, routing_id: bytes, frame: bytes) -> SendResult:
        connection = self._connection
        if connection is None or not self.is_up:
            return SendResult.FULL
        if not connection.whole:
            return SendResult.FULL
        return self.network.send(connection, connection.there, frame)

    def close(self) -> None:
        if self.closed:
            return
        connection = self._connection
        if connection is not None:
            self._transport.dialled.pop(self, None)
            if self.process.alive:
                self.network.close_dialled(connection)
            else:
                self.network.break_connection(connection)
        self._transport.dialled.pop(self, None)
        self._close()


class SimTransport(Transport):
    """Of one endpoint."""

    def __init__(
        self,
        network: Network,
        process: Process,
        host: str,
        handshake_s: float,
    ) -> None:
        self.network = network
        self.process = process
        self.host = host
        self.dialled: dict[SimDialledLane, None] = {}
        self._handshake_s = handshake_s
        self._listening: list[SimListeningLane] = []

    def listen(self, lane: Lane, address: Address, owner: LaneOwner) -> ListeningLane:
        made = SimListeningLane(self.network, self.process, self.host, lane, owner, address)
        self._listening.append(made)
        return made

    def dial(
        self, lane: Lane, address: Address, session: SessionId, peer_key: str, owner: LaneOwner
    ) -> DialledLane:
        made = SimDialledLane(self, lane, address, session, owner)
        self.dialled[made] = None
        network = self.network
        until_s = network.time.now_s + self._handshake_s
        network.time.after(network.latency_s(self.host, address.host, 0), network.connect, made, until_s)
        return made

    async def close(self) -> None:
        left = [lane for lane in (*self.dialled, *self._listening) if not lane.closed]
        if left:
            raise RuntimeError(f"{len(left)} lanes were not closed")

    def kill(self) -> None:
        """The kernel closes what the process had open."""
        for lane in (*self.dialled, *self._listening):
            lane.close()
