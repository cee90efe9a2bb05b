"""Dialled lanes: for each one DEALER with a monitor, for one attempt to connect, never used again.

A DEALER that reconnects hands what was meant for a dead process to its successor on the same port,
so `RECONNECT_IVL` is -1 and `IMMEDIATE` set: refused or lost is for good. The first decisive event
of the monitor settles the attempt; after that `DISCONNECTED` is the loss, about 1 ms after it.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

from epd.protocol.errors import PeerUnreachable
from epd.protocol.ids import SessionId
from epd.protocol.machine import Event
from epd.protocol.session import ConnectionLost
from epd.protocol.wire import Lane
from epd.runtime.addresses import Address, is_wildcard, resolve
from epd.runtime.curve import apply_dialler
from epd.runtime.keys import KeyPair, Security
from epd.runtime.lanes import (
    HANDSHAKE_FAILURES,
    MONITOR_EVENT,
    LaneOwner,
    LaneSocket,
    SendResult,
    apply_options,
    routing_id_of,
)
from epd.runtime.peers import Session

_UP: Final = 4096  # HANDSHAKE_SUCCEEDED; CONNECTED proves nothing: a stopped process's kernel accepts too
_LOST: Final = {
    128: "connection refused",  # CLOSED
    512: "connection lost",  # DISCONNECTED
} | HANDSHAKE_FAILURES
_MASK: Final = _UP | sum(_LOST)


class DialledLane(LaneSocket):
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
            apply_options(socket, lane, address, handshake_s)
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

    def close(self, linger_s: float = 0.0) -> None:
        if self.closed:
            return
        # Readers first, then the monitor, then the socket: a monitor left open makes term() hang.
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor_fd)
            self._close_monitor(self._socket)
        super().close(linger_s if self.is_up else 0.0)

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
                event, _value = MONITOR_EVENT.unpack(self._monitor.recv_multipart(zmq.DONTWAIT)[0])
            except zmq.Again:
                break
            if event == _UP:
                self.is_up = True
                self._owner.lane_connected(self)
            elif event in _LOST:
                return _LOST[event]
        return ""


class Dialler:
    """Connects sessions' lanes; `lanes` are those it has made and not let go of.

    `feed(session, event)` is told of what failed, `flush(session)` that there is a socket to send on.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        handshake_s: float,
        owner: LaneOwner,
        feed: Callable[[SessionId, Event], None],
        flush: Callable[[Session], None],
        security: Security | None = None,
    ) -> None:
        self.lanes: dict[LaneSocket, Session] = {}
        self._context = context
        self._handshake_s = handshake_s
        self._owner = owner
        self._feed = feed
        self._flush = flush
        self._security = security

    def dial(self, session: Session, lane: Lane, address: Address) -> None:
        """Resolve, then try one number after the other; `release` ends it.

        A media lane on every interface is dialled where the control lane was.
        """
        control = self._own(session.control)
        if lane is Lane.MEDIA and control is not None and is_wildcard(address.host):
            address = Address(control.address.host, address.port)
        session.task = asyncio.get_running_loop().create_task(self._connect(session, lane, address))

    def lost(self, lane: LaneSocket, reason: str) -> None:
        """A lane of ours was refused or lost: on to the next address, if it had never come up."""
        session, dialled = self.lanes[lane], self._own(lane)
        assert dialled is not None
        if not dialled.is_up and session.candidates:
            self._drop(dialled, 0.0)
            self._connect_next(session, lane.lane)
        else:
            self._feed(session.id, ConnectionLost(lane.lane, f"{dialled.address}: {reason}"))

    def release(self, session: Session, linger_s: float) -> None:
        """Close the session's own sockets; what was sent still goes out within `linger_s`."""
        for lane in (session.control, session.media):
            dialled = self._own(lane)
            if dialled is not None:
                self._drop(dialled, linger_s)

    def close(self) -> None:
        """Close every socket."""
        for lane in list(self.lanes):
            self._drop(lane, 0.0)

    async def _connect(self, session: Session, lane: Lane, address: Address) -> None:
        try:
            session.candidates = await resolve(address)
            self._connect_next(session, lane)
        except PeerUnreachable as error:
            self._feed(session.id, ConnectionLost(lane, error.message))
        except Exception as error:  # any bug of a handler ends the incarnation
            self._owner.lane_failed(error)

    def _connect_next(self, session: Session, lane: Lane) -> None:
        address = session.candidates.pop(0)
        try:
            curve = None if self._security is None else (self._security.keys, session.key)
            dialled = DialledLane(
                self._context, lane, address, session.id, self._handshake_s, self._owner, curve
            )
        except zmq.ZMQError as error:
            self._feed(session.id, ConnectionLost(lane, f"{address}: {error}"))
            return
        self.lanes[dialled] = session
        if lane is Lane.CONTROL:
            session.control = dialled
        else:
            session.media = dialled
        self._flush(session)

    def _own(self, lane: LaneSocket | None) -> DialledLane | None:
        """A lane that was dialled; a listening one is nobody's to close."""
        return lane if isinstance(lane, DialledLane) else None

    def _drop(self, lane: LaneSocket, linger_s: float) -> None:
        self.lanes.pop(lane, None)
        lane.close(linger_s)
