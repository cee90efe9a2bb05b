"""The read machine: one per read of a source into a slot (I1, I2).

Two rules. A read is over only when each of its pieces is terminal by our own engine's word: a
failure or an abort stops the posting of further pieces, and then waits. And the seal is asked for
only after *every* piece has ended well, because no transport promises order between reads.

It has no deadlines: the slot machine owns the time a read may take, and asks for its abort.
`PostPiece` is leave to post; a driver that has not yet posted a piece when the read is aborted
answers `PieceEnded(index, "refused")`, since nothing of it will ever be written.
"""

from collections.abc import Callable
from typing import ClassVar, Final, Literal

import msgspec

from epd.protocol.machine import Effect, Event, Ignored, State, Step, dispatch, ignored

PieceOutcome = Literal["done", "failed", "refused"]
Outcome = Literal["ok", "seal_mismatch", "failed", "refused", "aborted"]


class Limits(msgspec.Struct, frozen=True):
    """How many pieces of one read may be posted at a time."""

    max_posted_pieces: int = 4


class Idle(State):
    """No read is wanted yet."""

    deadline_s: None = None
    final: ClassVar[bool] = False


class Reading(State):
    """`posted` are the pieces our engine may write for; those from `next_piece` on were never posted."""

    pieces: int
    seal: int | None
    next_piece: int
    posted: frozenset[int]
    deadline_s: None = None
    final: ClassVar[bool] = False


class Stopping(State):
    """The read has lost, `outcome` says why first; it waits for the pieces that were posted."""

    outcome: Outcome
    posted: frozenset[int]
    aborting: bool
    deadline_s: None = None
    final: ClassVar[bool] = False


class Sealing(State):
    """All pieces are in; the seal is being read. `aborted`: whatever it says, nobody wants it."""

    seal: int
    aborted: bool = False
    deadline_s: None = None
    final: ClassVar[bool] = False


class Ended(State):
    """Our engine will not touch the slot for this read any more."""

    outcome: Outcome
    deadline_s: None = None
    final: ClassVar[bool] = True


AnyState = Idle | Reading | Stopping | Sealing | Ended
INITIAL: Final = Idle()


class ReadWanted(Event):
    """Read `pieces` pieces, then compare the seal with `seal` (None: this source has none)."""

    pieces: int
    seal: int | None


class PieceEnded(Event):
    """The plane's last word on a piece."""

    index: int
    outcome: PieceOutcome


class AbortWanted(Event):
    """End the read by our own side; it stays open until it is terminal."""


class SealRead(Event):
    """The word read at the seal's place, None if that read failed."""

    value: int | None


AnyEvent = ReadWanted | PieceEnded | AbortWanted | SealRead


class PostPiece(Effect):
    index: int


class AbortPeer(Effect):
    """End the running reads from this read's peer."""


class ReadSeal(Effect):
    """Every piece has ended well: read the seal now."""


class Finish(Effect):
    """The read is terminal. Anything but `ok` means that the slot's bytes are worthless."""

    outcome: Outcome


AnyEffect = PostPiece | AbortPeer | ReadSeal | Finish | Ignored


def _start(_: Idle, event: ReadWanted, now_s: float, limits: Limits) -> Step:
    if event.pieces <= 0:
        return _finish("ok")
    first = min(event.pieces, limits.max_posted_pieces)
    state = Reading(event.pieces, event.seal, first, frozenset(range(first)))
    return Step(state, tuple(PostPiece(index) for index in range(first)))


def _forget(_: Idle, event: AbortWanted, now_s: float, limits: Limits) -> Step:
    return _finish("aborted")


def _advance(state: Reading, event: PieceEnded, now_s: float, limits: Limits) -> Step:
    if event.index not in state.posted:
        return ignored(state, event)
    posted = state.posted - {event.index}
    if event.outcome != "done":
        return _stop(event.outcome, posted, aborting=False)
    if state.next_piece < state.pieces:
        index = state.next_piece
        more = Reading(state.pieces, state.seal, index + 1, posted | {index})
        return Step(more, (PostPiece(index),))
    if posted:
        return Step(Reading(state.pieces, state.seal, state.next_piece, posted), ())
    if state.seal is None:
        return _finish("ok")
    return Step(Sealing(state.seal), (ReadSeal(),))


def _abort(state: Reading, event: AbortWanted, now_s: float, limits: Limits) -> Step:
    return Step(Stopping("aborted", state.posted, aborting=True), (AbortPeer(),))


def _abort_rest(state: Stopping, event: AbortWanted, now_s: float, limits: Limits) -> Step:
    if state.aborting:
        return ignored(state, event)
    return Step(Stopping(state.outcome, state.posted, aborting=True), (AbortPeer(),))


def _drain(state: Stopping, event: PieceEnded, now_s: float, limits: Limits) -> Step:
    if event.index not in state.posted:
        return ignored(state, event)
    return _stop(state.outcome, state.posted - {event.index}, state.aborting)


def _check(state: Sealing, event: SealRead, now_s: float, limits: Limits) -> Step:
    if state.aborted:
        return _finish("aborted")
    if event.value is None:
        return _finish("failed")
    return _finish("ok" if event.value == state.seal else "seal_mismatch")


def _abort_seal(state: Sealing, event: AbortWanted, now_s: float, limits: Limits) -> Step:
    if state.aborted:
        return ignored(state, event)
    return Step(Sealing(state.seal, aborted=True), (AbortPeer(),))


def _stop(outcome: Outcome, posted: frozenset[int], aborting: bool) -> Step:
    # I1: a piece of which nothing is known may still be written, so the read is not over.
    if posted:
        return Step(Stopping(outcome, posted, aborting), ())
    return _finish(outcome)


def _finish(outcome: Outcome) -> Step:
    return Step(Ended(outcome), (Finish(outcome),))


TRANSITIONS: Final[dict[tuple[type, type], Callable[..., Step]]] = {
    (Idle, ReadWanted): _start,
    (Idle, AbortWanted): _forget,
    (Reading, PieceEnded): _advance,
    (Reading, AbortWanted): _abort,
    (Stopping, PieceEnded): _drain,
    (Stopping, AbortWanted): _abort_rest,
    (Sealing, SealRead): _check,
    (Sealing, AbortWanted): _abort_seal,
}


def step(state: AnyState, event: AnyEvent, now_s: float, limits: Limits) -> Step:
    """Total and pure (see `machine.py`)."""
    return dispatch(TRANSITIONS, state, event, now_s, limits)
