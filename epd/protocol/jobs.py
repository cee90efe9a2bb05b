"""The job machine: one forward of one content key, shared by everyone who wants it (I7).

The content key is the media's hash, the probe and the dtype, so that a subscriber who announced
other sizes has a job of its own. A forward starts when its staging slot is reserved and one
subscriber holds a grant; media are asked for only then, of one subscriber's session at a time.
Subscribers are named, never counted.
"""

from collections.abc import Callable
from typing import ClassVar, Final

import msgspec
from msgspec.structs import replace

from epd.protocol.errors import ForwardFailed, MediaUnavailable
from epd.protocol.ids import LeaseId, SessionId
from epd.protocol.machine import Effect, Event, Ignored, State, Step, TimerExpired, dispatch, ignored
from epd.protocol.messages import ErrorValue, Struct
from epd.protocol.sources import Subscriber


class Limits(msgspec.Struct, frozen=True):
    """Deadlines of the encoder side."""

    media_s: float = 30.0
    forward_s: float = 120.0
    dedup_retention_s: float = 10.0


class Wish(Struct):
    """One subscriber, and whether it holds a grant."""

    subscriber: Subscriber
    granted: bool = False


Wishes = tuple[Wish, ...]


class Absent(State):
    deadline_s: None = None
    final: ClassVar[bool] = True


class Unstarted(State):
    """Nobody who wants it holds a grant."""

    wishes: Wishes
    deadline_s: None = None
    final: ClassVar[bool] = False


class Fetching(State):
    """Media are asked of `sender`; the deadline runs while nothing arrives, once they were asked for."""

    wishes: Wishes
    sender: SessionId
    deadline_s: float | None = None
    final: ClassVar[bool] = False


class AwaitingStaging(State):
    """Media are here; waiting for a staging slot."""

    wishes: Wishes
    deadline_s: None = None
    final: ClassVar[bool] = False


class Queued(State):
    """Staging slot reserved; waiting for the worker.

    `withdrawn`: nobody wants it any more, but only the worker's owner knows whether it has started;
    the slot is held until `ForwardUnqueued` or `ForwardStarted` says so (I2).
    """

    wishes: Wishes
    staged: LeaseId
    withdrawn: bool = False
    deadline_s: None = None
    final: ClassVar[bool] = False


class Running(State):
    """The worker writes into the staging slot. `killed`: its time was over; waiting for its death."""

    wishes: Wishes
    staged: LeaseId
    deadline_s: float | None
    killed: bool = False
    final: ClassVar[bool] = False


class Done(State):
    """The result is staged; kept for `dedup_retention_s` after the last subscriber has left."""

    wishes: Wishes
    staged: LeaseId
    deadline_s: float | None = None
    final: ClassVar[bool] = False


AnyState = Absent | Unstarted | Fetching | AwaitingStaging | Queued | Running | Done
INITIAL: Final = Absent()


class Subscribed(Event):
    subscriber: Subscriber


class Granted(Event):
    subscriber: Subscriber


class Left(Event):
    subscriber: Subscriber


class MediaProgress(Event):
    """`NeedMedia` was sent, or another chunk came."""


class MediaArrived(Event):
    """All media are here and their hash is the one announced."""


class MediaFailed(Event):
    """The sender does not have them, or they are not what it announced: only it is to blame."""

    sender: SessionId
    error: ErrorValue


class StagingReserved(Event):
    staged: LeaseId


class StagingRefused(Event):
    error: ErrorValue


class ForwardStarted(Event):
    pass


class ForwardUnqueued(Event):
    """Answer to `UnqueueForward`, unless it came too late: the forward will not start."""


class ForwardEnded(Event):
    """The worker's own word, or its death."""

    error: ErrorValue | None


class Evicted(Event):
    """The staged result was given up for room (never while pinned)."""

    staged: LeaseId


AnyEvent = (
    Subscribed
    | Granted
    | Left
    | MediaProgress
    | MediaArrived
    | MediaFailed
    | StagingReserved
    | StagingRefused
    | ForwardStarted
    | ForwardUnqueued
    | ForwardEnded
    | Evicted
    | TimerExpired
)


class FetchMedia(Effect):
    """Ask this session for the media, as the media budget allows; from the start."""

    sender: SessionId


class DropMedia(Effect):
    """The media (or the wish for them) are no longer needed by this job."""


class AskStaging(Effect):
    pass


class WithdrawStaging(Effect):
    """A reservation on its way comes back as `ReleaseStaged`."""


class QueueForward(Effect):
    staged: LeaseId


class UnqueueForward(Effect):
    """Answered by `ForwardUnqueued`, or by `ForwardStarted` if it comes too late."""


class KillWorker(Effect):
    """The forward took too long: only the worker's death proves that it no longer writes."""


class MarkWritten(Effect):
    """The forward into this slot has ended well."""

    staged: LeaseId


class MarkWriteEnded(Effect):
    """The forward into this slot has ended without a result."""

    staged: LeaseId


class ReleaseStaged(Effect):
    staged: LeaseId


class TellReady(Effect):
    subscriber: Subscriber
    staged: LeaseId


class TellEvicted(Effect):
    subscriber: Subscriber


class TellFailed(Effect):
    subscriber: Subscriber
    error: ErrorValue


AnyEffect = (
    FetchMedia
    | DropMedia
    | AskStaging
    | WithdrawStaging
    | QueueForward
    | UnqueueForward
    | KillWorker
    | MarkWritten
    | MarkWriteEnded
    | ReleaseStaged
    | TellReady
    | TellEvicted
    | TellFailed
    | Ignored
)

Wanted = Unstarted | Fetching | AwaitingStaging | Queued | Running | Done


def _create(_: Absent, event: Subscribed, now_s: float, limits: Limits) -> Step:
    return Step(Unstarted((Wish(event.subscriber),)), ())


def _join(state: Wanted, event: Subscribed, now_s: float, limits: Limits) -> Step:
    if any(wish.subscriber == event.subscriber for wish in state.wishes):
        return ignored(state, event)
    joined = replace(state, wishes=(*state.wishes, Wish(event.subscriber)))
    if isinstance(joined, Done):
        return Step(replace(joined, deadline_s=None), (TellReady(event.subscriber, joined.staged),))
    return Step(joined, ())


def _grant(state: Wanted, event: Granted, now_s: float, limits: Limits) -> Step:
    if all(wish.subscriber != event.subscriber for wish in state.wishes):
        return ignored(state, event)
    wishes = tuple(
        replace(wish, granted=True) if wish.subscriber == event.subscriber else wish for wish in state.wishes
    )
    granted = replace(state, wishes=wishes)
    return _begin(granted) if isinstance(granted, Unstarted) else Step(granted, ())


def _begin(state: Unstarted) -> Step:
    """Ask the first granted subscriber for the media; without one, wait."""
    for wish in state.wishes:
        if wish.granted:
            sender = wish.subscriber.session
            return Step(Fetching(state.wishes, sender), (FetchMedia(sender),))
    return Step(state, ())


def _leave(state: Wanted, event: Left, now_s: float, limits: Limits) -> Step:
    wishes = tuple(wish for wish in state.wishes if wish.subscriber != event.subscriber)
    if len(wishes) == len(state.wishes):
        return ignored(state, event)
    return _with_fewer(state, wishes, now_s, limits)


def _with_fewer(state: Wanted, wishes: Wishes, now_s: float, limits: Limits) -> Step:
    """What goes on with the wishes that are left: work nobody wants any more is dropped."""
    granted = any(wish.granted for wish in wishes)
    match state:
        case Unstarted():
            return Step(Unstarted(wishes) if wishes else Absent(), ())
        case Fetching():
            if any(wish.granted and wish.subscriber.session == state.sender for wish in wishes):
                return Step(replace(state, wishes=wishes), ())
            return _again(wishes, DropMedia())
        case AwaitingStaging():
            if granted:
                return Step(replace(state, wishes=wishes), ())
            return _again(wishes, WithdrawStaging(), DropMedia())
        case Queued():
            if granted or state.withdrawn:
                return Step(replace(state, wishes=wishes), ())
            return Step(replace(state, wishes=wishes, withdrawn=True), (UnqueueForward(),))
        case Running():
            return Step(replace(state, wishes=wishes), ())
        case Done():
            deadline_s = None if wishes else now_s + limits.dedup_retention_s
            return Step(replace(state, wishes=wishes, deadline_s=deadline_s), ())


def _again(wishes: Wishes, *effects: Effect) -> Step:
    """Back to the beginning with the wishes that are left."""
    if not wishes:
        return Step(Absent(), effects)
    begun = _begin(Unstarted(wishes))
    return Step(begun.state, (*effects, *begun.effects))


def _progress(state: Fetching, event: MediaProgress, now_s: float, limits: Limits) -> Step:
    return Step(replace(state, deadline_s=now_s + limits.media_s), ())


def _media_here(state: Fetching, event: MediaArrived, now_s: float, limits: Limits) -> Step:
    return Step(AwaitingStaging(state.wishes), (AskStaging(),))


def _media_failed(state: Fetching, event: MediaFailed, now_s: float, limits: Limits) -> Step:
    if event.sender != state.sender:
        return ignored(state, event)
    blamed = tuple(w for w in state.wishes if w.subscriber.session == event.sender)
    rest = tuple(w for w in state.wishes if w.subscriber.session != event.sender)
    return _again(rest, DropMedia(), *(TellFailed(wish.subscriber, event.error) for wish in blamed))


def _media_late(state: Fetching, event: TimerExpired, now_s: float, limits: Limits) -> Step:
    error = MediaUnavailable(f"no media within {limits.media_s} s").as_value()
    return _media_failed(state, MediaFailed(state.sender, error), now_s, limits)


def _reserve(state: AwaitingStaging, event: StagingReserved, now_s: float, limits: Limits) -> Step:
    return Step(Queued(state.wishes, event.staged), (QueueForward(event.staged),))


def _reserve_stray(state: AnyState, event: StagingReserved, now_s: float, limits: Limits) -> Step:
    """The reservation came after the wish was withdrawn: nothing was ever written into it."""
    return Step(state, (MarkWriteEnded(event.staged),))


def _refuse_staging(state: AwaitingStaging, event: StagingRefused, now_s: float, limits: Limits) -> Step:
    return _fail_all(state.wishes, event.error, DropMedia())


def _start(state: Queued, event: ForwardStarted, now_s: float, limits: Limits) -> Step:
    return Step(Running(state.wishes, state.staged, now_s + limits.forward_s), ())


def _unqueue(state: Queued, event: ForwardUnqueued, now_s: float, limits: Limits) -> Step:
    if not state.withdrawn:
        return ignored(state, event)
    if any(wish.granted for wish in state.wishes):  # wanted again, and everything is still here
        return Step(replace(state, withdrawn=False), (QueueForward(state.staged),))
    return _again(state.wishes, MarkWriteEnded(state.staged), DropMedia())


def _end_forward(state: Running, event: ForwardEnded, now_s: float, limits: Limits) -> Step:
    if event.error is not None and state.killed:
        # Who joined since was not told that it failed: from the start, with a new worker.
        return _again(state.wishes, MarkWriteEnded(state.staged), DropMedia())
    if event.error is not None:
        return _fail_all(state.wishes, event.error, MarkWriteEnded(state.staged), DropMedia())
    told = tuple(TellReady(wish.subscriber, state.staged) for wish in state.wishes)
    deadline_s = None if state.wishes else now_s + limits.dedup_retention_s
    done = Done(state.wishes, state.staged, deadline_s)
    return Step(done, (MarkWritten(state.staged), DropMedia(), *told))


def _forward_late(state: Running, event: TimerExpired, now_s: float, limits: Limits) -> Step:
    # The slot stays a slot being written until the worker's death (I2).
    error = ForwardFailed(f"no result within {limits.forward_s} s").as_value()
    told = tuple(TellFailed(wish.subscriber, error) for wish in state.wishes)
    killed = replace(state, wishes=(), deadline_s=None, killed=True)
    return Step(killed, (KillWorker(), *told))


def _evict(state: Done, event: Evicted, now_s: float, limits: Limits) -> Step:
    if event.staged != state.staged:
        return ignored(state, event)
    return _again(state.wishes, *(TellEvicted(wish.subscriber) for wish in state.wishes))


def _retire(state: Done, event: TimerExpired, now_s: float, limits: Limits) -> Step:
    return Step(Absent(), (ReleaseStaged(state.staged),))


def _fail_all(wishes: Wishes, error: ErrorValue, *before: Effect) -> Step:
    told = tuple(TellFailed(wish.subscriber, error) for wish in wishes)
    return Step(Absent(), (*before, *told))


_WANTED: Final = (Unstarted, Fetching, AwaitingStaging, Queued, Running, Done)

TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (Absent, Subscribed): _create,
    (Absent, StagingReserved): _reserve_stray,
    **{(wanted, Subscribed): _join for wanted in _WANTED},
    **{(wanted, Granted): _grant for wanted in _WANTED},
    **{(wanted, Left): _leave for wanted in _WANTED},
    **{(kind, StagingReserved): _reserve_stray for kind in (Unstarted, Fetching, Queued, Running, Done)},
    (Fetching, MediaProgress): _progress,
    (Fetching, MediaArrived): _media_here,
    (Fetching, MediaFailed): _media_failed,
    (Fetching, TimerExpired): _media_late,
    (AwaitingStaging, StagingReserved): _reserve,
    (AwaitingStaging, StagingRefused): _refuse_staging,
    (Queued, ForwardStarted): _start,
    (Queued, ForwardUnqueued): _unqueue,
    (Running, ForwardEnded): _end_forward,
    (Running, TimerExpired): _forward_late,
    (Done, Evicted): _evict,
    (Done, TimerExpired): _retire,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: Limits) -> Step:
    """Total and pure (see `machine.py`)."""
    return dispatch(TRANSITIONS, state, event, now_s, limits)
