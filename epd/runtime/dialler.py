"""Connects the lanes of the sessions that we dial: one address after the other, each once."""

import asyncio
from collections.abc import Callable

from epd.protocol.errors import PeerUnreachable
from epd.protocol.ids import SessionId
from epd.protocol.machine import Event
from epd.protocol.session import ConnectionLost
from epd.protocol.wire import Lane
from epd.runtime.addresses import Address, is_wildcard, resolve
from epd.runtime.lanes import DialledLane, LaneOwner, LaneSocket, Transport
from epd.runtime.peers import Session


class Dialler:
    """Connects sessions' lanes; `lanes` are those it has made and not let go of.

    `feed(session, event)` is told of what failed, `flush(session)` that there is a socket to send on.
    """

    def __init__(
        self,
        transport: Transport,
        owner: LaneOwner,
        feed: Callable[[SessionId, Event], None],
        flush: Callable[[Session], None],
    ) -> None:
        self.lanes: dict[LaneSocket, Session] = {}
        self._transport = transport
        self._owner = owner
        self._feed = feed
        self._flush = flush

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
            self._drop(dialled)
            self._connect_next(session, lane.lane)
        else:
            self._feed(session.id, ConnectionLost(lane.lane, f"{dialled.address}: {reason}"))

    def release(self, session: Session) -> None:
        """Close the session's own sockets."""
        for lane in (session.control, session.media):
            dialled = self._own(lane)
            if dialled is not None:
                self._drop(dialled)

    def close(self) -> None:
        """Close every socket."""
        for lane in list(self.lanes):
            self._drop(lane)

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
            dialled = self._transport.dial(lane, address, session.id, session.key, self._owner)
        except PeerUnreachable as error:
            self._feed(session.id, ConnectionLost(lane, f"{address}: {error.message}"))
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

    def _drop(self, lane: LaneSocket) -> None:
        self.lanes.pop(lane, None)
        lane.close()
