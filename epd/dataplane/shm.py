"""The `shm` plane: same host, host memory, nothing but the standard library.

Staging regions are sealed memfds, handed to readers over a Unix socket with an unguessable abstract
name (our `segment`) and to nobody of another user; readers map them read-only. A read is one copy
by our own thread: synchronous, so it is never unknown, and nothing of it outlives a dead or stopped
peer. Its bytes are visible to this process when `post` returns.
"""

import ctypes
from collections.abc import Sequence

import structlog

from epd.dataplane.base import Piece, Posted, ReadState
from epd.dataplane.handover import Handover, map_handed_over
from epd.dataplane.mappings import (
    LocalMemory,
    OwnRegion,
    PeerMemory,
    ReadOnlyMapping,
    allocate_private,
    allocate_shared,
    host_digest,
)
from epd.memory.region import HOST, Region
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import SessionId
from epd.protocol.messages import RegionDescriptor

_log = structlog.get_logger()


class ShmPlane:
    """See `DataPlane`. Raises `DataPlaneError` where abstract Unix sockets cannot be had."""

    name = "shm"
    device = HOST
    pieces = 4

    def __init__(self) -> None:
        self._handover = Handover()
        self.segment = self._handover.name
        self._exported: list[OwnRegion] = []
        self._private: list[OwnRegion] = []
        self._local = LocalMemory()
        self._peers: dict[SessionId, PeerMemory] = {}
        self._mappings: dict[SessionId, list[ReadOnlyMapping]] = {}

    # -- our regions -------------------------------------------------------------------------

    def allocate(self, count: int, region_nbytes: int, *, exported: bool) -> list[Region]:
        if exported and self._exported:
            raise DataPlaneError("shm: the staging pool was already allocated")
        if exported:
            regions = allocate_shared(count, region_nbytes)
            self._exported = self._handover.regions = regions
        else:
            regions = allocate_private(count, region_nbytes)
            self._private += regions
        self._local.add(regions)
        return list(regions)

    def words(self, nbytes: int) -> Region:
        return self.allocate(1, nbytes, exported=False)[0]

    def digest(self, address: int, nbytes: int) -> bytes:
        return host_digest(address, nbytes)

    def export(self) -> tuple[RegionDescriptor, ...]:
        return tuple(RegionDescriptor(r.region, 0, r.nbytes) for r in self._exported)

    # -- peers -------------------------------------------------------------------------------

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> ReadState:
        try:
            mapped = map_handed_over(segment, {int(r.region): r.nbytes for r in regions})
        except OSError as error:
            _log.warning("shm: peer's memory cannot be mapped", segment=segment, reason=str(error))
            return ReadState.FAILED
        self._mappings[session] = list(mapped.values())
        self._peers[session] = PeerMemory([(r, m.address, m.nbytes) for r, m in mapped.items()])
        return ReadState.DONE

    def close_peer(self, session: SessionId) -> None:
        # Every read was over when its `post` returned: nothing still copies from these mappings.
        self._peers.pop(session, None)
        for mapping in self._mappings.pop(session, ()):
            mapping.close()

    # -- reads -------------------------------------------------------------------------------

    def post(self, session: SessionId, piece: Piece) -> Posted | ReadState:
        return self.read_now(session, piece)

    def read_now(self, session: SessionId, piece: Piece) -> ReadState:
        peer = self._peers.get(session)
        source = peer.address_of(piece) if peer is not None else None
        if source is None or not self._local.holds(piece.local_address, piece.nbytes):
            return ReadState.REFUSED
        ctypes.memmove(piece.local_address, source, piece.nbytes)
        return ReadState.DONE

    def poll(self, ticket: int) -> ReadState:
        raise DataPlaneError(f"shm: ticket {ticket} was never given; reads end in post()")

    def abort(self, session: SessionId) -> None:
        """Nothing to end: no read outlives its `post`."""

    def registrations(self) -> int:
        return 0

    def close(self) -> None:
        if not self._handover.close():
            return
        for session in list(self._mappings):
            self.close_peer(session)
        for region in (*self._exported, *self._private):
            region.close()
