"""A lane of a session as the endpoint sees it, whatever carries it: ZeroMQ, or a simulated network.

ZeroMQ is `epd.runtime.zmq_lanes`; its habits shape the interface. A wake-up may be swallowed by a send or a
receive, so whoever has sent calls `read` once in the same turn of the loop. A lane is always read: an
unread one hides the loss of its connection.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, Protocol

from epd.protocol.ids import SessionId
from epd.protocol.wire import Lane
from epd.runtime.addresses import Address
from epd.runtime.keys import Security

READ_BATCH: Final = 256
"""Frames read before the loop's other work has its turn; on the media lane `READ_BATCH_MEDIA`."""
READ_BATCH_MEDIA: Final = 16


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
    """One end of a lane; used in the thread of `loop` only."""

    def __init__(self, lane: Lane, owner: LaneOwner, loop: asyncio.AbstractEventLoop) -> None:
        self.lane = lane
        self.closed = False
        self._owner = owner
        self._loop = loop
        self._batch = READ_BATCH if lane is Lane.CONTROL else READ_BATCH_MEDIA
        self._again: asyncio.Handle | None = None

    @abstractmethod
    def start_reading(self) -> None:
        """Read from now on, first what is there already."""

    @abstractmethod
    def send(self, routing_id: bytes, frame: bytes) -> SendResult:
        """Hand over one frame without waiting."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Drops what has not gone out, or was not read."""

    @abstractmethod
    def _receive(self) -> list[Any] | None:
        """The parts of the next message, None if there is none now."""

    def read(self) -> int:
        """Receive what is there, up to a batch, then come back by itself. Returns the count."""
        count = self._read_batch()
        if count == self._batch:
            self._read_soon()
        return count

    def read_all(self) -> None:
        """Receive all that is there: before acting on the loss of a connection."""
        while self._read_batch() == self._batch:
            pass

    def _read_soon(self) -> None:
        """As if woken, in the loop's next turn."""
        if not self.closed and self._again is None:
            self._again = self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        """There is something to read, perhaps, or room to send."""
        self._again = None
        if self.closed:
            return
        try:
            count = self.read()
            if not self.closed:
                self._owner.lane_woken(self, count)
        except Exception as error:
            self._owner.lane_failed(error)

    def _end_reading(self) -> None:
        self.closed = True
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def _read_batch(self) -> int:
        count = 0
        while count < self._batch and not self.closed and (parts := self._receive()) is not None:
            count += 1
            self._owner.lane_received(self, parts)
        return count


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
