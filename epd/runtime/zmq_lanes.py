"""ZeroMQ sockets of one lane: their options, and how they are read, written and closed.

The descriptor of a socket means "call me", for both directions, and is edge-triggered: after every
send or receive it may stay silent although there is something to do. So whoever has sent calls
`read` once in the same turn of the loop, and `read` goes on until there is nothing, or asks to be
called again. A socket is always read: an unread one hides the disconnect. ZeroMQ's own queues are
short; bounds live in our queues.

A dialled lane is one DEALER with a monitor, for one attempt to connect, never used again. A DEALER that
reconnects hands what was meant for a dead process to its successor on the same port, so
`RECONNECT_IVL` is -1 and `IMMEDIATE` set: refused or lost is for good. The first decisive event
of the monitor settles the attempt; after that `DISCONNECTED` is the loss, about 1 ms after it.
"""

import asyncio
import resource
import struct
from collections.abc import Callable
from typing import Any, Final

import zmq

from epd.protocol.errors import ConfigError, PeerUnreachable
from epd.protocol.ids import SessionId
from epd.protocol.wire import FRAME_NBYTES, Lane
from epd.runtime.addresses import Address
from epd.runtime.curve import Authenticator, apply_dialler, apply_listener
from epd.runtime.keys import KeyPair, Security
from epd.runtime.lanes import (
    DialledLane,
    LaneOwner,
    LaneSocket,
    ListeningLane,
    SendResult,
    Transport,
    routing_id_of,
)

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


class ZmqLane(LaneSocket):
    """One socket and its registration in the loop."""

    def __init__(self, socket: zmq.Socket[bytes], lane: Lane, owner: LaneOwner) -> None:
        super().__init__(lane, owner, asyncio.get_running_loop())
        self._socket = socket
        # Media bodies stay views of ZeroMQ's own memory: a megabyte is not copied to be read.
        # So do control frames of an authenticated peer: only an uncopied frame knows its key.
        self._copy = lane is Lane.CONTROL and not socket.getsockopt(zmq.CURVE_SERVER)
        self._fd = socket.fileno()

    def start_reading(self) -> None:
        self._loop.add_reader(self._fd, self._wake)
        self._read_soon()

    def close(self) -> None:
        if not self.closed:
            self._loop.remove_reader(self._fd)
            self._end_reading()
            self._socket.close(0)

    def _receive(self) -> list[Any] | None:
        try:
            return self._socket.recv_multipart(zmq.DONTWAIT, copy=self._copy)
        except zmq.Again:
            return None


def _apply_options(socket: zmq.Socket[bytes], lane: Lane, address: Address, handshake_s: float) -> None:
    """What both ends of a lane have in common; before `bind` or `connect`."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_NBYTES[lane])
    socket.setsockopt(zmq.SNDHWM, _HWM[lane])
    socket.setsockopt(zmq.RCVHWM, _HWM[lane])
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(handshake_s * 1000))
    if ":" in address.host:
        socket.setsockopt(zmq.IPV6, 1)


_MONITOR_EVENT: Final = struct.Struct("=HI")
_HANDSHAKE_FAILURES: Final = {
    2048: "handshake failed",  # HANDSHAKE_FAILED_NO_DETAIL
    8192: "handshake failed: not our protocol, or not our keys",  # HANDSHAKE_FAILED_PROTOCOL
    16384: "handshake failed: not admitted",  # HANDSHAKE_FAILED_AUTH
}


class ZmqListeningLane(ZmqLane, ListeningLane):
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
            _apply_options(socket, lane, address, handshake_s)
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

    def close(self) -> None:
        if not self.closed:
            self._loop.remove_reader(self._monitor_fd)
            self._close_monitor(self._socket)
        super().close()

    def _close_monitor(self, socket: zmq.Socket[bytes]) -> None:
        if self._monitor is not None:
            socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None

    def _observe(self) -> None:
        try:
            while self._monitor is not None:
                try:
                    event, _value = _MONITOR_EVENT.unpack(self._monitor.recv_multipart(zmq.DONTWAIT)[0])
                except zmq.Again:
                    return
                self._owner.lane_refused(self, _HANDSHAKE_FAILURES[event])
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
    socket.monitor(address, sum(_HANDSHAKE_FAILURES))
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


_UP: Final = 4096  # HANDSHAKE_SUCCEEDED; CONNECTED proves nothing: a stopped process's kernel accepts too
_LOST: Final = {
    128: "connection refused",  # CLOSED
    512: "connection lost",  # DISCONNECTED
} | _HANDSHAKE_FAILURES
_MASK: Final = _UP | sum(_LOST)


class ZmqDialledLane(ZmqLane, DialledLane):
    """One lane of the dialled session `session`; read from the start."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        lane: Lane,
        address: Address,
        session: SessionId,
        handshake_s: float,
        owner: LaneOwner,
        curve: tuple[KeyPair, str] | None = None,
    ) -> None:
        """Begins to connect to a numeric address. Raises `zmq.ZMQError` (out of descriptors)."""
        self.address = address
        self.is_up = False
        self.session = session
        self._monitor: zmq.Socket[bytes] | None = None
        socket = context.socket(zmq.DEALER)
        registered = False
        try:
            _apply_options(socket, lane, address, handshake_s)
            if curve is not None:
                apply_dialler(socket, *curve)
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            socket.setsockopt(zmq.ROUTING_ID, routing_id_of(session))
            monitor = self._monitor = socket.get_monitor_socket(_MASK)
            monitor.setsockopt(zmq.LINGER, 0)
            self._monitor_fd = monitor.fileno()
            super().__init__(socket, lane, owner)
            registered = True
            self.start_reading()
            self._loop.add_reader(self._monitor_fd, self._observe)
            socket.connect(str(address))
            # Connecting the monitor may have swallowed its descriptor's edge: it only wakes for new
            # events once it was drained to the end.
            self._loop.call_soon(self._observe)
        except BaseException:
            if registered:
                self.close()
            else:
                self._close_monitor(socket)
                socket.close(0)
            raise

    def send(self, routing_id: bytes, frame: bytes) -> SendResult:
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return SendResult.FULL
        return SendResult.SENT

    def close(self) -> None:
        if self.closed:
            return
        # Readers first, then the monitor, then the socket: a monitor left open makes term() hang.
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor_fd)
            self._close_monitor(self._socket)
        super().close()

    def _close_monitor(self, socket: zmq.Socket[bytes]) -> None:
        if self._monitor is not None:
            socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None

    def _observe(self) -> None:
        try:
            reason = self._read_monitor()
            if reason and not self.closed:
                self.read_all()  # what had arrived before the loss; it may end the session by itself
                if not self.closed:
                    self._owner.lane_lost(self, reason)
        except Exception as error:
            self._owner.lane_failed(error)

    def _read_monitor(self) -> str:
        """Drain the monitor (an unread one stops the whole context), up to a loss; why, or nothing."""
        while self._monitor is not None:
            try:
                event, _value = _MONITOR_EVENT.unpack(self._monitor.recv_multipart(zmq.DONTWAIT)[0])
            except zmq.Again:
                break
            if event == _UP:
                self.is_up = True
                self._owner.lane_connected(self)
            elif event in _LOST:
                return _LOST[event]
        return ""


class ZmqTransport(Transport):
    """A context of our own, for one endpoint."""

    def __init__(
        self,
        max_peers: int,
        handshake_s: float,
        security: Security | None,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Raises `ConfigError` if `max_peers` needs more open files than there may be."""
        self._context = open_context(max_peers)
        self._handshake_s = handshake_s
        self._keys = None if security is None else security.keys
        # Before any listener is bound: those who came earlier would all be refused.
        self._authenticator = (
            None if security is None else Authenticator(self._context, security.peers, on_error)
        )

    def listen(self, lane: Lane, address: Address, owner: LaneOwner) -> ListeningLane:
        return ZmqListeningLane(self._context, lane, address, self._handshake_s, owner, self._keys)

    def dial(
        self, lane: Lane, address: Address, session: SessionId, peer_key: str, owner: LaneOwner
    ) -> DialledLane:
        curve = None if self._keys is None else (self._keys, peer_key)
        try:
            return ZmqDialledLane(self._context, lane, address, session, self._handshake_s, owner, curve)
        except zmq.ZMQError as error:
            raise PeerUnreachable(str(error), address=str(address)) from error

    async def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.close()
        # Waits for its I/O thread; safe in another thread, as all sockets are closed. One left makes it hang.
        await asyncio.to_thread(self._context.term)
