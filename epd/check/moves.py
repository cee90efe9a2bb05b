"""What can happen inside of a node, next: the engine, the worker, the consumer, timers, faults."""

from collections.abc import Iterator
from typing import NamedTuple

from epd.check.encoder_node import EncoderState
from epd.check.node import Words
from epd.check.prefill_node import PrefillState
from epd.check.setup import Setup
from epd.protocol import encoder, jobs, reads, sources
from epd.protocol import prefill_types as t

TURN, WORK, PAUSE, RETAIN, GIVE_UP, DEADLINE = 0, 1, 3, 5, 6, 8


class Move(NamedTuple):
    """`cost` in faults. `rank`: when time goes on and nothing more goes wrong, the lowest comes first;
    None then never comes by itself."""

    cost: int
    rank: int | None
    words: Words


def prefill_moves(setup: Setup, state: PrefillState) -> tuple[Move, ...]:
    moves = [Move(0, TURN, ("prefill-turn", actor)) for actor in dict.fromkeys(a for a, _ in state.mail)]
    for number, request in state.requests:
        moves += _request_moves(setup, number, request)
    for lease, slot in state.slots:
        for deadline_s in sorted({r.deadline_s for r in slot.reads if r.deadline_s is not None}):
            cost = 1 if "read-timeout" in setup.kinds else 99
            moves.append(Move(cost, GIVE_UP, ("read-timeout", lease, int(deadline_s))))
    for read in state.reads:
        moves += _read_moves(setup, read.read, read.machine, loose=read.loose, stuck=read.stuck)
    if "restart buffers" in setup.broken and state.reads:
        moves.append(Move(0, None, ("restart-buffers",)))
    return tuple(moves)


def _request_moves(setup: Setup, number: int, request: t.AnyState) -> Iterator[Move]:
    if isinstance(request, t.Delivered):
        yield Move(0, WORK, ("take", number))
    if isinstance(request, t.Delivered | t.Consumed):
        yield Move(0, WORK, ("release", number))
        if request.deadline_s is not None and "warning" in setup.kinds:
            yield Move(1, None, ("timeout", number, "warning"))
    if "cancel" in setup.kinds:
        yield Move(1, None, ("cancel", number))
    parts = getattr(request, "parts", ())
    if not parts:
        return
    if any(isinstance(part, t.Placing) and part.deadline_s is not None for part in parts):
        yield Move(0, PAUSE, ("timeout", number, "pause"))
    early = 1 if "timeout" in setup.kinds else 99
    if any(isinstance(part, t.Requested) for part in parts):
        yield Move(early, GIVE_UP, ("timeout", number, "metadata"))
    if isinstance(request, t.AwaitingRoom):
        yield Move(early, GIVE_UP, ("timeout", number, "room"))
    yield Move(early, DEADLINE, ("timeout", number, "deadline"))


def _read_moves(
    setup: Setup, read: int, machine: reads.AnyState, *, loose: bool, stuck: bool
) -> Iterator[Move]:
    posted = sorted(getattr(machine, "posted", ()))
    if isinstance(machine, reads.Idle):
        yield Move(0, WORK, ("post", read))
        return
    if stuck and not loose:
        return
    fails = 0 if loose else 1 if "read-fails" in setup.kinds else 99
    for index in posted:
        yield Move(0, WORK, ("piece", read, index, "done"))
        yield Move(fails, None, ("piece", read, index, "failed"))
    if isinstance(machine, reads.Sealing):
        yield Move(0, WORK, ("seal", read))
        yield Move(fails, None, ("seal-fails", read))
    if "stick-read" in setup.kinds and not loose:
        yield Move(1, None, ("stick", read))


def encoder_moves(setup: Setup, state: EncoderState) -> tuple[Move, ...]:
    moves = [Move(0, TURN, ("encoder-turn", actor)) for actor in dict.fromkeys(a for a, _ in state.mail)]
    moves += _worker_moves(setup, state)
    kinds = setup.kinds
    for key, part in state.parts:
        if isinstance(part, encoder.Open):
            early = 1 if "part-deadline" in kinds else 99
            moves.append(Move(early, DEADLINE, ("part-deadline", *key)))
    for kind, job in state.jobs:
        if job.deadline_s is None:
            continue
        if isinstance(job, jobs.Done):
            moves.append(Move(0, RETAIN, ("job-timeout", kind)))
        else:
            early = 1 if "job-timeout" in kinds else 99
            moves.append(Move(early, GIVE_UP, ("job-timeout", kind)))
    if "evict" in kinds:
        moves += [
            Move(1, None, ("evict", staged))
            for staged, source in state.sources
            if isinstance(source, sources.Stable) and not source.pins
        ]
    if "drain" in kinds and not state.draining:
        moves.append(Move(1, None, ("drain",)))
    if "bad-media" in kinds:
        moves += [Move(1, None, ("bad-media", session, kind)) for kind, session in state.fetching]
    return tuple(moves)


def _worker_moves(setup: Setup, state: EncoderState) -> Iterator[Move]:
    running = state.running
    if running is None:
        if state.queue:
            yield Move(0, WORK, ("start",))
        return
    if running.killed:
        yield Move(0, WORK, ("finish", "died"))
    if running.stuck:
        return
    if running.written < setup.rows[running.kind]:
        yield Move(0, WORK, ("write",))
    else:
        yield Move(0, WORK, ("finish", "ok"))
    if "forward-fails" in setup.kinds:
        yield Move(1, None, ("finish", "failed"))
    if "stick-forward" in setup.kinds:
        yield Move(1, None, ("stick-forward",))
