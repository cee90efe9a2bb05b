"""Memory of the data planes: our own regions, read-only mappings, and the checks of pieces.

Own regions are `mmap` objects, so that a view a consumer still holds keeps its mapping alive after
the plane was closed. Mappings of a peer's memory, and those that an engine is given, are raw: only
their address counts, and they must be unmappable at a known moment.
"""

import bisect
import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence

import xxhash

from epd.dataplane.base import Piece
from epd.memory.available import available_memory
from epd.memory.region import HostRegion, Region
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import RegionId

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10  # not in the mmap module
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class OwnRegion(HostRegion):
    """A region of our own (see `epd.memory.region.Region`). `fd` is None for anonymous memory."""

    def __init__(self, region: RegionId, memory: mmap.mmap, fd: int | None) -> None:
        self.region = region
        self.nbytes = len(memory)
        self.fd = fd
        anchor = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(anchor)
        self._view: memoryview | None = memoryview(memory)

    @property
    def view(self) -> memoryview:
        """Writable bytes of the whole region. Raises `DataPlaneError` once the plane is closed."""
        if self._view is None:
            raise DataPlaneError(f"region {self.region} belongs to a data plane that was closed")
        return self._view

    def reopen_read_only(self) -> int:
        """A new descriptor of this memory through which nobody can map it writable.

        The caller closes it. Raises `OSError`.
        """
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of the memory: unmapped now, or with the last view that a consumer still holds."""
        self._view = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def allocate_private(count: int, region_nbytes: int) -> list[OwnRegion]:
    """The receive pool: pre-faulted memory that nobody else can reach.

    Raises `DataPlaneError` with sizes and the settings to change.
    """
    _refuse_what_does_not_fit("pool", count, region_nbytes)
    regions: list[OwnRegion] = []
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    try:
        regions.extend(
            OwnRegion(RegionId(index), mmap.mmap(-1, region_nbytes, flags), None) for index in range(count)
        )
    except (OSError, ValueError) as error:
        for region in regions:
            region.close()
        raise _no_memory("pool", count, region_nbytes, str(error)) from error
    return regions


def allocate_shared(count: int, region_nbytes: int, setting: str = "staging") -> list[OwnRegion]:
    """The pool of that setting: pre-faulted memfds that can neither shrink nor grow.

    Raises `DataPlaneError` with sizes and the settings to change.
    """
    _refuse_what_does_not_fit(setting, count, region_nbytes)
    regions: list[OwnRegion] = []
    try:
        regions.extend(_shared(RegionId(index), region_nbytes) for index in range(count))
    except (OSError, ValueError) as error:
        for region in regions:
            region.close()
        raise _no_memory(setting, count, region_nbytes, str(error)) from error
    return regions


def _shared(region: RegionId, nbytes: int) -> OwnRegion:
    fd = os.memfd_create(f"epd-{region}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Not by MAP_POPULATE alone: that hides a lack of memory, which is SIGBUS later.
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        # So that who was given it to read cannot open it again to write (root could).
        os.fchmod(fd, 0o400)
        return OwnRegion(region, mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), fd)
    except BaseException:
        os.close(fd)
        raise


def _refuse_what_does_not_fit(setting: str, count: int, region_nbytes: int) -> None:
    """Asking the kernel for it would not fail but take all there is, until something is killed."""
    available = available_memory()
    if region_nbytes <= 0 or count * region_nbytes > available.nbytes:
        reason = f"{available.nbytes} B are available, by {available.reason}"
        raise _no_memory(setting, count, region_nbytes, reason)


def _no_memory(setting: str, count: int, region_nbytes: int, reason: str) -> DataPlaneError:
    return DataPlaneError(
        f"{count} regions of {region_nbytes} B ({count * region_nbytes} B in all) do not fit: {reason};"
        f" lower {setting}.regions or {setting}.region_nbytes",
        count=count,
        region_nbytes=region_nbytes,
    )


class ReadOnlyMapping:
    """A memfd mapped without the right to write; `fd` may be closed afterwards."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Raises `OSError`."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.address = _map(None, nbytes, mmap.PROT_READ, flags, fd)
        self.nbytes = nbytes

    def close(self) -> None:
        """Unmap, once."""
        if self.nbytes:
            _libc.munmap(self.address, self.nbytes)
            self.nbytes = 0


class Window:
    """A memfd mapped once more, writable, until it is shut. `fd` may be closed afterwards."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Raises `OSError`."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.address = _map(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)
        self.nbytes = nbytes

    def shut(self) -> None:
        """Put nothing in its place: its addresses stay taken, and whoever uses them gets EFAULT.

        Over when it returns: the kernel waits for copies into these pages that are under way. Raises
        `OSError`; it may still be open then.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _map(self.address, self.nbytes, 0, flags, -1)


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if got in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(got)


def is_sealed(fd: int, nbytes: int) -> bool:
    """Whether a received descriptor is memory of `nbytes` that nobody can shrink under us."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd at all
        return False
    return seals & _SEALS == _SEALS and os.fstat(fd).st_size == nbytes


def host_digest(address: int, nbytes: int) -> bytes:
    """xxh3-128 of memory of this process."""
    return xxhash.xxh3_128_digest(memoryview((ctypes.c_char * nbytes).from_address(address)))


class LocalMemory:
    """Where reads may write: the regions of this plane, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, regions: Iterable[Region]) -> None:
        for region in regions:
            at = bisect.bisect(self._starts, region.address)
            self._starts.insert(at, region.address)
            self._ends.insert(at, region.address + region.nbytes)

    def holds(self, address: int, nbytes: int) -> bool:
        at = bisect.bisect(self._starts, address) - 1
        return at >= 0 and nbytes >= 0 and address + nbytes <= self._ends[at]


class PeerMemory:
    """The regions a peer announced: `(region, address, nbytes)`."""

    def __init__(self, regions: Sequence[tuple[int, int, int]]) -> None:
        self._regions = {region: (address, nbytes) for region, address, nbytes in regions}
        self.first_address = regions[0][1] if regions else 0

    def address_of(self, piece: Piece) -> int | None:
        """Where the piece lies, None if not wholly inside the region it names."""
        known = self._regions.get(piece.region)
        if known is None:
            return None
        address, nbytes = known
        if piece.offset < 0 or piece.nbytes < 0 or piece.offset + piece.nbytes > nbytes:
            return None
        return address + piece.offset
