"""Cost of one release and one lease at a given number of live leases, beside a sorted free list:
of the allocator of one region, and of a pool of four, as a node leases.

`python -m epd.bench.allocator` prints one line per number of live leases.
"""

import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import click

from epd.memory.allocator import ALIGNMENT_NBYTES, Allocator
from epd.memory.pool import Extent, Pool
from epd.memory.region import HostRegion
from epd.protocol.ids import RegionId

LIVE: Final = (100, 1_000, 10_000, 100_000)
_STEPS: Final = 10_000
_ROUNDS: Final = 9
_MAX_NBYTES: Final = 128 * 1024
_REGIONS: Final = 4
_ROOM: Final = 2
"""The region is this many times what is leased on average."""


class Leaser(Protocol):
    def lease(self, nbytes: int) -> int | None: ...
    def release(self, offset: int) -> None: ...


class SortedFreeList:
    """The reference: best fit on a list of (size, start) kept sorted, with coalescing."""

    def __init__(self, nbytes: int) -> None:
        self._by_size = [(nbytes, 0)]
        self._free = {0: nbytes}
        self._start_by_end = {nbytes: 0}
        self._leased: dict[int, int] = {}

    def lease(self, nbytes: int) -> int | None:
        nbytes = (nbytes + ALIGNMENT_NBYTES - 1) & -ALIGNMENT_NBYTES
        index = bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        size, start = self._by_size.pop(index)
        del self._free[start]
        del self._start_by_end[start + size]
        if size > nbytes:
            self._add(start + nbytes, size - nbytes)
        self._leased[start] = nbytes
        return start

    def release(self, offset: int) -> None:
        nbytes = self._leased.pop(offset)
        after = self._free.get(offset + nbytes)
        if after is not None:
            self._remove(offset + nbytes, after)
            nbytes += after
        before = self._start_by_end.get(offset)
        if before is not None:
            size = offset - before
            self._remove(before, size)
            offset, nbytes = before, nbytes + size
        self._add(offset, nbytes)

    def _add(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._free[start] = size
        self._start_by_end[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._free[start]
        del self._start_by_end[start + size]


class _Memory(HostRegion):
    """A region of which nobody touches a byte."""

    address = 0
    view = memoryview(b"")
    fd = None

    def __init__(self, region: int, nbytes: int) -> None:
        self.region = RegionId(region)
        self.nbytes = nbytes


class _PoolLeaser:
    """A pool that leases one item at a time."""

    def __init__(self, nbytes: int) -> None:
        region_nbytes = nbytes // _REGIONS
        self._pool = Pool([_Memory(index, region_nbytes) for index in range(_REGIONS)])
        self._held: dict[int, tuple[Extent, ...]] = {}
        self._next = 0

    def lease(self, nbytes: int) -> int | None:
        extents = self._pool.take((nbytes,))
        if extents is None:
            return None
        self._next += 1
        self._held[self._next] = extents
        return self._next

    def release(self, offset: int) -> None:
        self._pool.give(self._held.pop(offset))


class Row(NamedTuple):
    """Microseconds of processor time for one release and one lease, least of several rounds."""

    live: int
    epd_us: float
    pool_us: float
    reference_us: float

    @property
    def ratio(self) -> float:
        """The allocator's cost over the sorted list's: below 1 is better."""
        return self.epd_us / self.reference_us

    @property
    def pool_ratio(self) -> float:
        """The same of the pool."""
        return self.pool_us / self.reference_us


def measure(live: int) -> Row:
    """All three, in turns, on the same kind of sequence of sizes and victims."""
    rng = random.Random(live)
    churns = [_Churn(build, live, rng.getrandbits(32)) for build in (Allocator, _PoolLeaser, SortedFreeList)]
    rounds = [[churn.round_us() for churn in churns] for _ in range(_ROUNDS)]
    return Row(live, *(min(costs) for costs in zip(*rounds, strict=True)))


def rows(live: Sequence[int] = LIVE) -> list[Row]:
    return [measure(count) for count in live]


class _Churn:
    """An allocator held at `live` leases; each step releases one at random and leases another size."""

    def __init__(self, build: Callable[[int], Leaser], live: int, seed: int) -> None:
        rng = random.Random(seed)
        self._allocator = build(_ROOM * live * _MAX_NBYTES // 2)
        sizes = [rng.randrange(1, _MAX_NBYTES) for _ in range(live + _STEPS)]
        self._held = [self._allocator.lease(sizes.pop()) for _ in range(live)]
        self._steps = [(rng.randrange(live), size) for size in sizes]

    def round_us(self) -> float:
        lease, release, held = self._allocator.lease, self._allocator.release, self._held
        begin_ns = time.process_time_ns()
        for index, nbytes in self._steps:
            offset = held[index]
            if offset is not None:
                release(offset)
            held[index] = lease(nbytes)
        return (time.process_time_ns() - begin_ns) / len(self._steps) / 1e3


def main() -> None:
    for row in rows():
        click.echo(
            f"{row.live:>7} live: allocator {row.epd_us:5.2f} us, pool {row.pool_us:5.2f} us, sorted list"
            f" {row.reference_us:6.2f} us, ratios {row.ratio:4.2f} and {row.pool_ratio:4.2f}"
        )


if __name__ == "__main__":
    main()
