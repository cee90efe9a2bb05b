"""Two nodes and their sessions as the checker sees them: what the session machines make of a bad wire.

The wire drops, repeats and reorders frames, of all sessions at once, and loses connections. What a node
acts on must be what its peer sent in that session, in order, once (I8): this is the ordered channel on
which `world.py` explores the rest. Messages are numbers, from 1 in each session and direction.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from epd.check.invariants import PrefillView, View, Violation, first_violation
from epd.check.machines import Machines, Patch, Table, shipped
from epd.check.moves import GIVE_UP, TURN, WORK, Move
from epd.check.setup import Setup
from epd.protocol import session as s
from epd.protocol.ids import Incarnation, NodeId
from epd.protocol.machine import Effect, TimerExpired
from epd.protocol.messages import Hello, PeerLimits, Welcome
from epd.protocol.wire import Lane

DIALLER: Final = 0
LISTENER: Final = 1
MESSAGES: Final = 2
"""The dialler sends so many in a session, the listener one."""
_ABOUT: Final = (1, 1, "model", "shm", "seg", PeerLimits(128, 1, 1))
_HELLO: Final = Hello(NodeId("p"), Incarnation(1), "prefill", *_ABOUT)
_OURS: Final = Hello(NodeId("e"), Incarnation(2), "encoder", *_ABOUT)
_WELCOME: Final = Welcome(NodeId("e"), Incarnation(2), "encoder", *_ABOUT, "tcp://e:2")


class Frame(NamedTuple):
    """On its way `to` a side; `body` is a word, or the number of a message."""

    to: int
    session: int
    lane: int
    sequence: int
    body: Any


class Sent(NamedTuple):
    """What a side has sent in a session, and how far it has heard its peer."""

    control: int = 0
    media: int = 0
    messages: int = 0
    heard: int = 0


class SessionsState(NamedTuple):
    sides: tuple[tuple[tuple[int, Any], ...], ...] = ((), ())
    """Each side's machines, by session."""
    sent: tuple[tuple[tuple[int, int], Sent], ...] = ()
    """By (side, session)."""
    frames: tuple[Frame, ...] = ()
    made: int = 0
    dial_media: tuple[int, ...] = ()
    told: tuple[tuple[int, int], ...] = ()
    """(side, session) that were opened or dialled and have ended."""
    faults: int = 0
    flaws: tuple[str, ...] = ()


class SessionWorld:
    """Explorable. `setup.attempts` bounds the sessions, `setup.faults` what goes wrong."""

    def __init__(self, setup: Setup, patches: Mapping[str, Patch] | None = None) -> None:
        self.setup = setup
        self.machines = Machines(shipped(setup.attempts), patches or {})
        self.longest_queue = 0

    def initial(self) -> SessionsState:
        return SessionsState(faults=self.setup.faults)

    def apply(self, state: SessionsState, move: Move) -> SessionsState:
        nodes = _Nodes(self.setup, self.machines, state)
        handler: Callable[..., None] = getattr(nodes, "on_" + move.words[0].replace("-", "_"))
        handler(*move.words[1:])
        after = nodes.frozen()
        self.longest_queue = max(self.longest_queue, len(after.frames))
        return after._replace(faults=state.faults - move.cost)

    apply_logged = apply

    def moves(self, state: SessionsState) -> Iterator[Move]:
        yield from (move for move in self.resting_moves(state) if move.cost <= state.faults)
        kinds = self.setup.kinds
        sent = dict(state.sent)
        for side in (DIALLER, LISTENER):
            for session, machine in state.sides[side]:
                if not isinstance(machine, s.Open):
                    continue
                if sent[side, session].messages < (MESSAGES if side == DIALLER else 1):
                    yield Move(0, None, ("send", side, session))
        if not state.faults:
            return
        for number, frame in enumerate(state.frames):
            # A Hello comes once: it is the first frame of a connection of its own.
            able = {"drop", "garble", "refuse"} if frame.body == "hello" else {"drop", "garble", "repeat"}
            for fault in sorted(kinds & able):
                yield Move(1, None, (f"{fault}-frame", number))
        for side in (DIALLER, LISTENER):
            for session, machine in state.sides[side]:
                if "cut" in kinds:
                    yield Move(1, None, ("lost-lane", side, session, 0))
                    yield Move(1, None, ("lost-lane", side, session, 1))
                if "close" in kinds:
                    yield Move(1, None, ("close", side, session))
                if side == LISTENER and "probe" in kinds and isinstance(machine, s.Open):
                    yield Move(1, None, ("probe", session, 0))
                    yield Move(1, None, ("probe", session, 1))
                if "beat" in kinds and isinstance(machine, s.Open):
                    yield Move(1, None, ("beat", side, session))
                if "silence" in kinds and isinstance(machine, s.Open):
                    yield Move(1, None, ("silence", side, session))

    def resting_moves(self, state: SessionsState) -> Iterator[Move]:
        for number, frame in enumerate(state.frames):
            first = not any(
                other.to == frame.to and other.session == frame.session and other.lane == frame.lane
                for other in state.frames[:number]
            )
            if first:
                yield Move(0, TURN, ("frame", number))
            elif "reorder" in self.setup.kinds:
                yield Move(1, None, ("frame", number))
        for session in state.dial_media:
            yield Move(0, WORK, ("media-up", session))
        live = [dict(side) for side in state.sides]
        if not live[DIALLER] and state.made < self.setup.attempts:
            yield Move(0, WORK, ("dial",))
        for side in (DIALLER, LISTENER):
            for session, machine in state.sides[side]:
                coming = any(frame.session == session for frame in state.frames)
                lonely = side == DIALLER and session not in live[LISTENER] and not coming
                if isinstance(machine, s.Open) and lonely:
                    yield Move(0, GIVE_UP, ("beat", side, session))
                if side == LISTENER and session not in live[DIALLER]:
                    yield Move(0, GIVE_UP, ("lost-lane", side, session, 0))
                if isinstance(machine, s.Ending):
                    yield Move(0, None, ("probe", session, 0))
                    yield Move(0, None, ("probe", session, 1))
                cost = 1 if "timeout" in self.setup.kinds else 99
                if isinstance(machine, s.Ending):
                    cost = 0
                for deadline_s in _deadlines(machine):
                    # The next rank: when it is not over otherwise.
                    rank = GIVE_UP + 1 if isinstance(machine, s.Dialling | s.Ending) else None
                    yield Move(cost, rank, ("session-timeout", side, session, int(deadline_s)))

    def violation(self, state: SessionsState) -> Violation | None:
        return first_violation(View(prefills=(PrefillView(flaws=state.flaws),)))

    def residue(self, state: SessionsState) -> Violation | None:
        """At rest both sides have the same sessions in force."""
        opened = [{n for n, machine in side if isinstance(machine, s.Open)} for side in state.sides]
        if opened[0] != opened[1] or any(
            len(side) != len(o) for side, o in zip(state.sides, opened, strict=True)
        ):
            return Violation("I8", f"the sides do not agree: {', '.join(self.held(state))}")
        return None

    def told(self, state: SessionsState) -> tuple[tuple[str, ...], ...]:
        """There are no requests here."""
        return ()

    def held(self, state: SessionsState) -> tuple[str, ...]:
        return tuple(
            f"session {session} on side {side}: {type(machine).__name__}"
            for side in (DIALLER, LISTENER)
            for session, machine in state.sides[side]
        )


def _deadlines(machine: Any) -> tuple[float, ...]:
    match machine:
        case s.Open():
            media = () if machine.media_by_s is None else (machine.media_by_s,)
            return (machine.silent_at_s, *media)
        case s.Dialling() | s.Ending():
            return (machine.deadline_s,)
        case _:
            return ()


class _Nodes:
    """Both sides, as one move changes them."""

    def __init__(self, setup: Setup, machines: Machines, state: SessionsState) -> None:
        self._setup, self._state = setup, state
        self._tables = [
            Table("session", machines, state.sides[side], self._performer(side))
            for side in (DIALLER, LISTENER)
        ]
        self._sent = dict(state.sent)
        self._frames = list(state.frames)
        self._made = state.made
        self._dial_media = list(state.dial_media)
        self._told = list(state.told)
        self._flaws = list(state.flaws)
        self._open: set[tuple[int, int]] = set()

    def frozen(self) -> SessionsState:
        for table in self._tables:
            for session in list(table.states):
                table.states[session] = _at_zero(table.states[session])
        self._forget_what_is_over()
        return SessionsState(
            (self._tables[0].frozen(), self._tables[1].frozen()),
            tuple(sorted(self._sent.items())),
            tuple(self._frames),
            self._made,
            tuple(session for session in self._dial_media if session in self._tables[DIALLER].states),
            tuple(sorted(self._told)),
            self._state.faults,
            tuple(self._flaws),
        )

    def _forget_what_is_over(self) -> None:
        """Frames of a session that neither side knows change nothing, but for a `Hello` that comes late."""
        if "any frame" in self._setup.broken:
            return
        known = {session for table in self._tables for session in table.states}
        self._frames = [f for f in self._frames if f.session in known or f.body == "hello"]
        for side, session in list(self._sent):
            if session not in known:
                del self._sent[side, session]
        self._told = [entry for entry in self._told if entry[1] in known]

    # -- moves -------------------------------------------------------------------------------

    def on_dial(self) -> None:
        self._made += 1
        session = self._made
        self._sent[DIALLER, session] = Sent()
        self._tables[DIALLER].feed(session, s.Dialled("tcp://e:1"))
        self._send(DIALLER, session, Lane.CONTROL, "hello")

    def on_send(self, side: int, session: int) -> None:
        sent = self._sent[side, session]
        self._sent[side, session] = sent._replace(messages=sent.messages + 1)
        self._send(side, session, Lane.CONTROL, sent.messages + 1)

    def on_media_up(self, session: int) -> None:
        self._dial_media.remove(session)
        self._tables[DIALLER].feed(session, s.MediaConnected())

    def on_frame(self, number: int) -> None:
        self._take(self._frames.pop(number), malformed=False)

    def on_garble_frame(self, number: int) -> None:
        self._take(self._frames.pop(number), malformed=True)

    def on_refuse_frame(self, number: int) -> None:
        """A `Hello`, and the listener has as many peers as it may."""
        self._take(self._frames.pop(number), malformed=False, room=False)

    def on_drop_frame(self, number: int) -> None:
        self._frames.pop(number)

    def on_repeat_frame(self, number: int) -> None:
        self._frames.append(self._frames[number])

    def on_lost_lane(self, side: int, session: int, lane: int) -> None:
        self._tables[side].feed(session, s.ConnectionLost(Lane(lane), "gone"))

    def on_close(self, side: int, session: int) -> None:
        self._tables[side].feed(session, s.CloseWanted("draining", "on purpose"))

    def on_probe(self, session: int, lane: int) -> None:
        self._tables[LISTENER].feed(session, s.ProbeWanted(Lane(lane)))

    def on_beat(self, side: int, session: int) -> None:
        self._tables[side].feed(session, TimerExpired(), self._tables[side].state(session).heartbeat_at_s)

    def on_silence(self, side: int, session: int) -> None:
        """The peer's silence is noticed when our own heartbeat was sent a moment ago."""
        machine = self._tables[side].state(session)
        self._tables[side].put(session, replace(machine, heartbeat_at_s=machine.silent_at_s + 1.0))
        self._tables[side].feed(session, TimerExpired(), machine.silent_at_s)

    def on_session_timeout(self, side: int, session: int, at_s: int) -> None:
        self._tables[side].feed(session, TimerExpired(), float(at_s))

    # -- a frame, as the intake takes it -----------------------------------------------------

    def _take(self, frame: Frame, *, malformed: bool, room: bool = True) -> None:
        side, session = frame.to, frame.session
        table = self._tables[side]
        if session not in table.states:
            if "any frame" in self._setup.broken and table.states:
                session = max(table.states)
            elif side == LISTENER:
                self._take_unknown(frame, malformed=malformed, room=room)
                return
            else:
                return
        if frame.sequence == s.OUTSIDE:
            word = s.BodyMalformed("garbled") if malformed else s.RejectedReceived("session_lost", "over")
            table.feed(session, word)
            return
        table.feed(session, s.FrameReceived(Lane(frame.lane), frame.sequence, 100))
        machine = table.state(session)
        if not isinstance(machine, s.Open | s.Dialling):
            return
        if malformed or (isinstance(machine, s.Dialling) and frame.body != "welcome"):
            table.feed(session, s.BodyMalformed("garbled"))
            return
        if frame.body == "welcome":
            table.feed(session, s.WelcomeReceived(_HELLO, _WELCOME))
        elif isinstance(frame.body, int):
            self._accept(side, session, frame)

    def _take_unknown(self, frame: Frame, *, malformed: bool, room: bool) -> None:
        table, session = self._tables[LISTENER], frame.session
        if frame.body == "hello" and malformed:
            return
        # A Hello whose dial an open session of the same incarnation has overtaken is answered as over.
        overtaken = any(other > session and isinstance(m, s.Open) for other, m in table.states.items())
        if frame.body == "hello" and not overtaken:
            for older, machine in list(table.states.items()):
                if isinstance(machine, s.Open):
                    table.feed(older, s.Replaced())
            self._sent.setdefault((LISTENER, session), Sent())
            table.feed(session, s.HelloReceived(_OURS, _HELLO, room, False))
        elif frame.sequence != s.OUTSIDE:
            table.feed(session, s.FrameReceived(Lane(frame.lane), frame.sequence, 100))

    def _accept(self, side: int, session: int, frame: Frame) -> None:
        sent = self._sent[side, session]
        if frame.session != session:
            self._flaws.append(f"I8: acted on a message of session {frame.session} in session {session}")
        elif frame.body != sent.heard + 1:
            self._flaws.append(
                f"I8: acted on message {frame.body} of session {session}, where {sent.heard + 1} was due"
            )
        self._sent[side, session] = sent._replace(heard=frame.body)

    # -- effects -----------------------------------------------------------------------------

    def _performer(self, side: int) -> Callable[[int, tuple[Effect, ...]], None]:
        return lambda session, effects: self._perform(side, session, effects)

    def _perform(self, side: int, session: int, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case s.SendWelcome():
                    self._send(side, session, Lane.CONTROL, "welcome")
                case s.SendHeartbeat():
                    self._send(side, session, Lane.CONTROL, "heartbeat")
                case s.SendEmptyMedia():
                    self._send(side, session, Lane.MEDIA, "empty")
                case s.SendRejected():
                    last = Frame(1 - side, session, Lane.CONTROL, s.OUTSIDE, "rejected")
                    if last not in self._frames:
                        self._frames.append(last)
                case s.DialMedia():
                    self._dial_media.append(session)
                case s.TellEnded():
                    if (side, session) in self._told:
                        self._flaws.append(f"I8: the end of session {session} was told twice")
                    self._told.append((side, session))

    def _send(self, side: int, session: int, lane: Lane, body: Any) -> None:
        sent = self._sent.get((side, session), Sent())
        sequence = sent.control if lane is Lane.CONTROL else sent.media
        if lane is Lane.CONTROL:
            self._sent[side, session] = sent._replace(control=sequence + 1)
        else:
            self._sent[side, session] = sent._replace(media=sequence + 1)
        self._frames.append(Frame(1 - side, session, int(lane), sequence, body))
        self._tables[side].feed(session, s.FrameSent(lane, sequence, 100))


def _at_zero(machine: Any) -> Any:
    """What was set now counts from now, which is second 0 again."""
    limits = s.SessionLimits()
    match machine:
        case s.Open():
            media = None
            if machine.media_by_s is not None:
                media = limits.connect_s if machine.dialler else limits.drain_s
            silent = limits.dead_after_s if machine.suspect else limits.suspect_after_s
            return replace(machine, heartbeat_at_s=limits.heartbeat_s, silent_at_s=silent, media_by_s=media)
        case s.Ending():
            return replace(machine, deadline_s=limits.drain_s)
        case _:
            return machine
