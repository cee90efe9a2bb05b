"""Why the tables of the machines have no handler for a (state, event) cell; every other cell has one.

`dispatch` treats both kinds alike, the event changes nothing and is counted:

- `ignored`: it happens, and is harmless.
- `impossible`: who feeds this machine never does; seen, it is a bug of ours.

`docs/protocol.md` shows the cells, a test compares them with the tables, so none is forgotten.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from epd.protocol import encoder, group, jobs, push, rank, reads, session, slots, sources
from epd.protocol import prefill_types as p
from epd.protocol.machine import TimerExpired


class Reason(NamedTuple):
    kind: Literal["ignored", "impossible"]
    why: str


Cells = Mapping[tuple[type, type], Reason]
Types = tuple[type, ...]


def _cells(*rows: tuple[Reason, Types, Types]) -> Cells:
    found: dict[tuple[type, type], Reason] = {}
    for reason, states, events in rows:
        for cell in ((state, event) for state in states for event in events):
            assert cell not in found, cell
            found[cell] = reason
    return found


def _ignored(why: str) -> Reason:
    return Reason("ignored", why)


def _impossible(why: str) -> Reason:
    return Reason("impossible", why)


_OVER: Final = _ignored("it is over, and the runtime forgets it")
_REPEAT: Final = _ignored("a repeat of what has happened")
_NO_DEADLINE: Final = _impossible("the state has no deadline")
_NEVER_AGAIN: Final = _impossible("its number is never used again")

_ENCODER: Final = _cells(
    (
        _ignored("no attempt is open: it has ended, or was never known"),
        (encoder.Idle,),
        (encoder.GrantReceived, encoder.ReceiptReceived, encoder.CancelReceived),
    ),
    (
        _ignored("the attempt left this job while the news was on its way"),
        (encoder.Idle,),
        (encoder.JobReady, encoder.JobEvicted, encoder.JobFailed, encoder.SourceGone),
    ),
    (_ignored("nothing is held"), (encoder.Idle,), (encoder.SessionEnded, encoder.DrainWanted)),
    (_NO_DEADLINE, (encoder.Idle,), (TimerExpired,)),
)

_GROUP: Final = _cells(
    (
        _ignored("there is no group, or no longer"),
        (group.Unformed,),
        (
            *(group.RankJoined, group.RankLost, group.LeaseTaken, group.ReadWanted, group.DeliverWanted),
            *(group.EndWanted, group.ReturnWanted),
            *(group.RankApplied, group.RankRead, group.RankReleased, group.RankFreed),
        ),
    ),
    (_impossible("a node forms one group"), (group.Forming, group.Leading), (group.GroupFormed,)),
    (
        _impossible("no request is taken before every rank is there"),
        (group.Forming,),
        (group.LeaseTaken, group.ReadWanted, group.DeliverWanted, group.EndWanted, group.ReturnWanted),
    ),
    (
        _ignored("nothing was told to any rank yet"),
        (group.Forming,),
        (group.RankApplied, group.RankRead, group.RankReleased, group.RankFreed),
    ),
    (
        _OVER,
        (group.Over,),
        (
            *(group.GroupFormed, group.RankJoined, group.RankLost, group.LeaseTaken, group.ReadWanted),
            *(group.DeliverWanted, group.EndWanted, group.ReturnWanted),
            *(group.RankApplied, group.RankRead, group.RankReleased, group.RankFreed),
        ),
    ),
)

_NOT_FETCHING: Final = (
    *(jobs.Absent, jobs.Unstarted, jobs.AwaitingStaging),
    *(jobs.Queued, jobs.Running, jobs.Done),
)
_JOBS: Final = _cells(
    (_ignored("the wish ended with the job"), (jobs.Absent,), (jobs.Granted, jobs.Left)),
    (
        _ignored("the media were dropped, or are all here"),
        _NOT_FETCHING,
        (jobs.MediaProgress, jobs.MediaArrived, jobs.MediaFailed),
    ),
    (
        _ignored("the wish for room was withdrawn while the refusal was on its way"),
        (jobs.Absent, jobs.Unstarted, jobs.Fetching, jobs.Queued, jobs.Running, jobs.Done),
        (jobs.StagingRefused,),
    ),
    (
        _impossible("no forward of it is queued"),
        (jobs.Absent, jobs.Unstarted, jobs.Fetching, jobs.AwaitingStaging, jobs.Running, jobs.Done),
        (jobs.ForwardStarted, jobs.ForwardUnqueued),
    ),
    (
        _impossible("no forward of it runs"),
        (jobs.Absent, jobs.Unstarted, jobs.Fetching, jobs.AwaitingStaging, jobs.Queued, jobs.Done),
        (jobs.ForwardEnded,),
    ),
    (
        _ignored("the result was released while the news was on its way"),
        (jobs.Absent, jobs.Unstarted, jobs.Fetching, jobs.AwaitingStaging, jobs.Queued, jobs.Running),
        (jobs.Evicted,),
    ),
    (_NO_DEADLINE, (jobs.Absent, jobs.Unstarted, jobs.AwaitingStaging, jobs.Queued), (TimerExpired,)),
)

_ABOUT_ATTEMPTS: Final = (
    *(p.EncoderChosen, p.MetadataReceived, p.SourcesReady, p.ReadEnded, p.AttemptFailed),
    *(p.EncoderAvailable, p.SessionEnded),
)
_LIVE: Final = (p.Negotiating, p.AwaitingRoom, p.Filling)
_PREFILL: Final = _cells(
    (
        _ignored("the request has ended and was forgotten"),
        (p.New,),
        (*_ABOUT_ATTEMPTS, p.RoomRefused, p.CancelWanted, p.Taken, p.Released),
    ),
    (_NO_DEADLINE, (p.New,), (TimerExpired,)),
    (_NEVER_AGAIN, (*_LIVE, p.Delivered, p.Consumed), (p.Submitted,)),
    (_impossible("room was not asked for yet"), (p.Negotiating,), (p.RoomRefused,)),
    (_impossible("room was given"), (p.Filling, p.Delivered, p.Consumed), (p.RoomRefused,)),
    (_impossible("nothing was delivered"), _LIVE, (p.Taken, p.Released)),
    (_ignored("all is read: no attempt is open"), (p.Delivered, p.Consumed), _ABOUT_ATTEMPTS),
    (_ignored("once delivered, only the release frees"), (p.Delivered, p.Consumed), (p.CancelWanted,)),
    (_REPEAT, (p.Consumed,), (p.Taken,)),
    (
        _OVER,
        (p.Ended,),
        (
            *(p.Submitted, *_ABOUT_ATTEMPTS, p.RoomRefused, p.CancelWanted),
            *(p.Taken, p.Released, TimerExpired),
        ),
    ),
)
_PREFILL_PARTS: Final = _cells(
    (
        _ignored("no attempt is open"),
        (p.Placing,),
        (p.MetadataReceived, p.SourcesReady, p.ReadEnded, p.AttemptFailed),
    ),
    (_ignored("an attempt is open already"), (p.Requested, p.Sized, p.Granted), (p.EncoderChosen,)),
    (
        _ignored("nothing was granted in this attempt"),
        (p.Requested, p.Sized),
        (p.SourcesReady, p.ReadEnded),
    ),
    (_REPEAT, (p.Sized, p.Granted), (p.MetadataReceived,)),
    (
        _ignored("every item of it is whole"),
        (p.Read,),
        (p.EncoderChosen, p.MetadataReceived, p.SourcesReady, p.ReadEnded, p.AttemptFailed),
    ),
)

_RANK: Final = _cells(
    (
        _ignored("it is in no group, or no longer"),
        (rank.Outside,),
        (rank.EntryReceived, rank.GroupEnded),
    ),
    (_impossible("a rank joins once in its life"), (rank.Following,), (rank.Joined,)),
    (_OVER, (rank.Over,), (rank.Joined, rank.EntryReceived, rank.GroupEnded)),
)

_READS: Final = _cells(
    (_impossible("nothing was posted"), (reads.Idle,), (reads.PieceEnded, reads.SealRead)),
    (_NEVER_AGAIN, (reads.Reading, reads.Stopping, reads.Sealing), (reads.ReadWanted,)),
    (_impossible("the seal was not asked for"), (reads.Reading, reads.Stopping), (reads.SealRead,)),
    (_impossible("every piece has ended"), (reads.Sealing,), (reads.PieceEnded,)),
    (
        _OVER,
        (reads.Ended,),
        (reads.ReadWanted, reads.PieceEnded, reads.AbortWanted, reads.SealRead),
    ),
)

_PUSH_WORDS: Final = (push.WriteEnded, push.WritesDrained, push.AbortWanted)
_PUSH: Final = _cells(
    (_NEVER_AGAIN, (push.Opening, push.Granted, push.Writing), (push.WindowWanted,)),
    (_NEVER_AGAIN, (push.Revoking, push.Held, push.Fenced), (push.WindowWanted,)),
    (
        _impossible("it is opened once, and revoked once"),
        (push.Absent, push.Granted, push.Writing, push.Revoking, push.Held, push.Fenced),
        (push.WindowOpened,),
    ),
    (
        _impossible("it is opened once, and revoked once"),
        (push.Absent, push.Opening, push.Granted, push.Writing, push.Held, push.Fenced),
        (push.WindowRevoked,),
    ),
    (
        _ignored("no write of it is open"),
        (push.Absent, push.Opening, push.Granted, push.Fenced),
        _PUSH_WORDS,
    ),
    (_ignored("only the fence ends its writes now"), (push.Revoking,), _PUSH_WORDS),
    (_ignored("nothing ends its writes"), (push.Held,), _PUSH_WORDS),
    (_REPEAT, (push.Absent, push.Revoking, push.Held, push.Fenced), (push.SessionOver,)),
    (
        _NO_DEADLINE,
        (push.Absent, push.Opening, push.Granted, push.Revoking, push.Held, push.Fenced),
        (TimerExpired,),
    ),
)

_SESSION: Final = _cells(
    (
        _ignored("the session is over; this was on its way"),
        (session.Absent,),
        (
            *(session.WelcomeReceived, session.RejectedReceived, session.BodyMalformed),
            *(session.MediaConnected, session.ConnectionLost, session.CloseWanted),
            *(session.Replaced, session.ProbeWanted),
        ),
    ),
    (_NO_DEADLINE, (session.Absent,), (TimerExpired,)),
    (_NEVER_AGAIN, (session.Dialling, session.Open, session.Ending), (session.Dialled,)),
    (
        _impossible("a greeting that is not the first frame, or not this side's, is a malformed body"),
        (session.Dialling, session.Open, session.Ending),
        (session.HelloReceived,),
    ),
    (
        _impossible("a greeting that is not the first frame, or not this side's, is a malformed body"),
        (session.Open, session.Ending),
        (session.WelcomeReceived,),
    ),
    (
        _impossible("the media lane is dialled after the welcome, by the dialler"),
        (session.Dialling, session.Ending),
        (session.MediaConnected,),
    ),
    (
        _impossible("only a session that is in force is replaced"),
        (session.Dialling, session.Ending),
        (session.Replaced,),
    ),
    (_impossible("only the listener probes"), (session.Dialling,), (session.ProbeWanted,)),
    (
        _ignored("it has ended; only the connection's end is waited for"),
        (session.Ending,),
        (session.BodyMalformed, session.CloseWanted),
    ),
    (
        _OVER,
        (session.Ended,),
        (
            *(session.Dialled, session.HelloReceived, session.WelcomeReceived, session.FrameReceived),
            *(session.FrameSent, session.RejectedReceived, session.BodyMalformed),
            *(session.MediaConnected, session.ConnectionLost, session.CloseWanted),
            *(session.Replaced, session.ProbeWanted, TimerExpired),
        ),
    ),
)

_SLOTS: Final = _cells(
    (
        _ignored("the lease was given back: nobody waits for this read"),
        (slots.Free, slots.Quarantined),
        (slots.ReadWanted,),
    ),
    (
        _impossible("every read was terminal before it became free"),
        (slots.Free,),
        (slots.ReadPosted, slots.ReadTerminal),
    ),
    (_REPEAT, (slots.Free, slots.Quarantined), (slots.LeaseReturned,)),
    (_NO_DEADLINE, (slots.Free,), (TimerExpired,)),
    (_NEVER_AGAIN, (slots.Leased, slots.Quarantined), (slots.LeaseTaken,)),
)

_SOURCES: Final = _cells(
    (_REPEAT, (sources.Vacant, sources.Stable), (sources.Written, sources.WriteEnded)),
    (
        _ignored("it was freed while this was on its way"),
        (sources.Vacant,),
        (sources.Unpinned, sources.EvictWanted, sources.ReleaseWanted),
    ),
    (_ignored("a forward still writes into it"), (sources.Writing,), (sources.EvictWanted,)),
    (_NEVER_AGAIN, (sources.Writing, sources.Stable), (sources.Reserved,)),
    (_NO_DEADLINE, (sources.Vacant, sources.Writing, sources.Stable), (TimerExpired,)),
)

UNHANDLED: Final[Mapping[tuple[str, str], Cells]] = {
    ("encoder", "TRANSITIONS"): _ENCODER,
    ("group", "TRANSITIONS"): _GROUP,
    ("jobs", "TRANSITIONS"): _JOBS,
    ("prefill", "TRANSITIONS"): _PREFILL,
    ("prefill", "PART_TRANSITIONS"): _PREFILL_PARTS,
    ("push", "TRANSITIONS"): _PUSH,
    ("rank", "TRANSITIONS"): _RANK,
    ("reads", "TRANSITIONS"): _READS,
    ("session", "TRANSITIONS"): _SESSION,
    ("slots", "TRANSITIONS"): _SLOTS,
    ("sources", "TRANSITIONS"): _SOURCES,
}
"""By machine and table."""
