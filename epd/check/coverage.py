"""Which cells of the machines' tables the explorations visited."""

from collections.abc import Iterable
from typing import NamedTuple

from epd.check.configurations import Result
from epd.check.machines import Cell, cells_of, shipped
from epd.check.unreachable import IMPOSSIBLE, UNREACHABLE


class Coverage(NamedTuple):
    """Cells by (machine, state, event); `missing` are neither visited nor listed;
    `wrongly_listed` are visited although they are called unreachable or impossible, or do not exist."""

    visited: int
    total: int
    unreachable: tuple[tuple[Cell, str], ...]
    missing: tuple[Cell, ...]
    wrongly_listed: tuple[Cell, ...]


def coverage_of(results: Iterable[Result]) -> Coverage:
    cells = cells_of(shipped(2))
    seen: frozenset[Cell] = frozenset().union(*(result.visited for result in results))
    visited = seen & cells
    return Coverage(
        len(visited),
        len(cells),
        tuple(sorted(UNREACHABLE.items())),
        tuple(sorted(cells - visited - UNREACHABLE.keys())),
        tuple(sorted((visited & UNREACHABLE.keys()) | (UNREACHABLE.keys() - cells) | (seen & IMPOSSIBLE))),
    )
