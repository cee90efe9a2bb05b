"""ZeroMQ sockets of one lane: their options, and how they are read, written and closed.

The descriptor of a socket means "call me", for both directions, and is edge-triggered: after every
send or receive it may stay silent although there is something to do. So whoever has sent calls
`read` once in the same turn of the loop, and `read` goes on until there is nothing, or asks to be
called again. A socket is always read: an unread one hides the disconnect. ZeroMQ's own queues are
short; bounds live in our queues.
"""

import asyncio
import resource
import struct
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, Final, Protocol

import zmq

from epd.protocol.errors import ConfigError
from epd.protocol.ids import SessionId
from epd.protocol.wire import FRAME_NBYTES, Lane
from epd.runtime.addresses import Address
from epd.runtime.curve import apply_listener
from epd.runtime.keys import KeyPair

READ_BATCH: Final = 256
"""Frames read before the loop's other work has its turn; on the media lane `READ_BATCH_MEDIA`."""
READ_BATCH_MEDIA: Final = 16
_HWM: Final = {Lane.CONTROL: 1000, Lane.MEDIA: 4}
"""Frames per peer inside ZeroMQ. Media are cut late from our queue: 4 x 1 MiB, not 1 GB."""
_BACKLOG: Final = 512
_SOCKETS_PER_SESSION: Final = 6
"""A dialled session has two sockets with a monitor each; a monitored one counts as 3."""
_DESCRIPTORS_PER_SESSION: Final = 8
_DESCRIPTORS_OF_NODE: Final = 192
"""Everything else: interpreter, loop, listeners, data plane, worker, trace, a batch of strangers."""
_MAX_SOCKETS: Final = 65535


def open_context(max_peers: int) -> zmq.Context[zmq.Socket[bytes]]:
    """A context of our own that has room for `max_peers` sessions.

    Raises `ConfigError` with both numbers when this process's limit on open files is too low: a listener
    without descriptors would spin on accept.
    """
    needed = _DESCRIPTORS_PER_SESSION * max_peers + _DESCRIPTORS_OF_NODE
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # raised by `epd-node`; others' is not ours to set
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ConfigError(
            f"limits.max_peers: {max_peers} peers need {needed} open files, the limit is {limit}; "
            f"lower the one or raise the other",
            key="limits.max_peers",
            given=max_peers,
            needed=needed,
            limit=limit,
        )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # Twice: sockets that were closed count until the I/O thread has reaped them.
    context.set(zmq.MAX_SOCKETS, min(2 * _SOCKETS_PER_SESSION * max_peers + 64, _MAX_SOCKETS))
    return context


class SendResult(Enum):
    SENT = "sent"
    FULL = "full"
    """No room, or not connected yet: the descriptor wakes when there is."""
    GONE = "gone"
    """A listener's: no connection has that routing id (any more)."""


class LaneOwner(Protocol):
    """Who acts on what a lane brings; any of these may close the lane."""

    def lane_received(self, lane: "LaneSocket", parts: list[Any]) -> None:
        """One ZeroMQ message; its parts are bytes, or `zmq.Frame` where they were not copied."""
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
    """One socket and its registration in the loop; used in the loop's thread only."""

    def __init__(self, socket: zmq.Socket[bytes], lane: Lane, owner: LaneOwner) -> None:
        self.lane = lane
        self.closed = False
        self._socket = socket
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._batch = READ_BATCH if lane is Lane.CONTROL else READ_BATCH_MEDIA
        # Media bodies stay views of ZeroMQ's own memory: a megabyte is not copied to be read.
        # So do control frames of an authenticated peer: only an uncopied frame knows its key.
        self._copy = lane is Lane.CONTROL and not socket.getsockopt(zmq.CURVE_SERVER)
        self._again: asyncio.Handle | None = None
        self._fd = socket.fileno()

    def start_reading(self) -> None:
        """Read from now on, first what is there already."""
        self._loop.add_reader(self._fd, self._wake)
        self._again = self._loop.call_soon(self._wake)

    def read(self) -> int:
        """Receive what is there, up to a batch, then come back by itself. Returns the count."""
        count = self._read_batch()
        if count == self._batch and not self.closed and self._again is None:
            self._again = self._loop.call_soon(self._wake)
        return count

    def read_all(self) -> None:
        """Receive all that is there: before acting on the loss of a connection."""
        while self._read_batch() == self._batch:
            pass

    @abstractmethod
    def send(self, routing_id: bytes, frame: bytes) -> SendResult:
        """Hand over one frame without waiting."""

    def close(self, linger_s: float = 0.0) -> None:
        """Idempotent. What was sent still goes out within `linger_s`."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._socket.close(int(linger_s * 1000))

    def _read_batch(self) -> int:
        count = 0
        while count < self._batch and not self.closed:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=self._copy)
            except zmq.Again:
                break
            count += 1
            self._owner.lane_received(self, parts)
        return count

    def _wake(self) -> None:
        self._again = None
        if self.closed:
            return
        try:
            count = self.read()
            if not self.closed:
                self._owner.lane_woken(self, count)
        except Exception as error:
            self._owner.lane_failed(error)


def routing_id_of(session: SessionId) -> bytes:
    """Both lanes' routing id: the session as it stands in the frame's header."""
    return session.to_bytes(8, "little")


def apply_options(socket: zmq.Socket[bytes], lane: Lane, address: Address, handshake_s: float) -> None:
    """What both ends of a lane have in common; before `bind` or `connect`."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_NBYTES[lane])
    socket.setsockopt(zmq.SNDHWM, _HWM[lane])
    socket.setsockopt(zmq.RCVHWM, _HWM[lane])
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(handshake_s * 1000))
    if ":" in address.host:
        socket.setsockopt(zmq.IPV6, 1)


MONITOR_EVENT: Final = struct.Struct("=HI")
HANDSHAKE_FAILURES: Final = {
    2048: "handshake failed",  # HANDSHAKE_FAILED_NO_DETAIL
    8192: "handshake failed: not our protocol, or not our keys",  # HANDSHAKE_FAILED_PROTOCOL
    16384: "handshake failed: not admitted",  # HANDSHAKE_FAILED_AUTH
}


class ListeningLane(LaneSocket):
    """A bound ROUTER; `address` is what was bound. It never closes one connection, only all.

    With `keys` only authenticated peers come in: whom the context's ZAP handler admits, nobody without one.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        lane: Lane,
        address: Address,
        handshake_s: float,
        owner: LaneOwner,
        keys: KeyPair | None = None,
    ) -> None:
        """Raises `ConfigError` if the (numeric) address cannot be bound. Not read yet."""
        socket = context.socket(zmq.ROUTER)
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            if keys is not None:
                apply_listener(socket, keys)
            self._monitor = _monitor_of(context, socket)
            self._monitor_fd = self._monitor.fileno()
            apply_options(socket, lane, address, handshake_s)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.BACKLOG, _BACKLOG)
            host = f"[{address.host}]" if ":" in address.host else address.host
            socket.bind(f"tcp://{host}:{address.port or '*'}")
            bound = socket.getsockopt(zmq.LAST_ENDPOINT)
            super().__init__(socket, lane, owner)
        except BaseException as error:
            self._close_monitor(socket)
            socket.close(0)
            if isinstance(error, zmq.ZMQError):
                key = "listen" if lane is Lane.CONTROL else "media_listen"
                raise ConfigError(f"{key}: cannot bind {address}: {error}", key=key) from error
            raise
        port = int(bytes(bound).rstrip(b"\0").rpartition(b":")[2])
        self.address = Address(address.host, port)
        self._loop.add_reader(self._monitor_fd, self._observe)
        self._observe()

    def close(self, linger_s: float = 0.0) -> None:
        if not self.closed:
            self._loop.remove_reader(self._monitor_fd)
            self._close_monitor(self._socket)
        super().close(linger_s)

    def _close_monitor(self, socket: zmq.Socket[bytes]) -> None:
        if self._monitor is not None:
            socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None

    def _observe(self) -> None:
        try:
            while self._monitor is not None:
                try:
                    event, _value = MONITOR_EVENT.unpack(self._monitor.recv_multipart(zmq.DONTWAIT)[0])
                except zmq.Again:
                    return
                self._owner.lane_refused(self, HANDSHAKE_FAILURES[event])
        except Exception as error:
            self._owner.lane_failed(error)

    def send(self, routing_id: bytes, frame: bytes) -> SendResult:
        try:
            self._socket.send_multipart((routing_id, frame), zmq.DONTWAIT)
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendResult.GONE
        return SendResult.SENT


def _monitor_of(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Its failed handshakes. Without a bound: the I/O thread that waited for a reader would stop all."""
    address = f"inproc://monitor.{socket.underlying}"
    socket.monitor(address, sum(HANDSHAKE_FAILURES))
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor
