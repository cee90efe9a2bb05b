"""The session machine: one instance per session, the same for the dialler and the listener.

Rules of this file (I8):
- A session is in force from `Welcome`. Frames are numbered per lane and direction from 0; whatever
  is not the next number is a gap, and a gap ends the session. Nothing is resent.
- Silence makes the peer suspect, then dead. Any frame of either lane breaks the silence.
- Every end is one `TellEnded`, in the turn it is learnt. The last word to the peer is a `Rejected`
  outside the sequence (`OUTSIDE`), after all that was queued.
- The dialler closes: a dialler loses what it has received and not read when the connection ends. So
  a listener that wants to end says so and waits, `Ending`, for the connection to go or `drain_s`.

A session that is not known is `Absent`, one that has ended is again: the machine keeps no memory of
it, and answers its frames with `Rejected(session over)`.
"""

from collections.abc import Callable
from typing import ClassVar, Final

import msgspec
from msgspec.structs import replace

from epd.protocol.errors import Busy, Draining, Malformed, PeerUnreachable, SessionLost
from epd.protocol.machine import Effect, Event, Ignored, State, Step, TimerExpired, dispatch
from epd.protocol.messages import Hello, Rejected, Welcome
from epd.protocol.negotiation import check_hello
from epd.protocol.wire import Lane

OUTSIDE: Final = 2**64 - 1
"""The sequence number of a frame outside the sequence; it holds one `Rejected` and nothing else."""
SESSION_OVER: Final = "session over"


class SessionLimits(msgspec.Struct, frozen=True):
    """Seconds. `connect_s` covers a dial from the name's resolution to `Welcome`, and then again the
    media lane; `drain_s` is how long a listener waits for the dialler to close."""

    heartbeat_s: float = 1.0
    suspect_after_s: float = 2.0
    dead_after_s: float = 10.0
    connect_s: float = 5.0
    drain_s: float = 2.0


Limits = SessionLimits
"""The name under which every machine has its limits."""


# -- states ----------------------------------------------------------------------------------


class Absent(State):
    """Never seen, refused, or over."""

    deadline_s: None = None
    final: ClassVar[bool] = True


class Dialling(State):
    """The dialler's side until `Welcome`; `deadline_s` covers resolution, connection and answer."""

    deadline_s: float
    control_received: int = 0
    final: ClassVar[bool] = False


class Open(State):
    """In force. `silent_at_s` is when silence changes something: suspect first, then dead.

    `media_by_s` ends the session because of its media lane: at the dialler while that is not connected
    yet, at the listener once it is lost.
    """

    dialler: bool
    heartbeat_at_s: float
    silent_at_s: float
    control_received: int = 1
    media_received: int = 0
    suspect: bool = False
    media_by_s: float | None = None
    final: ClassVar[bool] = False

    @property
    def deadline_s(self) -> float:
        earliest_s = min(self.heartbeat_at_s, self.silent_at_s)
        return earliest_s if self.media_by_s is None else min(earliest_s, self.media_by_s)


class Ending(State):
    """A listener's session that we have ended; the dialler was told and is to close."""

    deadline_s: float
    code: str
    final: ClassVar[bool] = False


class Ended(State):
    """Over; its frames are answered by whoever is `Absent`."""

    code: str
    deadline_s: None = None
    final: ClassVar[bool] = True


AnyState = Absent | Dialling | Open | Ending | Ended
INITIAL: Final = Absent()


# -- events ----------------------------------------------------------------------------------


class Dialled(Event):
    """We drew the session and begin to connect to `address`."""

    address: str


class HelloReceived(Event):
    """The first frame of an unknown session. `room`: peers are not at their cap."""

    ours: Hello
    hello: Hello
    room: bool
    draining: bool


class WelcomeReceived(Event):
    """`ours` is our `Hello` as it would be now: our fingerprint may have been settled meanwhile."""

    ours: Hello
    welcome: Welcome


class FrameReceived(Event):
    """A frame with a good header, of this session; its body was not decoded yet."""

    lane: Lane
    sequence: int
    nbytes: int


class FrameSent(Event):
    """A frame was built and put in the outgoing queue of its lane."""

    lane: Lane
    sequence: int
    nbytes: int


class RejectedReceived(Event):
    code: str
    reason: str


class BodyMalformed(Event):
    reason: str


class MediaConnected(Event):
    """The dialler's media lane is up."""


class ConnectionLost(Event):
    """A lane could not be connected, or is connected no more. What had arrived was read before."""

    lane: Lane
    reason: str


class CloseWanted(Event):
    code: str
    reason: str


class Replaced(Event):
    """The same node has a newer session."""


class ProbeWanted(Event):
    """Send something now: a send names a lost connection, waiting does not."""

    lane: Lane


AnyEvent = (
    Dialled
    | HelloReceived
    | WelcomeReceived
    | FrameReceived
    | FrameSent
    | RejectedReceived
    | BodyMalformed
    | MediaConnected
    | ConnectionLost
    | CloseWanted
    | Replaced
    | ProbeWanted
    | TimerExpired
)


# -- effects, in the order in which they are to be performed ----------------------------------


class SendWelcome(Effect):
    """The first frame of the listener."""


class SendHeartbeat(Effect):
    """With the load hints of now."""


class SendEmptyMedia(Effect):
    """A media frame of no message: tells the listener that the lane is there, or probes it."""


class SendRejected(Effect):
    """Outside the sequence, after everything that is queued; at once, as far as there is room."""

    code: str
    reason: str


class DialMedia(Effect):
    address: str


class TellOpened(Effect):
    """The session is in force."""


class TellSuspect(Effect):
    suspect: bool


class CloseSockets(Effect):
    """The dialler's sockets; at the listener, forget the session. `linger`: once the other has read all."""

    linger: bool


class TellEnded(Effect):
    """Exactly once for every session that was dialled or opened."""

    code: str
    reason: str


AnyEffect = (
    SendWelcome
    | SendHeartbeat
    | SendEmptyMedia
    | SendRejected
    | DialMedia
    | TellOpened
    | TellSuspect
    | CloseSockets
    | TellEnded
    | Ignored
)


# -- transitions -----------------------------------------------------------------------------


def _dial(_: Absent, event: Dialled, now_s: float, limits: SessionLimits) -> Step:
    return Step(Dialling(now_s + limits.connect_s), ())


def _greet(state: Absent, event: HelloReceived, now_s: float, limits: SessionLimits) -> Step:
    refusal = check_hello(event.ours, event.hello)
    if refusal is None and event.draining:
        refusal = Rejected(Draining.code, f"{event.ours.node} is draining")
    if refusal is None and not event.room:
        refusal = Rejected(Busy.code, f"{event.ours.node} has as many peers as it may")
    if refusal is not None:
        return Step(state, (SendRejected(refusal.code, refusal.reason),))
    return Step(_opened(False, now_s, limits), (SendWelcome(), TellOpened()))


def _opened(dialler: bool, now_s: float, limits: SessionLimits) -> Open:
    media_by_s = now_s + limits.connect_s if dialler else None
    return Open(dialler, now_s + limits.heartbeat_s, now_s + limits.suspect_after_s, media_by_s=media_by_s)


def _answer_over(state: Absent, event: FrameReceived, now_s: float, limits: SessionLimits) -> Step:
    return Step(state, (SendRejected(SessionLost.code, SESSION_OVER),))


def _welcome(state: Dialling, event: WelcomeReceived, now_s: float, limits: SessionLimits) -> Step:
    refusal = check_hello(event.ours, event.welcome)
    if refusal is not None:
        return _end(refusal.code, refusal.reason, tell_peer=True)
    opened = replace(_opened(True, now_s, limits), control_received=state.control_received)
    return Step(opened, (TellOpened(), DialMedia(event.welcome.media_address)))


def _receive_greeting(state: Dialling, event: FrameReceived, now_s: float, limits: SessionLimits) -> Step:
    if event.lane is not Lane.CONTROL or event.sequence != state.control_received:
        return _end_gap(event, state.control_received)
    return Step(replace(state, control_received=state.control_received + 1), ())


def _receive(state: Open, event: FrameReceived, now_s: float, limits: SessionLimits) -> Step:
    control, media = state.control_received, state.media_received
    if event.lane is Lane.CONTROL:
        if event.sequence != control:
            return _end_gap(event, control)
        control += 1
    else:
        if event.sequence != media:
            return _end_gap(event, media)
        media += 1
    heard = Open(
        state.dialler,
        state.heartbeat_at_s,
        now_s + limits.suspect_after_s,
        control,
        media,
        media_by_s=state.media_by_s,
    )
    return Step(heard, (TellSuspect(False),) if state.suspect else ())


def _keep(state: AnyState, event: AnyEvent, now_s: float, limits: SessionLimits) -> Step:
    return Step(state, ())


def _end_gap(event: FrameReceived, expected: int) -> Step:
    reason = f"gap on the {event.lane.name.lower()} lane: frame {event.sequence} where {expected} was due"
    return _end(SessionLost.code, reason, tell_peer=True)


def _end(code: str, reason: str, *, tell_peer: bool) -> Step:
    told: tuple[Effect, ...] = (SendRejected(code, reason),) if tell_peer else ()
    return Step(Ended(code), (*told, CloseSockets(tell_peer), TellEnded(code, reason)))


def _fail_dial(state: Dialling, event: ConnectionLost, now_s: float, limits: SessionLimits) -> Step:
    return _end(PeerUnreachable.code, event.reason, tell_peer=False)


def _give_up_dialling(state: Dialling, event: TimerExpired, now_s: float, limits: SessionLimits) -> Step:
    return _end(PeerUnreachable.code, f"no welcome within {limits.connect_s:g} s", tell_peer=False)


def _lose(state: Open, event: ConnectionLost, now_s: float, limits: SessionLimits) -> Step:
    reason = f"{event.lane.name.lower()} lane: {event.reason}"
    if event.lane is Lane.CONTROL:
        return _end(SessionLost.code, reason, tell_peer=False)
    if state.dialler:
        return _end(SessionLost.code, reason, tell_peer=True)
    # A dialler that closes in order closes both lanes, and what it queued on the control lane may
    # still be on its way; one that has lost its media lane says so there. We need only wait.
    if state.media_by_s is None:
        state = replace(state, media_by_s=now_s + limits.drain_s)
    return Step(state, ())


def _replace(state: Open, event: Replaced, now_s: float, limits: SessionLimits) -> Step:
    return _end(SessionLost.code, "replaced by a newer session of the same node", tell_peer=True)


def _take_rejection(
    state: Dialling | Open, event: RejectedReceived, now_s: float, limits: SessionLimits
) -> Step:
    return _end(event.code, event.reason, tell_peer=False)


def _refuse_body(state: Dialling | Open, event: BodyMalformed, now_s: float, limits: SessionLimits) -> Step:
    return _end(Malformed.code, event.reason, tell_peer=True)


def _close(state: Dialling | Open, event: CloseWanted, now_s: float, limits: SessionLimits) -> Step:
    if isinstance(state, Dialling) or state.dialler:
        return _end(event.code, event.reason, tell_peer=isinstance(state, Open))
    told = (SendRejected(event.code, event.reason), TellEnded(event.code, event.reason))
    return Step(Ending(now_s + limits.drain_s, event.code), told)


def _repeat(state: Ending, event: ProbeWanted, now_s: float, limits: SessionLimits) -> Step:
    last_word = (SendRejected(SessionLost.code, SESSION_OVER),)
    return Step(state, last_word if event.lane is Lane.CONTROL else ())


def _forget(state: Ending, event: AnyEvent, now_s: float, limits: SessionLimits) -> Step:
    return Step(Ended(state.code), (CloseSockets(False),))


def _forget_if_control(state: Ending, event: ConnectionLost, now_s: float, limits: SessionLimits) -> Step:
    # The media lane goes first or last; what was queued for the peer is on the control lane.
    return _forget(state, event, now_s, limits) if event.lane is Lane.CONTROL else Step(state, ())


def _media_up(state: Open, event: MediaConnected, now_s: float, limits: SessionLimits) -> Step:
    return Step(replace(state, media_by_s=None), (SendEmptyMedia(),))


def _probe(state: Open, event: ProbeWanted, now_s: float, limits: SessionLimits) -> Step:
    if event.lane is Lane.MEDIA:
        # Before the dialler's first media frame there is no connection that could have been lost.
        return Step(state, (SendEmptyMedia(),) if state.media_received else ())
    return Step(replace(state, heartbeat_at_s=now_s + limits.heartbeat_s), (SendHeartbeat(),))


def _tick(state: Open, event: TimerExpired, now_s: float, limits: SessionLimits) -> Step:
    if state.media_by_s is not None and now_s >= state.media_by_s:
        missing = f"not connected within {limits.connect_s:g} s"
        reason = f"media lane: {missing if state.dialler else 'connection lost'}"
        return _end(SessionLost.code, reason, tell_peer=True)
    effects: list[Effect] = []
    if now_s >= state.silent_at_s:
        if state.suspect:
            reason = f"no frame for {limits.dead_after_s:g} s"
            return _end(SessionLost.code, reason, tell_peer=True)
        dead_at_s = state.silent_at_s + limits.dead_after_s - limits.suspect_after_s
        state = replace(state, suspect=True, silent_at_s=dead_at_s)
        effects.append(TellSuspect(True))
    if now_s >= state.heartbeat_at_s:
        state = replace(state, heartbeat_at_s=now_s + limits.heartbeat_s)
        effects.append(SendHeartbeat())
    return Step(state, tuple(effects))


TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (Absent, Dialled): _dial,
    (Absent, HelloReceived): _greet,
    (Absent, FrameReceived): _answer_over,
    (Absent, FrameSent): _keep,
    (Dialling, WelcomeReceived): _welcome,
    (Dialling, FrameReceived): _receive_greeting,
    (Dialling, FrameSent): _keep,
    (Dialling, RejectedReceived): _take_rejection,
    (Dialling, BodyMalformed): _refuse_body,
    (Dialling, ConnectionLost): _fail_dial,
    (Dialling, CloseWanted): _close,
    (Dialling, TimerExpired): _give_up_dialling,
    (Open, FrameReceived): _receive,
    (Open, FrameSent): _keep,
    (Open, RejectedReceived): _take_rejection,
    (Open, BodyMalformed): _refuse_body,
    (Open, MediaConnected): _media_up,
    (Open, ConnectionLost): _lose,
    (Open, CloseWanted): _close,
    (Open, Replaced): _replace,
    (Open, ProbeWanted): _probe,
    (Open, TimerExpired): _tick,
    (Ending, FrameReceived): _keep,
    (Ending, FrameSent): _keep,
    (Ending, RejectedReceived): _forget,
    (Ending, ProbeWanted): _repeat,
    (Ending, ConnectionLost): _forget_if_control,
    (Ending, TimerExpired): _forget,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: SessionLimits) -> Step:
    """Total and pure (see `machine.py`)."""
    return dispatch(TRANSITIONS, state, event, now_s, limits)
