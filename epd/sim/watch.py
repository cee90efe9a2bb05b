"""Looks at a pool from outside: whoever gives room back, nobody writes there any more (I1, I2)."""

from collections.abc import Callable, Sequence

from epd.memory.pool import Extent, Pool

Writes = Callable[[int, int], bool]
"""Whether somebody may still write into so many bytes from that address on."""


class PoolWatch:
    """`violated` is told of room that is given back too early."""

    def __init__(self, pool: Pool, writes: Writes, violated: Callable[[str], None], name: str) -> None:
        self._pool = pool
        self._writes = writes
        self._violated = violated
        self._name = name
        self._give = pool.give
        pool.give = self.give  # type: ignore[method-assign]  # a look at every call, nothing else

    def give(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            if self._writes(self._pool.address(extent), extent.nbytes):
                self._violated(f"{self._name} gave {extent.nbytes} B back into which somebody still writes")
        self._give(extents)


def overlap(start: int, nbytes: int, other: int, other_nbytes: int) -> bool:
    """Of two ranges of addresses."""
    return start < other + other_nbytes and other < start + nbytes
