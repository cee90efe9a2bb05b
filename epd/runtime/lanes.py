"""A lane of a session as the endpoint sees it, whatever carries it: ZeroMQ, or a simulated network.

ZeroMQ is `epd.runtime.zmq_lanes`; its habits shape the interface. A wake-up may be swallowed by a send or a
receive, so whoever has sent calls `read` once in the same turn of the loop. A lane is always read: an
unread one hides the loss of its connection.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from epd.protocol.ids import SessionId
from epd.protocol.wire import Lane
from epd.runtime.addresses import Address
from epd.runtime.keys import Security


class SendResult(Enum):
    SENT = "sent"
    FULL = "full"
    """No room, or not connected yet: the descriptor wakes when there is."""
    GONE = "gone"
    """A listener's: no connection has that routing id (any more)."""


class LaneOwner(Protocol):
    """Who acts on what a lane brings; any of these may close the lane."""

    def lane_received(self, lane: "LaneSocket", parts: list[Any]) -> None:
        """One ZeroMQ message; its parts are bytes, or a `zmq.Frame` where they were not copied."""
        ...

    def lane_woken(self, lane: "LaneSocket", count: int) -> None:
        """The descriptor woke and led to `count` messages."""
        ...

    def lane_connected(self, lane: "LaneSocket") -> None:
        """A dialled lane: the peer has answered."""
        ...

    def lane_lost(self, lane: "LaneSocket", reason: str) -> None:
        """A dialled lane, once: refused or lost, after all that had arrived was received."""
        ...

    def lane_refused(self, lane: "LaneSocket", reason: str) -> None:
        """A listening lane: somebody did not get through the handshake."""
        ...

    def lane_failed(self, error: Exception) -> None:
        """One of the above raised: our own bug."""
        ...


class LaneSocket(ABC):
    """One end of a lane; used in the loop's thread only."""

    lane: Lane
    closed: bool

    @abstractmethod
    def start_reading(self) -> None:
        """Read from now on, first what is there already."""

    @abstractmethod
    def read(self) -> int:
        """Receive what is there, up to a batch, then come back by itself. Returns the count."""

    @abstractmethod
    def read_all(self) -> None:
        """Receive all that is there: before acting on the loss of a connection."""

    @abstractmethod
    def send(self, routing_id: bytes, frame: bytes) -> SendResult:
        """Hand over one frame without waiting."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Drops what has not gone out, or was not read."""


class ListeningLane(LaneSocket):
    """Where peers come in; `address` is what was bound. It never closes one connection, only all."""

    address: Address


class DialledLane(LaneSocket):
    """One attempt to connect, read from the start, never used again; `is_up` once the peer has answered."""

    address: Address
    session: SessionId
    is_up: bool


class Transport(ABC):
    """Makes the lanes of one endpoint."""

    @abstractmethod
    def listen(self, lane: Lane, address: Address, owner: LaneOwner) -> ListeningLane:
        """Not read yet. Raises `ConfigError` if the (numeric) address cannot be bound."""

    @abstractmethod
    def dial(
        self, lane: Lane, address: Address, session: SessionId, peer_key: str, owner: LaneOwner
    ) -> DialledLane:
        """Begins to connect to a numeric address, where only the holder of `peer_key` may answer (empty:
        anybody). Raises `PeerUnreachable` if that cannot even begin (out of descriptors)."""

    @abstractmethod
    async def close(self) -> None:
        """End what is left when every lane is closed."""


OpenTransport = Callable[[int, float, Security | None, Callable[[Exception], None]], Transport]
"""By `max_peers`, `handshake_s`, `security`, and where an error of our own goes. Raises `ConfigError`."""


def routing_id_of(session: SessionId) -> bytes:
    """Both lanes' routing id: the session as it stands in the frame's header."""
    return session.to_bytes(8, "little")
