"""The read machine: a read ends when every piece has, and the seal is read last."""

from itertools import permutations
from typing import Literal

import pytest

from epd.protocol import reads
from epd.protocol.machine import Effect, Ignored
from epd.protocol.reads import (
    AbortPeer,
    AbortWanted,
    Ended,
    Finish,
    PieceEnded,
    PostPiece,
    ReadSeal,
    ReadWanted,
    SealRead,
)

SEAL = 0x5EA1
LIMITS = reads.Limits(max_posted_pieces=2)


class Machine:
    """Feeds events and checks, after each, that nothing is finished while a piece may be written."""

    def __init__(self) -> None:
        self.state: reads.AnyState = reads.INITIAL
        self.posted: set[int] = set()
        self.effects: list[Effect] = []

    def feed(self, *events: reads.AnyEvent) -> list[Effect]:
        told: list[Effect] = []
        for event in events:
            self.state, effects = reads.step(self.state, event, 0.0, LIMITS)
            if isinstance(event, PieceEnded):
                self.posted.discard(event.index)
            for effect in effects:
                if isinstance(effect, PostPiece):
                    assert effect.index not in self.posted
                    self.posted.add(effect.index)
                if isinstance(effect, Finish | ReadSeal):
                    assert not self.posted
            assert len(self.posted) <= LIMITS.max_posted_pieces
            told += effects
        self.effects += told
        return told


@pytest.fixture
def machine() -> Machine:
    return Machine()


def done(*indices: int) -> list[PieceEnded]:
    return [PieceEnded(index, "done") for index in indices]


def test_an_empty_read_ends_well_at_once(machine: Machine) -> None:
    assert machine.feed(ReadWanted(0, SEAL)) == [Finish("ok")]
    assert machine.state.final


def test_no_more_pieces_are_posted_than_allowed(machine: Machine) -> None:
    assert machine.feed(ReadWanted(4, SEAL)) == [PostPiece(0), PostPiece(1)]
    assert machine.feed(*done(1)) == [PostPiece(2)]
    assert machine.feed(*done(0)) == [PostPiece(3)]
    assert machine.feed(*done(3)) == []


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_the_seal_is_read_after_the_last_piece_whichever_that_is(
    machine: Machine, order: tuple[int, ...]
) -> None:
    machine.feed(ReadWanted(2, SEAL))
    assert machine.feed(*done(order[0])) == []
    assert machine.feed(*done(order[1])) == [ReadSeal()]
    assert machine.feed(SealRead(SEAL)) == [Finish("ok")]


def test_another_seal_means_a_source_reused_too_early(machine: Machine) -> None:
    machine.feed(ReadWanted(1, SEAL), *done(0))
    assert machine.feed(SealRead(SEAL + 1)) == [Finish("seal_mismatch")]


def test_a_seal_that_cannot_be_read_proves_nothing(machine: Machine) -> None:
    machine.feed(ReadWanted(1, SEAL), *done(0))
    assert machine.feed(SealRead(None)) == [Finish("failed")]


def test_without_a_seal_the_last_piece_ends_the_read(machine: Machine) -> None:
    assert machine.feed(ReadWanted(1, None), *done(0)) == [PostPiece(0), Finish("ok")]


@pytest.mark.parametrize("outcome", ["failed", "refused"])
def test_a_lost_piece_posts_nothing_more_and_waits_for_the_others(
    machine: Machine, outcome: Literal["failed", "refused"]
) -> None:
    machine.feed(ReadWanted(4, SEAL))
    assert machine.feed(PieceEnded(0, outcome)) == []
    assert not machine.state.final
    assert machine.feed(*done(1)) == [Finish(outcome)]


def test_the_first_loss_names_the_outcome(machine: Machine) -> None:
    machine.feed(ReadWanted(2, SEAL), PieceEnded(0, "refused"), AbortWanted())
    assert machine.feed(PieceEnded(1, "failed")) == [Finish("refused")]


def test_an_abort_waits_for_every_posted_piece(machine: Machine) -> None:
    machine.feed(ReadWanted(4, SEAL))
    assert machine.feed(AbortWanted()) == [AbortPeer()]
    assert machine.feed(AbortWanted()) == [Ignored("AbortWanted")]
    assert machine.feed(PieceEnded(1, "failed")) == []
    assert machine.feed(*done(0)) == [Finish("aborted")]


def test_a_failed_read_whose_rest_hangs_can_be_aborted(machine: Machine) -> None:
    machine.feed(ReadWanted(2, SEAL), PieceEnded(0, "failed"))
    assert machine.feed(AbortWanted()) == [AbortPeer()]
    assert machine.feed(PieceEnded(1, "failed")) == [Finish("failed")]


def test_an_aborted_read_is_never_ok_whatever_its_seal_says(machine: Machine) -> None:
    machine.feed(ReadWanted(1, SEAL), *done(0))
    assert machine.feed(AbortWanted()) == [AbortPeer()]
    assert not machine.state.final
    assert machine.feed(SealRead(SEAL)) == [Finish("aborted")]


def test_repeats_and_strangers_change_nothing(machine: Machine) -> None:
    machine.feed(ReadWanted(3, SEAL), *done(0))
    before = machine.state
    assert machine.feed(*done(0), SealRead(SEAL), PieceEnded(9, "done")) == [
        Ignored("PieceEnded"),
        Ignored("SealRead"),
        Ignored("PieceEnded"),
    ]
    assert machine.state == before


EVENTS: list[reads.AnyEvent] = [
    ReadWanted(3, SEAL),
    ReadWanted(1, None),
    *(PieceEnded(i, o) for i in range(3) for o in ("done", "failed", "refused")),
    AbortWanted(),
    SealRead(SEAL),
    SealRead(1),
    SealRead(None),
]


def test_every_reachable_state_keeps_the_rules_and_can_end() -> None:
    """Breadth first over all events: one `Finish`, never while a piece is out, `ok` only by the seal."""
    seen: set[reads.AnyState] = {reads.INITIAL}
    edges: dict[reads.AnyState, set[reads.AnyState]] = {}
    frontier: list[reads.AnyState] = [reads.INITIAL]
    while frontier:
        state = frontier.pop()
        edges[state] = set()
        for event in EVENTS:
            after, effects = reads.step(state, event, 0.0, LIMITS)
            outcomes = [e.outcome for e in effects if isinstance(e, Finish)]
            assert bool(outcomes) == (isinstance(after, Ended) and not isinstance(state, Ended))
            out: frozenset[int] = getattr(state, "posted", frozenset())
            if isinstance(event, PieceEnded):
                out = out - {event.index}
            if outcomes or ReadSeal() in effects:
                assert not out
            if outcomes == ["ok"] and getattr(state, "seal", None) is not None:
                assert event == SealRead(SEAL)
            edges[state].add(after)
            if after not in seen:
                seen.add(after)
                frontier.append(after)
    can_end = {state for state in seen if state.final}
    while more := {s for s in seen - can_end if edges[s] & can_end}:
        can_end |= more
    assert can_end == seen
