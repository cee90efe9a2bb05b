"""Two-level segregated fit over one region's address range: lease, release, coalesce, all O(1).

Free blocks hang in bins. The first level of a bin is the power of two of the block's size, the
second cuts that power into 32 equal steps (Masmano et al., "TLSF", 2004). Both levels are numbered
in one sequence and their bitmap is one integer, so the smallest bin whose blocks all suffice is one
shift and one count of trailing zeros. Blocks are linked to their neighbours in address order, which
is how a released block finds those it merges with; two free blocks are never adjacent.

Everything is counted in units of 256 bytes. The memory itself is never touched: no headers in it,
so this serves the memory of a GPU as well.
"""

from typing import Final

ALIGNMENT_NBYTES: Final = 256
_UNIT_SHIFT: Final = 8
_STEP_SHIFT: Final = 5
_STEP_BITS: Final = _STEP_SHIFT + 1
_NOT_FREE: Final = -1


class _Block:
    """One piece of the region, leased or free; `bin` is `_NOT_FREE` while leased."""

    __slots__ = ("bin", "left", "right", "start", "units")

    bin: int
    left: "_Block"
    right: "_Block"

    def __init__(self, start: int, units: int) -> None:
        self.start = start
        self.units = units


def _bin_of(units: int) -> int:
    """The bin of a free block. `lease` and `release` repeat these two lines: a call costs as much."""
    shift = units.bit_length() - _STEP_BITS
    return units if shift <= 0 else (shift << _STEP_SHIFT) + (units >> shift)


class Allocator:
    """Leases aligned extents of one region of `nbytes`; less than 256 bytes at its end are not used.

    The fit is *good*, not best: a lease may be refused although a free block would do if that block
    is less than 1/32 larger than the lease. `largest_free_nbytes` is always granted.
    """

    __slots__ = ("_bins", "_bitmap", "_end_nbytes", "_free_units", "_leased")

    def __init__(self, nbytes: int) -> None:
        assert nbytes >= 0, nbytes
        units = nbytes >> _UNIT_SHIFT
        self._end_nbytes = units << _UNIT_SHIFT
        self._free_units = units
        self._leased: dict[int, _Block] = {}
        # Dictionaries as sets that give their newest back in O(1), and in a repeatable order.
        self._bins: list[dict[_Block, None]] = [{} for _ in range(_bin_of(units) + 1)]
        self._bitmap = 0
        if units:
            whole = _Block(0, units)
            # Two blocks that are never free stand at the ends and save every check for "no neighbour".
            whole.left, whole.right = _Block(0, 0), _Block(units, 0)
            whole.left.bin = whole.right.bin = _NOT_FREE
            whole.bin = _bin_of(units)
            self._bins[whole.bin][whole] = None
            self._bitmap = 1 << whole.bin

    @property
    def free_nbytes(self) -> int:
        """Free bytes, perhaps in pieces."""
        return self._free_units << _UNIT_SHIFT

    @property
    def largest_free_nbytes(self) -> int:
        """A lease of this many bytes is granted now. The largest free block is less than 1/32 larger."""
        if not self._bitmap:
            return 0
        return next(reversed(self._bins[self._bitmap.bit_length() - 1])).units << _UNIT_SHIFT

    @property
    def live(self) -> int:
        """Leases not yet released; those of zero bytes take nothing and are not counted."""
        return len(self._leased)

    def lease(self, nbytes: int) -> int | None:
        """The offset of `nbytes` bytes, 256-byte aligned, or None when no block fits.

        Zero bytes take nothing: their offset is the end of the region.
        """
        assert nbytes >= 0, nbytes
        if nbytes == 0:
            return self._end_nbytes
        units = (nbytes + ALIGNMENT_NBYTES - 1) >> _UNIT_SHIFT
        bitmap = self._bitmap
        shift = units.bit_length() - _STEP_BITS
        # The first bin whose blocks all suffice: `_bin_of`, rounded up.
        at_least = units if shift <= 0 else (shift << _STEP_SHIFT) - (-units >> shift)
        candidates = bitmap >> at_least
        if candidates:
            index = at_least + (candidates & -candidates).bit_length() - 1
        elif self.largest_free_nbytes >= nbytes:
            index = bitmap.bit_length() - 1
        else:
            return None
        blocks = self._bins[index]
        block, _ = blocks.popitem()
        rest = block.units - units
        assert rest >= 0, (block.start, block.units, units)
        self._free_units -= units
        if rest == 0:
            block.bin = _NOT_FREE
            if not blocks:
                self._bitmap = bitmap ^ (1 << index)
            self._leased[block.start] = block
            return block.start << _UNIT_SHIFT
        leased = _Block(block.start, units)
        leased.bin = _NOT_FREE
        leased.left = left = block.left
        leased.right = block
        left.right = block.left = leased
        block.start += units
        block.units = rest
        shift = rest.bit_length() - _STEP_BITS
        block.bin = rest_index = rest if shift <= 0 else (shift << _STEP_SHIFT) + (rest >> shift)
        if rest_index != index:
            if not blocks:
                bitmap ^= 1 << index
            self._bitmap = bitmap | 1 << rest_index
            blocks = self._bins[rest_index]
        blocks[block] = None
        self._leased[leased.start] = leased
        return leased.start << _UNIT_SHIFT

    def release(self, offset: int) -> None:
        """Free the lease at `offset` and merge it with free neighbours.

        Nothing leased there is an assertion: after a double release two leases could overlap.
        """
        if offset == self._end_nbytes:
            return
        block = self._leased.pop(offset >> _UNIT_SHIFT, None)
        assert block is not None and not offset & (ALIGNMENT_NBYTES - 1), f"nothing is leased at {offset}"
        units = block.units
        self._free_units += units
        bins, bitmap = self._bins, self._bitmap
        right = block.right
        if right.bin >= 0:
            blocks = bins[right.bin]
            del blocks[right]
            if not blocks:
                bitmap ^= 1 << right.bin
            units += right.units
            block.right = right = right.right
            right.left = block
        left = block.left
        if left.bin >= 0:
            blocks = bins[left.bin]
            del blocks[left]
            if not blocks:
                bitmap ^= 1 << left.bin
            units += left.units
            left.right, right.left = right, left
            block = left
        block.units = units
        shift = units.bit_length() - _STEP_BITS
        block.bin = index = units if shift <= 0 else (shift << _STEP_SHIFT) + (units >> shift)
        bins[index][block] = None
        self._bitmap = bitmap | 1 << index
