"""The node's endpoint: all sessions of one incarnation over ZeroMQ, both as listener and as dialler.

IO only; what is decided is decided in `epd.protocol.session`. One loop, one thread: every method
is for the loop's thread, callbacks come in it. Whatever one turn of the loop has for one peer leaves
as one frame at the end of the turn; sockets are then read once, because a send may have swallowed
the wake-up of what arrived.
"""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any, Final, assert_never

import msgspec

from epd.protocol import session as machine
from epd.protocol.errors import MAX_MESSAGE_CHARS, Busy, ConfigError, Draining, SessionRejected
from epd.protocol.ids import NodeId, SessionId
from epd.protocol.machine import Ignored, State
from epd.protocol.messages import ControlMessage, Goodbye, Hello, MediaMessage, Rejected, Welcome
from epd.protocol.rates import RateLimits
from epd.protocol.session import (
    BodyMalformed,
    CloseSockets,
    CloseWanted,
    ConnectionLost,
    Dialled,
    DialMedia,
    FrameSent,
    HelloReceived,
    MediaConnected,
    ProbeWanted,
    Replaced,
    SendEmptyMedia,
    SendHeartbeat,
    SendRejected,
    SendWelcome,
    SessionLimits,
    TellEnded,
    TellOpened,
    TellSuspect,
    WelcomeReceived,
)
from epd.protocol.wire import Lane
from epd.runtime.addresses import Address, parse_address, resolve_to_bind
from epd.runtime.clock import Clock
from epd.runtime.dialler import Dialler
from epd.runtime.flusher import Flusher, Probe
from epd.runtime.intake import Intake
from epd.runtime.keys import Security
from epd.runtime.lanes import LaneSocket, ListeningLane, OpenTransport, routing_id_of
from epd.runtime.machines import MachineTable, Observe, StepRecorder
from epd.runtime.outbox import last_word
from epd.runtime.peers import PeerInfo, Session, SessionHandler, peer_info
from epd.runtime.timers import Timers
from epd.runtime.zmq_lanes import ZmqTransport

__all__ = ["Endpoint", "PeerInfo", "SessionHandler"]

EARLY_MESSAGES: Final = 16
"""So many messages for one peer leave at once: a busy turn of the loop and its peer's then overlap."""
CLOSE_LINGER_S: Final = 1.0
"""A dialler that ends a session waits this long for the listener to answer that it has read everything."""
DEFAULT_RATES: Final = RateLimits()
_FULL: Final = "the peer does not read: its queue is full"


class Endpoint:
    """All sessions of one node.

    `hello` gives our `Hello` of now; it is asked for each session. `on_error` gets what a handler
    raised (a supervisor's `fail`); without one it goes to the loop's exception handler.
    """

    def __init__(
        self,
        *,
        hello: Callable[[], Hello],
        limits: SessionLimits,
        clock: Clock,
        timers: Timers,
        recorder: StepRecorder | None,
        handler: SessionHandler,
        max_peers: int = 256,
        on_error: Callable[[Exception], None] | None = None,
        security: Security | None = None,
        rates: RateLimits = DEFAULT_RATES,
        open_transport: OpenTransport = ZmqTransport,
        randbits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """`randbits(n)` gives n unpredictable bits: a session's id must not be guessed or repeated.

        Raises `ConfigError` if `max_peers` needs more open files than there may be."""
        self.on_error = on_error
        self._hello = hello
        self._limits = limits
        self._clock = clock
        self._timers = timers
        self._handler = handler
        self._max_peers = max_peers
        self._randbits = randbits
        self._loop = asyncio.get_running_loop()
        self._security = security
        self._transport = open_transport(max_peers, limits.connect_s, security, self.lane_failed)
        self._table = MachineTable("session", machine, limits, clock, timers, recorder, self._perform)
        self._sessions: dict[SessionId, Session] = {}
        self._dials = 0
        self._listening: dict[Lane, ListeningLane] = {}
        self._flusher = Flusher(clock, timers, self._lose, self._tell_writable, self.lane_failed)
        self._dialler = Dialler(self._transport, self, self._table.feed, self._flusher.later)
        self._intake = Intake(
            self._table,
            self._sessions,
            handler,
            self._greet,
            self._welcome,
            self._answer,
            self._flusher.later,
            clock,
            rates,
        )
        self._probes = {lane: Probe(clock, timers, partial(self._probe, lane)) for lane in Lane}
        self._media_address = ""
        self._draining = False
        self._closing: asyncio.Future[None] | None = None
        self._linger_s = CLOSE_LINGER_S
        self._session_gone = asyncio.Event()

    # -- for the node ------------------------------------------------------------------------

    @property
    def recorder(self) -> StepRecorder | None:
        """Takes every step of every session; set it before the first one."""
        return self._table.recorder

    @recorder.setter
    def recorder(self, recorder: StepRecorder | None) -> None:
        self._table.recorder = recorder

    def live(self) -> Iterator[tuple[str, Hashable, State]]:
        """Kind, key and state of every session that has one."""
        return self._table.live()

    def observe(self, observers: tuple[Observe, ...]) -> None:
        """They see every step of every session from now on."""
        self._table.observers = observers

    @property
    def rejected_frames(self) -> Mapping[str, int]:
        """Frames that were dropped, by reason."""
        return self._intake.rejected

    @property
    def ignored(self) -> Counter[tuple[str, str, str]]:
        """Events that changed nothing, by kind, state and event."""
        return self._table.ignored

    def bind(self, control: str, media: str | None = None, *, accept: bool = True) -> str:
        """Listen on both lanes; returns the control lane's `tcp://HOST:PORT` as bound.

        Without `media` that lane gets a port of the system's choice on the same host. Resolves
        names, blocking: for the start of a node. Unless `accept`, peers wait until `accept()`.
        Raises `ConfigError`.
        """
        wanted = resolve_to_bind(parse_address(control, key="listen", to_bind=True))
        self._listening[Lane.CONTROL] = self._listen(Lane.CONTROL, wanted)
        try:
            if media is None:
                media_wanted = Address(wanted.host, 0)
            else:
                parsed = parse_address(media, key="media_listen", to_bind=True)
                media_wanted = resolve_to_bind(parsed, key="media_listen")
            self._listening[Lane.MEDIA] = self._listen(Lane.MEDIA, media_wanted)
        except BaseException:
            self._listening.pop(Lane.CONTROL).close()
            raise
        self._media_address = str(self._listening[Lane.MEDIA].address)
        if accept:
            self.accept()
        return str(self._listening[Lane.CONTROL].address)

    def accept(self) -> None:
        """Begin to read what was bound."""
        for lane in self._listening.values():
            lane.start_reading()

    def dial(self, address: str) -> SessionId:
        """Begin a session with the node that listens there; the handler is told how it went.

        Raises `ConfigError` for a malformed address or one that has no key, `Busy` at `max_peers` or
        when closing.
        """
        parsed = parse_address(address, key="address")
        key = "" if self._security is None else self._security.peers.key_at(address)
        if key is None:
            raise ConfigError(f"security.peers: no key for {address}", key="security.peers", given=address)
        if self._closing is not None or len(self._sessions) >= self._max_peers:
            raise Busy(f"{len(self._sessions)} sessions, at most {self._max_peers}", address=address)
        session = Session(SessionId(self._randbits(64)), address, self._sent)
        session.key = key
        self._sessions[session.id] = session
        self._table.feed(session.id, Dialled(address))
        self._dials += 1
        session.outbox.add(msgspec.structs.replace(self._hello(), dial=self._dials))
        self._dialler.dial(session, Lane.CONTROL, parsed)
        return session.id

    def send(self, session: SessionId, message: ControlMessage) -> bool:
        """Queue a message for the end of this turn; False if the session is not open.

        A peer that lets its queue fill up loses its session. Raises `Malformed` for a message that
        no frame can hold.
        """
        known = self._sessions.get(session)
        if known is None or not known.is_open:
            return False
        if not known.outbox.add(message):
            self._timers.at(self._clock.now_s(), partial(self.close, session, Busy.code, _FULL))
            return False
        self._flusher.later(known)
        if known.outbox.messages % EARLY_MESSAGES == 0:
            self._flusher.early(known)
        return True

    def send_media(self, session: SessionId, message: MediaMessage) -> bool:
        """Queue one chunk; False if the session is not open, or the queue is full.

        After a full queue `media_writable` is called when there is room. Raises `Malformed` for a
        chunk that is too large.
        """
        known = self._sessions.get(session)
        if known is None or not known.is_open or not known.outbox.add_media(message):
            return False
        self._flusher.later(known)
        return True

    def close(self, session: SessionId, code: str, reason: str) -> None:
        """End a session after what was sent in it; the peer and the handler are told `code`, `reason`."""
        if session in self._sessions:
            self._table.feed(session, CloseWanted(code, reason[:MAX_MESSAGE_CHARS]))

    def goodbye(self, reason: str) -> None:
        """Tell all peers that no new work is taken; new sessions are refused. Sessions go on."""
        self._draining = True
        for session in list(self._sessions):
            self.send(session, Goodbye(reason[:MAX_MESSAGE_CHARS]))

    async def close_all(self, linger_s: float) -> None:
        """End every session in order, then every socket. Idempotent.

        The listeners of sessions that we dialled have `linger_s` to read what was sent, and the diallers
        of those that were accepted to close.
        """
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = self._loop.create_future()
        self._linger_s = linger_s
        self._draining = True
        try:
            for session in list(self._sessions):
                self._table.feed(session, CloseWanted(Draining.code, "the node is stopping"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(linger_s):
                    while self._sessions:
                        self._session_gone.clear()
                        await self._session_gone.wait()
        finally:
            self._close_sockets()
            try:
                await asyncio.shield(self._transport.close())
            finally:
                self._closing.set_result(None)

    def peers(self) -> Mapping[SessionId, PeerInfo]:
        """Sessions in force; may be asked from any thread."""
        return {s.id: s.peer for s in list(self._sessions.values()) if s.is_open and s.peer is not None}

    def counts(self) -> dict[str, int]:
        """What is held (`sessions`, of them `closing`, `sockets`, `queued_messages`, `queued_chunks`), and,
        as `rejected_frames.REASON`, what was dropped so far."""
        outboxes = [session.outbox for session in self._sessions.values()]
        counts = {
            "sessions": len(self._sessions),
            "closing": sum(session.over for session in self._sessions.values()),
            "sockets": len(self._listening) + len(self._dialler.lanes),
            "queued_messages": sum(outbox.messages for outbox in outboxes),
            "queued_chunks": sum(outbox.media_messages for outbox in outboxes),
        }
        return counts | {f"rejected_frames.{reason}": n for reason, n in self._intake.rejected.items()}

    # -- sessions ----------------------------------------------------------------------------

    def _greet(self, session_id: SessionId, hello: Hello, key: str) -> bool:
        """A stranger's `Hello`: the node's older sessions end first, whatever comes of this one.

        False, and nothing ends, if it was overtaken by the `Hello` of a session that is in force.
        """
        refusal = self._refusal(key, hello)
        if refusal:
            self._intake.rejected["forged_hello"] += 1
            self._answer(session_id, Rejected(SessionRejected.code, refusal))
            return True
        theirs = [session for session in self._sessions.values() if session.key == key]
        if any(session.is_open and session.overtook(hello) for session in theirs):
            return False
        self._end_older(hello.node, key)
        room = len(self._sessions) < self._max_peers
        session = Session(session_id, "", self._sent)
        session.control = self._listening[Lane.CONTROL]
        session.media = self._listening[Lane.MEDIA]
        session.greeting = hello
        session.key = key
        self._sessions[session_id] = session
        self._table.feed(session_id, HelloReceived(self._hello(), hello, room, self._draining))
        if session.peer is None:
            del self._sessions[session_id]
            self._flusher.forget(session)
            session.close()
        return True

    def _refusal(self, key: str, word: Hello | Welcome) -> str:
        """Why whoever holds this key may not say this of itself; empty: it may."""
        if self._security is None:
            return ""
        return self._security.peers.refusal(key, word.role, word.node)[:MAX_MESSAGE_CHARS]

    def _welcome(self, session: Session, welcome: Welcome) -> None:
        refusal = self._refusal(session.key, welcome)
        if refusal:
            self._intake.rejected["forged_hello"] += 1
            self._table.feed(session.id, CloseWanted(SessionRejected.code, refusal))
            return
        self._end_older(welcome.node, session.key)
        session.greeting = welcome
        self._table.feed(session.id, WelcomeReceived(self._hello(), welcome))

    def _end_older(self, node: NodeId, key: str) -> None:
        peers = [(s.id, s.peer) for s in self._sessions.values() if s.is_open and s.key == key]
        for session, peer in peers:
            if peer is not None and peer.node == node:
                self._table.feed(session, Replaced())

    def _answer(self, session: SessionId, rejected: Rejected) -> None:
        """To somebody without a session; sent or not, nothing more comes of it."""
        lane = self._listening.get(Lane.CONTROL)
        if lane is not None:
            lane.send(routing_id_of(session), last_word(session, rejected))

    def _sent(self, session: SessionId, lane: Lane, sequence: int, nbytes: int) -> None:
        self._table.feed(session, FrameSent(lane, sequence, nbytes))

    def _lose(self, session: Session, lane: Lane) -> None:
        self._table.feed(session.id, ConnectionLost(lane, "connection lost"))

    def _tell_writable(self, session: Session) -> None:
        if session.is_open:
            self._handler.media_writable(session.id)

    def _probe(self, lane: Lane) -> None:
        """`EHOSTUNREACH` names those whose connection was lost; a waiting descriptor does not."""
        accepted = [s.id for s in self._sessions.values() if not s.dialled]
        for session in accepted:
            self._table.feed(session, ProbeWanted(lane))

    def _perform(self, session_id: SessionId, effects: tuple[Any, ...]) -> None:
        session = self._sessions.get(session_id)
        for effect in effects:
            if session is not None:
                self._perform_one(session, effect)
            elif isinstance(effect, SendRejected):
                self._answer(session_id, Rejected(effect.code, effect.reason))

    def _perform_one(self, session: Session, effect: machine.AnyEffect) -> None:
        match effect:
            case SendHeartbeat():
                self._queue(session, self._handler.load())
            case SendEmptyMedia():
                session.outbox.add_empty_media()
                self._flusher.later(session)
            case SendWelcome():
                self._queue(session, self._our_welcome())
            case SendRejected(code, reason):
                session.outbox.add_last_word(Rejected(code, reason))
                self._flusher.now(session)
            case DialMedia(address):
                self._dial_media(session, address)
            case TellOpened():
                assert session.greeting is not None
                session.peer = peer_info(session.greeting, session.address)
                session.is_open = True
                self._handler.session_opened(session.id, session.peer)
            case TellSuspect(suspect):
                if session.peer is not None:
                    session.peer.suspect = suspect
                self._handler.session_suspect(session.id, suspect)
            case CloseSockets(linger):
                if linger and session.dialled:
                    self._linger(session)
                else:
                    self._release(session)
            case TellEnded(code, reason):
                session.is_open = False
                session.over = True
                self._handler.session_ended(session.id, session.peer, code, reason)
            case Ignored():
                pass
            case _ as never:
                assert_never(never)

    def _queue(self, session: Session, message: ControlMessage) -> None:
        if session.outbox.add(message):
            self._flusher.later(session)
        else:
            self._table.feed(session.id, CloseWanted(Busy.code, _FULL))

    def _our_welcome(self) -> Welcome:
        """Our `Hello`, and where the media lane is."""
        ours = msgspec.structs.asdict(self._hello())
        del ours["dial"]
        return Welcome(**ours, media_address=self._media_address)

    # -- lanes -------------------------------------------------------------------------------

    def lane_received(self, lane: LaneSocket, parts: list[Any]) -> None:
        """Called by a lane."""
        session = self._dialler.lanes.get(lane)
        if session is None:
            self._intake.take_accepted(lane.lane, parts)
        elif session.over:
            if self._intake.is_last_word(session, lane.lane, parts):
                self._release(session)
        else:
            self._intake.take_dialled(session, lane.lane, parts)

    def lane_woken(self, lane: LaneSocket, count: int) -> None:
        """Called by a lane. A listening one that wakes for nothing has lost a connection, perhaps."""
        self._flusher.woken(lane)
        if count == 0 and lane not in self._dialler.lanes:
            self._probes[lane.lane].soon(len(self._sessions))

    def lane_connected(self, lane: LaneSocket) -> None:
        """Called by a lane."""
        session = self._dialler.lanes[lane]
        if lane.lane is Lane.MEDIA:
            self._table.feed(session.id, MediaConnected())
        self._flusher.later(session)

    def lane_lost(self, lane: LaneSocket, reason: str) -> None:
        """Called by a lane."""
        session = self._dialler.lanes[lane]
        if not session.over:
            self._dialler.lost(lane, reason)
        elif lane.lane is Lane.CONTROL:
            self._release(session)

    def lane_refused(self, lane: LaneSocket, reason: str) -> None:
        """Called by a listening lane: a stranger without our protocol, or without keys that fit."""
        self._intake.rejected["handshake"] += 1

    def lane_failed(self, error: Exception) -> None:
        """Called by a lane, for what a handler raised."""
        if self.on_error is not None:
            self.on_error(error)
            return
        context = {"message": "a handler of the endpoint raised", "exception": error}
        self._loop.call_exception_handler(context)

    def _listen(self, lane: Lane, address: Address) -> ListeningLane:
        return self._transport.listen(lane, address, self)

    def _dial_media(self, session: Session, text: str) -> None:
        try:
            address = parse_address(text, key="media_address")
        except ConfigError as error:
            self._table.feed(session.id, BodyMalformed(error.message))
            return
        self._dialler.dial(session, Lane.MEDIA, address)

    def _linger(self, session: Session) -> None:
        """Send what is queued and read on until the listener has answered the last word, or is gone.

        Closed before that, with anything unread, the kernel resets the connection, and the listener
        loses what it had not read yet.
        """
        session.stop_dialling()
        session.linger = self._timers.after(self._linger_s, partial(self._release, session))

    def _release(self, session: Session) -> None:
        """Let go of everything that is the session's; the listening lanes are not."""
        del self._sessions[session.id]
        self._flusher.forget(session)
        self._dialler.release(session)
        session.close()
        self._session_gone.set()

    def _close_sockets(self) -> None:
        """Every one; closing the transport hangs if one is left."""
        self._table.close()
        for session in list(self._sessions.values()):
            self._release(session)
        self._dialler.close()
        for listening in self._listening.values():
            listening.close()
        self._listening.clear()
        self._flusher.close()
        for probe in self._probes.values():
            probe.close()
