"""The data plane of push: encoders write into a prefill node's pool, each through windows of its own.

A window is one more mapping of a region of the pool (a memfd), registered with the engine for one session.
The pool's own mapping is never registered. Over Mooncake's TCP an address is all that a writer needs,
and the engine checks it once per request: deregistering stops no write whose body is under way, and
registering the same address again lets it go on. So a window is revoked in two steps, deregistered and
then made inaccessible; what is under way then fails in the kernel, on both sides. Its addresses are never
unmapped, so nobody gets them again; that costs address space and no memory.

Only there can a window be revoked. A mapping in another process (shm), an opened CUDA handle or an RDMA
key are not ours to take back, so push is refused on every other transport.
"""

import os
from collections.abc import Sequence
from typing import Final

import structlog

from epd.dataplane.mappings import OwnRegion, Window, allocate_shared
from epd.dataplane.mooncake import MooncakePlane, Peer
from epd.memory.region import Region
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import RegionId, SessionId
from epd.protocol.messages import RegionDescriptor

_log = structlog.get_logger()

PUSHED: Final = "push:"
"""Stands before the plane's name in the greetings of nodes that push: others refuse them, and name both."""


class PushPlane(MooncakePlane):
    """See `DataPlane`; but `post` writes: from `local_address`, to the piece of the peer's window.

    A prefill node allocates its pool here and opens windows on it; an encoder, whose `allocate` is of its
    staging pool, posts. Nothing is exported. Raises `DataPlaneError` where Mooncake's TCP cannot be had.
    """

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self._pool: list[OwnRegion] = []
        self._windows: dict[SessionId, list[Window]] = {}
        reason = self._why_not()
        if reason is not None:
            self.close()
            raise DataPlaneError(f"direction = push: {reason}; use direction = pull")

    def _why_not(self) -> str | None:
        if self._protocol != "tcp":
            return f"a writer over {self.name} cannot be shut out of memory, only one over mooncake/tcp can"
        if os.environ.get("MC_TCP_PROTO") == "1":
            return "MC_TCP_PROTO=1 ends writes before they have arrived"
        return None

    def allocate(self, count: int, region_nbytes: int, *, exported: bool) -> list[Region]:
        regions = allocate_shared(count, region_nbytes, "staging" if exported else "pool")
        self._private += regions
        self._local.add(regions)
        if not exported:
            self._pool += regions
        return list(regions)

    # -- windows: of a prefill node; any one thread ----------------------------------------------

    def open_window(self, session: SessionId) -> tuple[RegionDescriptor, ...]:
        """Map and register every region of the pool once more, for this session.

        Raises `DataPlaneError`; nothing of the window is left then.
        """
        windows = self._windows.setdefault(session, [])
        try:
            for region in self._pool:
                assert region.fd is not None
                window = Window(region.fd, region.nbytes)
                windows.append(window)
                self._register(window.address, window.nbytes)
        except (OSError, DataPlaneError) as error:
            self.revoke_window(session)
            raise DataPlaneError(f"{self.name}: no window for session {session:016x}: {error}") from error
        return tuple(
            RegionDescriptor(RegionId(index), window.address, window.nbytes)
            for index, window in enumerate(windows)
        )

    def revoke_window(self, session: SessionId) -> bool:
        """Whether it is proven that nothing reaches the pool through it any more."""
        proven = True
        for window in self._windows.pop(session, ()):
            deregistered = self._deregister(window.address)
            proven &= self._shut(window) and deregistered
        return proven

    def _deregister(self, address: int) -> bool:
        if address not in self._registered:  # its registration had failed
            return True
        self._registered.remove(address)
        code = self._engine.unregister_memory(address)
        if code != 0:
            _log.error("mooncake: a window cannot be deregistered", code=code)
        return bool(code == 0)

    def _shut(self, window: Window) -> bool:
        try:
            window.shut()
        except OSError as error:
            _log.error("a window cannot be made inaccessible", reason=str(error))
            return False
        return True

    def place_of(self, address: int) -> tuple[RegionId, int]:
        """Region and offset of an address in the pool. Raises `DataPlaneError` for another one."""
        for index, region in enumerate(self._pool):
            if region.address <= address < region.address + region.nbytes:
                return RegionId(index), address - region.address
        raise DataPlaneError(f"{address:#x} is not in the pool")

    # -- writes: of an encoder; the poller's thread ------------------------------------------------

    def _probe(self, session: SessionId, peer: Peer, regions: Sequence[RegionDescriptor]) -> bool:
        # Twice: a connection that a fence has closed is only found out by using it.
        return any(super(PushPlane, self)._probe(session, peer, regions) for _ in range(2))

    def _submit(self, name: str, local: int, source: int, nbytes: int) -> int:
        # One entry per call, as for reads. 0: not submitted.
        return int(self._engine.batch_transfer_async_write(name, [local], [source], [nbytes]))

    def close(self) -> None:
        for session in list(self._windows):
            self.revoke_window(session)
        super().close()
