"""The `mooncake` plane for memory of a GPU: same host, device to device (CUDA IPC).

A read is one copy on a stream of the engine's, queued from our thread and asked about; its bytes are
in our memory, for every kernel launched afterwards on any stream, when `poll` says DONE. It ends by
itself, whatever its peer does, so there is nothing to abort.

Seals do not travel that way. They stand in host memory, in sealed memfds that readers map read-only
(as on the shm plane): an encoder changes one by a store before it queues anything that reuses the
slot, and a reader loads it after its copies have ended. So nothing of a read is copied to the host,
and a free needs no work on the GPU.

What a reader maps of an encoder's memory stays as it was when the encoder dies: a read of what had
been announced still succeeds then, and is whole. But a stale mapping must not be taken for a newer
encoder's memory while the seal is that one's: each region carries a random word, in its memory and
in its table of seals, and `open_peer` compares the two; and each encoder is a segment of its own to
the engine, also when it has an earlier one's port.

The prefill pool is not registered: no other process can reach it. Staging is, and CUDA IPC knows no
read-only: who may ask the engine and runs on this host can write it. Exported memory is never given
back before the process ends: doing so while a reader maps it is undefined.
"""

import ctypes
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import structlog

from epd.dataplane.base import Piece, Posted, ReadState
from epd.dataplane.cuda import CudaBlock, CudaDevice, CudaRegion, seal_place, seal_table_nbytes
from epd.dataplane.handover import Handover, map_handed_over
from epd.dataplane.mappings import LocalMemory, OwnRegion, PeerMemory, allocate_shared
from epd.dataplane.mooncake import OPEN_TIMEOUT_S, MooncakePlane, Peer
from epd.memory.region import HOST, DeviceView, Region
from epd.memory.tensors import as_tensor, device_digest, new_stream
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import RegionId, Seal, SessionId
from epd.protocol.messages import RegionDescriptor
from epd.protocol.sources import SEAL_WORD

_log = structlog.get_logger()

_SWITCH: Final = "MC_INTRANODE_NVLINK"
_KEPT: list[CudaRegion] = []
"""Exported regions of closed planes: see above."""


class _Seals:
    """A peer's tables of seals, mapped. Raises `OSError` where they cannot be had."""

    def __init__(self, name: str, regions: Sequence[RegionDescriptor]) -> None:
        tables = {int(r.region): seal_table_nbytes(r.nbytes) for r in regions}
        self._mappings = map_handed_over(name, tables)
        self._memory = PeerMemory([(region, m.address, m.nbytes) for region, m in self._mappings.items()])

    def load(self, region: int, offset: int) -> int | None:
        """The seal that belongs at `offset`; None outside of the region."""
        address = self._memory.address_of(Piece(0, region, seal_place(offset), SEAL_WORD.size))
        return None if address is None else ctypes.c_uint64.from_address(address).value

    def close(self) -> None:
        for mapping in self._mappings.values():
            mapping.close()


class MooncakeCudaPlane(MooncakePlane):
    """See `DataPlane`. `device` is `cuda:N`.

    Raises `DataPlaneError`, naming what is missing, where it cannot be had.
    """

    pieces = 1  # each costs the engine's floor of 18 us, and one copy has all of the GPU's bandwidth

    def __init__(self, host: str, device: str) -> None:
        self._cuda = CudaDevice(device)
        self._cuda.bind()
        self._word_memory = LocalMemory()
        self._tables: list[OwnRegion] = []
        self._exported: list[CudaRegion] = []
        self._receiving: list[CudaRegion] = []
        self._seals: dict[SessionId, _Seals] = {}
        self._probing = threading.Lock()
        self._digest_stream: Any = None
        with _engines_between_gpus():
            super().__init__(host)
        if self._protocol == "tcp":
            self.close()
            raise DataPlaneError(
                f"mooncake: this build has no transport between GPUs ({_SWITCH} changes nothing): "
                "install mooncake-transfer-engine-cuda13, or set device to 'cpu'"
            )
        self.device = device
        self._probe_block = self._cuda.allocate(SEAL_WORD.size)
        self._handover = Handover()
        self.segment += self._handover.name

    # -- our regions -------------------------------------------------------------------------

    def allocate(self, count: int, region_nbytes: int, *, exported: bool) -> list[Region]:
        if not exported:
            blocks = self._blocks(count, region_nbytes, "pool")
            self._receiving += (regions := self._regions(blocks, region_nbytes, [None] * count))
            return list(regions)
        if self._exported:
            raise DataPlaneError(f"{self.name}: the staging pool was already allocated")
        blocks = self._blocks(count, region_nbytes, "staging")
        self._tables = allocate_shared(count, seal_table_nbytes(region_nbytes))
        self._exported = self._regions(blocks, region_nbytes, [table.view for table in self._tables])
        for region, block in zip(self._exported, blocks, strict=True):
            self._mark(region)
            self._register(block.address, block.nbytes)
        self._handover.regions = self._tables
        return list(self._exported)

    def _blocks(self, count: int, region_nbytes: int, setting: str) -> list[CudaBlock]:
        try:
            # Room for the word of `_mark` behind what is used.
            return [self._cuda.allocate(region_nbytes + SEAL_WORD.size) for _ in range(count)]
        except DataPlaneError as error:
            raise DataPlaneError(
                f"{count} regions of {region_nbytes} B: {error.message}; "
                f"lower {setting}.regions or {setting}.region_nbytes",
                count=count,
                region_nbytes=region_nbytes,
            ) from error

    def _regions(
        self, blocks: list[CudaBlock], region_nbytes: int, seals: Sequence[memoryview | None]
    ) -> list[CudaRegion]:
        regions = [
            CudaRegion(RegionId(index), region_nbytes, self.device, block, table)
            for index, (block, table) in enumerate(zip(blocks, seals, strict=True))
        ]
        self._local.add(regions)
        return regions

    def _mark(self, region: CudaRegion) -> None:
        """The same random word behind the region's memory and behind its seals."""
        word = secrets.randbits(64) | 1
        self._cuda.write_word(region.address + region.nbytes, word)
        region.write_seal(region.nbytes, Seal(word))

    def words(self, nbytes: int) -> Region:
        region = super().words(nbytes)
        self._word_memory.add([region])
        return region

    def digest(self, address: int, nbytes: int) -> bytes:
        import torch

        if self._digest_stream is None:
            self._digest_stream = new_stream(self.device)
        with torch.cuda.stream(self._digest_stream):  # not behind what the consumer has queued
            return device_digest(as_tensor(DeviceView(address, nbytes, self.device, self)))

    def export(self) -> tuple[RegionDescriptor, ...]:
        return tuple(RegionDescriptor(r.region, r.address, r.nbytes) for r in self._exported)

    # -- peers -------------------------------------------------------------------------------

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> ReadState:
        self._cuda.bind()
        engine, at, name = segment.partition("@")
        try:
            self._seals[session] = _Seals(at + name, regions)
        except OSError as error:
            _log.warning("mooncake: peer's seals cannot be mapped", segment=segment, reason=str(error))
            return ReadState.FAILED
        state = self._open(session, engine, regions, name)
        if state is not ReadState.DONE:
            self._seals.pop(session).close()
        return state

    def _probe(self, session: SessionId, peer: Peer, regions: Sequence[RegionDescriptor]) -> bool:
        """Whether the memory that the engine reaches is that to which the seals belong."""
        seals = self._seals[session]
        for region in regions:
            source = region.base + region.nbytes
            with self._probing:
                local = self._probe_block.address
                read = self._read_within(OPEN_TIMEOUT_S, peer, local, source, SEAL_WORD.size)
                if read is not ReadState.DONE:
                    return False
                word = self._cuda.read_word(self._probe_block.address)
            if word != seals.load(region.region, region.nbytes):
                _log.warning("mooncake: stale memory of another process", segment=peer.name)
                return False
        return True

    def close_peer(self, session: SessionId) -> None:
        super().close_peer(session)
        seals = self._seals.pop(session, None)
        if seals is not None:
            seals.close()

    # -- reads -------------------------------------------------------------------------------

    def post(self, session: SessionId, piece: Piece) -> Posted | ReadState:
        if self._word_memory.holds(piece.local_address, piece.nbytes):
            return self._read_seal(session, piece)
        self._cuda.bind()
        return super().post(session, piece)

    def _read_seal(self, session: SessionId, piece: Piece) -> ReadState:
        seals = self._seals.get(session)
        value = None if seals is None else seals.load(piece.region, piece.offset)
        if value is None or piece.nbytes != SEAL_WORD.size:
            return ReadState.REFUSED
        ctypes.c_uint64.from_address(piece.local_address).value = value
        return ReadState.DONE

    # -- end ---------------------------------------------------------------------------------

    def close(self) -> None:
        self._cuda.bind()
        super().close()

    def _release_memory(self) -> None:
        super()._release_memory()
        _KEPT.extend(self._exported)
        for region in self._receiving:
            region.close()
        for session in list(self._seals):
            self._seals.pop(session).close()
        if self.device != HOST:
            self._handover.close()


@contextmanager
def _engines_between_gpus() -> Iterator[None]:
    """An engine that is made meanwhile takes the transport between GPUs; later ones are free again."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
