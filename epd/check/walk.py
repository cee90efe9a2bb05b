"""Random walks through worlds that are too large to be explored: more requests, mailboxes, encoders."""

from random import Random
from typing import Any

from epd.check.explorer import Explorable, Found, settle, settle_path
from epd.check.moves import Move


def walk(
    world: Explorable, random: Random, moves: int, *, fault_chance: float = 0.05
) -> tuple[Any, Found | None]:
    """At most so many random moves, then a run to rest: the last state, and what was wrong.

    A move that costs a fault is taken with `fault_chance`, however many of them there are.
    """
    state = world.initial()
    trace: list[Move] = []
    for _ in range(moves):
        found = world.violation(state)
        if found is not None:
            return state, Found(found, tuple(trace))
        able = list(world.moves(state))
        faults = [move for move in able if move.cost]
        plain = [move for move in able if not move.cost]
        if not able:
            break
        pick = faults if faults and (not plain or random.random() < fault_chance) else plain
        move = random.choice(pick)
        trace.append(move)
        state = world.apply(state, move)
    violation, rest = settle(world, state, set(), deadlines=False)
    if violation is not None:
        return state, Found(violation, (*trace, *rest))
    for move in settle_path(world, state):
        state = world.apply(state, move._replace(cost=0))
    return state, None
