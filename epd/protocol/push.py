"""The window machine: one per session of a prefill node whose pool is written into (push).

A window is a mapping of the pool that one session's encoder may write through. Its memory is ours again
only by proof, and these are the proofs:

- the writer's engine was told by ours that payload and seal have arrived (`written`);
- the writer says that it handed nothing of a write to its engine (`untouched`, `Drained`);
- the window was revoked: deregistered, and its addresses made inaccessible, so that what is still on its
  way lands nowhere (`fenced`). That ends the session: its writes are all over, and the next session
  gets a window elsewhere.

A writer's `unknown` is none: its engine is through with the write, but not the kernels' buffers. Nor are
its silence, its death or the end of the session. Where a window cannot be revoked, it is `Held`, and
the slots of its writes are never leased again.
"""

from collections.abc import Callable
from typing import ClassVar, Final, Literal

import msgspec
from msgspec.structs import replace

from epd.protocol.ids import WriteId
from epd.protocol.machine import Effect, Event, Ignored, State, Step, TimerExpired, dispatch, ignored
from epd.protocol.messages import WriteOutcome

End = Literal["written", "untouched", "refused", "fenced"]


class Limits(msgspec.Struct, frozen=True):
    """A writer that is asked about a write (`Reconcile`) has `answer_s` for it."""

    answer_s: float = 2.0


class Absent(State):
    """No window: nothing can be written."""

    deadline_s: None = None
    final: ClassVar[bool] = True


class Opening(State):
    """Being mapped and registered. `over`: its session ended meanwhile."""

    over: bool = False
    deadline_s: None = None
    final: ClassVar[bool] = False


class Granted(State):
    """The writer may write, and nothing was asked of it."""

    deadline_s: None = None
    final: ClassVar[bool] = False


class Writing(State):
    """`writes` were asked for and are not over; of those in `doubted` the writer was asked what it knows."""

    writes: tuple[WriteId, ...]
    doubted: tuple[WriteId, ...] = ()
    deadline_s: float | None = None
    final: ClassVar[bool] = False


class Revoking(State):
    """Being taken away; what of `writes` still arrives is nobody's until that is proven."""

    writes: tuple[WriteId, ...]
    deadline_s: None = None
    final: ClassVar[bool] = False


class Held(State):
    """It could not be revoked: memory of `writes` stays out of use as long as this node lives."""

    writes: tuple[WriteId, ...]
    deadline_s: None = None
    final: ClassVar[bool] = False


class Fenced(State):
    """Inaccessible for good; its addresses are not used again."""

    deadline_s: None = None
    final: ClassVar[bool] = True


AnyState = Absent | Opening | Granted | Writing | Revoking | Held | Fenced
INITIAL: Final = Absent()


class WindowWanted(Event):
    """The session is in force."""


class WindowOpened(Event):
    """It is mapped and registered, or (`ok` false) nothing of it is."""

    ok: bool


class WriteWanted(Event):
    write: WriteId


class WriteEnded(Event):
    """The writer's word: `written`, `untouched` or `unknown`."""

    write: WriteId
    outcome: WriteOutcome


class WritesDrained(Event):
    """The writer's word: none of these runs, and nothing of them is on its way."""

    writes: tuple[WriteId, ...]


class AbortWanted(Event):
    """Nobody waits for this write any longer; its memory is wanted back."""

    write: WriteId


class SessionOver(Event):
    """The writer can say nothing more."""


class WindowRevoked(Event):
    """`proven`: deregistered *and* inaccessible, by our own engine's and kernel's word."""

    proven: bool


AnyEvent = (
    WindowWanted
    | WindowOpened
    | WriteWanted
    | WriteEnded
    | WritesDrained
    | AbortWanted
    | SessionOver
    | WindowRevoked
    | TimerExpired
)


class OpenWindow(Effect):
    """Map and register it, somewhere that was never a window before."""


class TellOpened(Effect):
    """Tell the writer where it is, and our own side that it may ask for writes; or that there is none."""

    ok: bool


class AskWrite(Effect):
    write: WriteId


class AskDrained(Effect):
    """`Reconcile`: what does the writer know of these?"""

    writes: tuple[WriteId, ...]


class RevokeWindow(Effect):
    """Deregister it and make it inaccessible, in this order."""


class EndSession(Effect):
    """Its window is gone."""

    reason: str


class EndWrite(Effect):
    """The write is over: nothing of it will arrive any more. Only of `written` the bytes may be good."""

    write: WriteId
    end: End


AnyEffect = OpenWindow | TellOpened | AskWrite | AskDrained | RevokeWindow | EndSession | EndWrite | Ignored


def _open(_: Absent, event: WindowWanted, now_s: float, limits: Limits) -> Step:
    return Step(Opening(), (OpenWindow(),))


def _settle_opened(state: Opening, event: WindowOpened, now_s: float, limits: Limits) -> Step:
    if not event.ok:
        return Step(Fenced(), () if state.over else (TellOpened(False),))
    if state.over:
        return Step(Revoking(()), (RevokeWindow(),))
    return Step(Granted(), (TellOpened(True),))


def _end_opening(state: Opening, event: SessionOver, now_s: float, limits: Limits) -> Step:
    return Step(Opening(over=True), ())


def _write_first(_: Granted, event: WriteWanted, now_s: float, limits: Limits) -> Step:
    return Step(Writing((event.write,)), (AskWrite(event.write),))


def _write_more(state: Writing, event: WriteWanted, now_s: float, limits: Limits) -> Step:
    if event.write in state.writes:
        return ignored(state, event)
    return Step(replace(state, writes=(*state.writes, event.write)), (AskWrite(event.write),))


def _refuse_write(state: AnyState, event: WriteWanted, now_s: float, limits: Limits) -> Step:
    return Step(state, (EndWrite(event.write, "refused"),))


def _end_write(state: Writing, event: WriteEnded, now_s: float, limits: Limits) -> Step:
    if event.write not in state.writes:
        return ignored(state, event)
    if event.outcome == "unknown":
        return _fence(state, f"write {event.write} failed, and parts of it may still be on their way")
    return Step(_without(state, (event.write,)), (EndWrite(event.write, event.outcome),))


def _drain(state: Writing, event: WritesDrained, now_s: float, limits: Limits) -> Step:
    drained = tuple(write for write in event.writes if write in state.doubted)
    if not drained:
        return ignored(state, event)
    return Step(_without(state, drained), tuple(EndWrite(write, "untouched") for write in drained))


def _doubt(state: Writing, event: AbortWanted, now_s: float, limits: Limits) -> Step:
    if event.write not in state.writes or event.write in state.doubted:
        return ignored(state, event)
    deadline_s = now_s + limits.answer_s if state.deadline_s is None else state.deadline_s
    doubting = Writing(state.writes, (*state.doubted, event.write), deadline_s)
    return Step(doubting, (AskDrained((event.write,)),))


def _lose_patience(state: Writing, event: TimerExpired, now_s: float, limits: Limits) -> Step:
    return _fence(state, f"no word about {len(state.doubted)} of its writes")


def _end_session(state: Granted | Writing, event: SessionOver, now_s: float, limits: Limits) -> Step:
    writes = state.writes if isinstance(state, Writing) else ()
    return Step(Revoking(writes), (RevokeWindow(),))


def _fence(state: Writing, reason: str) -> Step:
    return Step(Revoking(state.writes), (RevokeWindow(), EndSession(reason)))


def _settle_revoked(state: Revoking, event: WindowRevoked, now_s: float, limits: Limits) -> Step:
    if not event.proven:
        return Step(Held(state.writes), ())
    return Step(Fenced(), tuple(EndWrite(write, "fenced") for write in state.writes))


def _without(state: Writing, over: tuple[WriteId, ...]) -> Granted | Writing:
    writes = tuple(write for write in state.writes if write not in over)
    doubted = tuple(write for write in state.doubted if write not in over)
    if not writes:
        return Granted()
    # The deadline of the oldest doubt stays while any is left: it can only come early.
    return Writing(writes, doubted, state.deadline_s if doubted else None)


TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (Absent, WindowWanted): _open,
    (Absent, WriteWanted): _refuse_write,
    (Opening, WindowOpened): _settle_opened,
    (Opening, SessionOver): _end_opening,
    (Opening, WriteWanted): _refuse_write,
    (Granted, WriteWanted): _write_first,
    (Granted, SessionOver): _end_session,
    (Writing, WriteWanted): _write_more,
    (Writing, WriteEnded): _end_write,
    (Writing, WritesDrained): _drain,
    (Writing, AbortWanted): _doubt,
    (Writing, SessionOver): _end_session,
    (Writing, TimerExpired): _lose_patience,
    (Revoking, WindowRevoked): _settle_revoked,
    (Revoking, WriteWanted): _refuse_write,
    (Held, WriteWanted): _refuse_write,
    (Fenced, WriteWanted): _refuse_write,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: Limits) -> Step:
    """Total and pure (see `machine.py`)."""
    return dispatch(TRANSITIONS, state, event, now_s, limits)
