"""Breadth-first exploration of a world, so that the first violation has the shortest trace.

On the ordered channel it also asks for liveness: from every state, when nothing more goes wrong, one fair
run (`settle`) must come to rest with every request answered and nothing held.
"""

from collections.abc import Iterator
from time import monotonic
from typing import Any, NamedTuple, Protocol

from epd.check.invariants import Violation
from epd.check.moves import DEADLINE, Move


class Explorable(Protocol):
    """What the explorer needs of a world; `State` is anything hashable."""

    def initial(self) -> Any: ...
    def moves(self, state: Any) -> Iterator[Move]: ...
    def apply(self, state: Any, move: Move) -> Any: ...
    def violation(self, state: Any) -> Violation | None: ...
    def residue(self, state: Any) -> Violation | None: ...
    def resting_moves(self, state: Any) -> Iterator[Move]: ...


class Found(NamedTuple):
    """A violation and the moves that lead to it."""

    violation: Violation
    trace: tuple[Move, ...]


class Explored(NamedTuple):
    states: int
    transitions: int
    depth: int
    complete: bool
    seconds: float
    found: Found | None


def explore(
    world: Explorable,
    *,
    max_depth: int | None = None,
    max_states: int | None = None,
    liveness: bool = True,
    deadlines: bool = False,
) -> Explored:
    """Every state that can be reached, up to `max_depth` moves or `max_states` states.

    `deadlines`: a run that comes to rest may need a request's own deadline for it.
    """
    started_s = monotonic()
    first = world.initial()
    number = {first: 0}
    states = [first]
    came: list[tuple[int, Move] | None] = [None]
    settled: set[Any] = set()
    index = transitions = depth = 0
    level_end = 1
    complete = True
    found: Found | None = None
    on_the_way: Found | None = None
    while index < len(states):
        if index == level_end:
            depth, level_end = depth + 1, len(states)
            if max_depth is not None and depth >= max_depth:
                complete = False
                break
        state = states[index]
        violation = world.violation(state)
        trail: tuple[Move, ...] = ()
        if violation is None and liveness:
            violation, trail = settle(world, state, settled, deadlines=deadlines)
            if violation is not None and violation.invariant not in {"I3", "I4", "liveness"}:
                # A shorter way to it is still to be found, if it needs no time-out that is out of bounds.
                settled.add(state)
                on_the_way = on_the_way or Found(violation, (*_trace(came, index), *trail))
                violation = None
        if violation is not None:
            found = Found(violation, (*_trace(came, index), *trail))
            break
        if max_states is not None and len(states) > max_states:
            complete = False
            break
        for move in world.moves(state):
            after = world.apply(state, move)
            transitions += 1
            if after not in number:
                number[after] = len(states)
                states.append(after)
                came.append((index, move))
        index += 1
    found = found or on_the_way
    complete = complete and found is None
    return Explored(len(states), transitions, depth, complete, monotonic() - started_s, found)


def settle(
    world: Explorable, state: Any, settled: set[Any], *, deadlines: bool
) -> tuple[Violation | None, tuple[Move, ...]]:
    """Let it run without faults; what is wrong in the end, and the moves that led there.

    Of all that can happen the move of the lowest rank does; time passes only when nothing else can.
    """
    path: dict[Any, None] = {}
    trail: list[Move] = []
    violation: Violation | None = None
    while state not in settled:
        if state in path:
            return Violation("liveness", "it goes round and never comes to rest"), tuple(trail)
        path[state] = None
        violation = world.violation(state)
        if violation is not None:
            return violation, tuple(trail)
        best = _next_at_rest(world, state, deadlines=deadlines)
        if best is None:
            violation = world.residue(state)
            if violation is not None:
                stuck = Violation(violation.invariant, f"at rest, {violation.message}")
                return stuck, tuple(trail)
            break
        state = world.apply(state, best._replace(cost=0))
        trail.append(best)
    settled.update(path)
    return None, ()


def _next_at_rest(world: Explorable, state: Any, *, deadlines: bool) -> Move | None:
    best: Move | None = None
    for move in world.resting_moves(state):
        if move.rank is None or (move.rank >= DEADLINE and not deadlines):
            continue
        if best is None or (best.rank or 0) > move.rank:
            best = move
    return best


def settle_path(world: Explorable, state: Any) -> Iterator[Move]:
    """The moves of the run without faults, a request's own deadline among them only if all else has ended."""
    seen = set()
    while state not in seen:
        seen.add(state)
        move = _next_at_rest(world, state, deadlines=True)
        if move is None:
            return
        yield move
        state = world.apply(state, move._replace(cost=0))


def _trace(came: list[tuple[int, Move] | None], index: int) -> tuple[Move, ...]:
    moves: list[Move] = []
    while (step := came[index]) is not None:
        index, move = step
        moves.append(move)
    return tuple(reversed(moves))
