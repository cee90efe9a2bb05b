"""From ZeroMQ messages to events and messages of sessions: what is whose is decided here (I8).

The order of the checks: parts, header, whose it is, how much of it, sequence; only then the body.
What is nobody's is dropped and counted by reason; it never ends a session.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import zmq

from epd.protocol.errors import MAX_MESSAGE_CHARS, Malformed, SessionLost, SessionRejected, TooFast
from epd.protocol.ids import SessionId
from epd.protocol.messages import AnyMessage, Goodbye, Heartbeat, Hello, Rejected, Welcome
from epd.protocol.rates import RateLimits, charge
from epd.protocol.session import (
    OUTSIDE,
    SESSION_OVER,
    BodyMalformed,
    CloseWanted,
    FrameReceived,
    RejectedReceived,
)
from epd.protocol.wire import HEADER_NBYTES, Frame, Lane, decode_body, open_frame
from epd.runtime.clock import Clock
from epd.runtime.curve import peer_key
from epd.runtime.lanes import routing_id_of
from epd.runtime.machines import MachineTable
from epd.runtime.peers import Session, SessionHandler

_INSIDE: Final = frozenset({Hello, Welcome, Rejected, Heartbeat})
"""Messages that no handler sees."""


class Intake:
    """How frames become events.

    `greet(session, hello, key)` makes a session of a stranger's `Hello`, or says that it came too late;
    `welcome(session, welcome)` opens one of ours; `answer(session, rejected)` answers on a listener's
    control lane; `media_ready(session)`: the dialler's media lane has come, what is queued may go.
    """

    def __init__(
        self,
        table: MachineTable,
        sessions: Mapping[SessionId, Session],
        handler: SessionHandler,
        greet: Callable[[SessionId, Hello, str], bool],
        welcome: Callable[[Session, Welcome], None],
        answer: Callable[[SessionId, Rejected], None],
        media_ready: Callable[[Session], None],
        clock: Clock,
        rates: RateLimits,
    ) -> None:
        self.rejected: Counter[str] = Counter()
        self._table = table
        self._sessions = sessions
        self._handler = handler
        self._greet = greet
        self._welcome = welcome
        self._answer = answer
        self._media_ready = media_ready
        self._clock = clock
        self._rates = rates

    def take_accepted(self, lane: Lane, parts: list[Any]) -> None:
        """A message that came in at a listening lane: the routing id, and what should be one frame."""
        if len(parts) != 2:
            self.rejected["parts"] += 1
            return
        routing_id = bytes(parts[0])
        try:
            frame = open_frame(_data(parts[1]), lane)
        except Malformed as error:
            self._count(error)
            # Whoever speaks another version is told so; other strangers get no answer.
            if error.facts["reason"] == "version" and len(routing_id) == 8:
                session = SessionId(int.from_bytes(routing_id, "little"))
                if session not in self._sessions:
                    self._answer(session, Rejected(SessionRejected.code, error.message))
            return
        known = self._sessions.get(frame.session)
        key = peer_key(parts[1])
        if routing_id != routing_id_of(frame.session) or (
            known is not None and (known.dialled or known.key != key)
        ):
            self.rejected["stranger"] += 1
        elif known is None:
            self._take_unknown(frame, key)
        else:
            self._take(known, frame)

    def take_dialled(self, session: Session, lane: Lane, parts: list[Any]) -> None:
        """A message that came in at a lane of a session that we dialled."""
        if len(parts) != 1:
            self.rejected["parts"] += 1
            return
        try:
            frame = open_frame(_data(parts[0]), lane)
        except Malformed as error:
            self._count(error)
            if error.facts["reason"] == "version":
                self._table.feed(session.id, RejectedReceived(SessionRejected.code, error.message))
            return
        if frame.session != session.id:
            self.rejected["stranger"] += 1
            return
        self._take(session, frame)

    def is_last_word(self, session: Session, lane: Lane, parts: list[Any]) -> bool:
        """Whether the listener says that it has ended a session of ours, too; all else of it is discarded."""
        try:
            frame = open_frame(_data(parts[0]), lane)
        except Malformed:
            return False
        return frame.session == session.id and frame.sequence == OUTSIDE

    def _take_unknown(self, frame: Frame, key: str) -> None:
        if frame.lane is Lane.CONTROL and frame.sequence == 0:
            try:
                messages = decode_body(frame)
            except Malformed as error:
                self._count(error)
                return
            greeting = messages[0] if len(messages) == 1 else None
            if isinstance(greeting, Hello) and self._greet(frame.session, greeting, key):
                return
        self.rejected["session_over"] += 1
        if frame.sequence != OUTSIDE:  # the last word of a session is not answered
            self._table.feed(frame.session, _received(frame))

    def _take(self, session: Session, frame: Frame) -> None:
        session.meter, excess = charge(session.meter, frame, self._clock.now_s(), self._rates)
        if excess:
            self.rejected[TooFast.code] += 1
            if not session.over:
                self._table.feed(session.id, CloseWanted(TooFast.code, excess))
            return
        if frame.sequence == OUTSIDE:
            self._take_last_word(session, frame)
            return
        self._table.feed(session.id, _received(frame))
        if session.over:  # by this very frame, or Ending
            return
        messages = self._decode(session, frame)
        if messages is None:
            return
        if frame.lane is Lane.MEDIA and not session.media_ready:
            session.media_ready = True
            self._media_ready(session)
        if not session.is_open:
            if not messages or not isinstance(messages[0], Welcome):
                self._refuse(session, "the first frame is no Welcome")
                return
            self._welcome(session, messages[0])
            messages = messages[1:]
        if messages and session.is_open:
            self._deliver(session, messages)

    def _take_last_word(self, session: Session, frame: Frame) -> None:
        messages = self._decode(session, frame)
        if messages is None:
            return
        if len(messages) == 1 and isinstance(messages[0], Rejected):
            code, reason = messages[0].code, messages[0].reason[:MAX_MESSAGE_CHARS]
            self._table.feed(session.id, RejectedReceived(code, reason))
            if not session.dialled:  # a dialler reads on until it hears that all it sent was read
                self._answer(session.id, Rejected(SessionLost.code, SESSION_OVER))
        else:
            self._refuse(session, "a frame outside the sequence that is no Rejected")

    def _decode(self, session: Session, frame: Frame) -> list[AnyMessage] | None:
        try:
            messages = list(decode_body(frame))
        except Malformed as error:
            self._refuse(session, error.message)
            return None
        if frame.lane is Lane.MEDIA and len(messages) > 1:
            self._refuse(session, f"{len(messages)} messages in a media frame")
            return None
        return messages

    def _deliver(self, session: Session, messages: list[AnyMessage]) -> None:
        peer = session.peer
        inside = False
        for message in messages:
            kind = type(message)
            if kind in _INSIDE:
                if not isinstance(message, Heartbeat):
                    self._refuse(session, f"{kind.__name__} in an open session")
                    return
                inside = True
                if peer is not None:
                    peer.heartbeat = message
            elif kind is Goodbye and peer is not None:
                peer.draining = True
        if inside:
            messages = [message for message in messages if type(message) not in _INSIDE]
        if messages:
            self._handler.messages(session.id, messages)

    def _refuse(self, session: Session, reason: str) -> None:
        self.rejected["body"] += 1
        self._table.feed(session.id, BodyMalformed(reason[:MAX_MESSAGE_CHARS]))

    def _count(self, error: Malformed) -> None:
        self.rejected[error.facts["reason"]] += 1


def _data(part: Any) -> bytes | memoryview:
    """The bytes of a part; of a media frame a view that keeps ZeroMQ's memory alive."""
    if isinstance(part, zmq.Frame):
        view: memoryview = part.buffer
        return view
    data: bytes = part
    return data


def _received(frame: Frame) -> FrameReceived:
    return FrameReceived(frame.lane, frame.sequence, HEADER_NBYTES + len(frame.body))
