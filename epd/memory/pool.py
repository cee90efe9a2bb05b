"""A pool: extents over equal regions, all of a request or none (I7).

Room for a request is taken in one go, so two requests can never each hold what the other waits for.
Memory is only named here; who may use an extent, and when, is the business of the slot machines.
"""

from collections.abc import Sequence
from typing import NamedTuple

from epd.memory.allocator import ALIGNMENT_NBYTES, Allocator
from epd.memory.region import Region, View
from epd.protocol.ids import RegionId, Seal


class Extent(NamedTuple):
    """`nbytes` at `offset` of one region of the pool, 256-byte aligned."""

    region: RegionId
    offset: int
    nbytes: int


def aligned(nbytes: int) -> int:
    """What an item of `nbytes` takes of a pool."""
    """What an extent of so many bytes takes from the pool."""
    return (nbytes + ALIGNMENT_NBYTES - 1) & -ALIGNMENT_NBYTES


class Pool:
    """Owns the room of `regions`, which are equal and numbered from 0 in this order."""

    def __init__(self, regions: Sequence[Region]) -> None:
        assert regions, "a pool without regions"
        assert [region.region for region in regions] == list(range(len(regions)))
        assert len({region.nbytes for region in regions}) == 1, "regions of different sizes"
        self._regions = tuple(regions)
        self._allocators = tuple(Allocator(region.nbytes) for region in regions)
        self.region_nbytes = self._allocators[0].free_nbytes
        """The largest item that an empty pool has room for."""
        self.total_nbytes = self.region_nbytes * len(regions)

    @property
    def free_nbytes(self) -> int:
        """Free bytes of all regions, perhaps in pieces."""
        return sum(allocator.free_nbytes for allocator in self._allocators)

    @property
    def largest_free_nbytes(self) -> int:
        """One item of this many bytes finds room now."""
        return max(allocator.largest_free_nbytes for allocator in self._allocators)

    @property
    def fragmentation(self) -> float:
        """0 while the largest free piece is all that is free, or a region; towards 1 in small pieces."""
        best = min(self.free_nbytes, self.region_nbytes)
        return 1.0 - self.largest_free_nbytes / best if best else 0.0

    def take(self, sizes: Sequence[int]) -> tuple[Extent, ...] | None:
        """One extent for each of `sizes` (bytes), in their order; None, and nothing taken, if one
        finds no room. An item of zero bytes takes nothing.
        """
        if len(sizes) == 1:
            only = self._take_one(sizes[0])
            return None if only is None else (only,)
        if sum(map(aligned, sizes)) > self.free_nbytes:
            return None
        extents: dict[int, Extent] = {}
        for index in _largest_first(sizes):
            extent = self._take_one(sizes[index])
            if extent is None:
                self.give(tuple(extents.values()))
                return None
            extents[index] = extent
        return tuple(extents[index] for index in range(len(sizes)))

    def give(self, extents: Sequence[Extent]) -> None:
        """Free extents that were taken. Giving one twice is an assertion."""
        for extent in extents:
            self._allocators[extent.region].release(extent.offset)

    def fits_empty(self, sizes: Sequence[int]) -> bool:
        """Whether `take` would succeed if nothing were taken. If not, waiting is no use: refuse."""
        room = [self.region_nbytes] * len(self._allocators)
        for index in _largest_first(sizes):
            needed = aligned(sizes[index])
            first = next((region for region, free in enumerate(room) if free >= needed), None)
            if first is None:
                return False
            room[first] -= needed
        return True

    def address(self, extent: Extent) -> int:
        """Virtual address of the extent's first byte in this process."""
        return self._regions[extent.region].address + extent.offset

    def part(self, extent: Extent, nbytes: int) -> View:
        """The extent's first `nbytes`, on whatever device. To be dropped before the extent is given back."""
        return self._regions[extent.region].part(extent.offset, min(nbytes, extent.nbytes))

    def view(self, extent: Extent) -> memoryview:
        """The extent's bytes, writable; of pools of host memory. To be dropped like a `part`."""
        return self._regions[extent.region].view[extent.offset : extent.offset + extent.nbytes]

    def write_seal(self, extent: Extent, at: int, seal: Seal) -> None:
        """Make `seal` what a reader finds `at` bytes behind the extent's first."""
        self._regions[extent.region].write_seal(extent.offset + at, seal)

    def counts(self) -> dict[str, int]:
        """What is held now: `extents` and `used_nbytes` are zero when nothing is, and
        `largest_free_nbytes` is one region. The free memory is as fragmented as its largest piece is
        smaller than a region and than what is free."""
        return {
            "extents": sum(allocator.live for allocator in self._allocators),
            "used_nbytes": self.total_nbytes - self.free_nbytes,
            "free_nbytes": self.free_nbytes,
            "largest_free_nbytes": self.largest_free_nbytes,
            "total_nbytes": self.total_nbytes,
        }

    def _take_one(self, nbytes: int) -> Extent | None:
        # In order, so that the last regions stay empty as long as they can, for large items.
        for region, allocator in enumerate(self._allocators):
            offset = allocator.lease(nbytes)
            if offset is not None:
                return Extent(RegionId(region), offset, nbytes)
        return None


def _largest_first(sizes: Sequence[int]) -> list[int]:
    """Indices, largest size first: small items fit into what large ones leave, not the reverse."""
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
