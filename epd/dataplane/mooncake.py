"""The `mooncake` plane: reads by Mooncake's TransferEngine.

What bites, and what this file does about it:
- Over TCP the engine lets anybody who reaches its ports read *and write* what is registered. So the
  engine is given a read-only mapping of the staging memory, and memory that only receives is not
  registered at all. (Other transports need local registration, and none of them was ever run.)
- The engine's word on a batch is final once, and the batch is freed with it. So a batch is asked
  about until it has ended and never again, one entry per batch, and it is named by a number of our
  own, because the engine's number comes again with the next submit.
- A read from a stopped peer never ends by itself, and the engine's own synchronous read gives up on
  it while it may still be written. So every read here is asynchronous underneath, and `abort` ends
  it by shutting down our own connections to that peer.
- The process must not be forked once an engine exists; `subprocess` is fine.

Bytes are visible to this process's CPU when `poll` says DONE.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import structlog

from epd.dataplane.base import Piece, Posted, ReadState
from epd.dataplane.mappings import (
    LocalMemory,
    OwnRegion,
    PeerMemory,
    ReadOnlyMapping,
    allocate_private,
    allocate_shared,
    host_digest,
)
from epd.dataplane.mooncake_wire import Descriptor, ask_descriptor, shut_connections, still_open
from epd.memory.region import HOST, Region
from epd.observe.log import log_info
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import SessionId
from epd.protocol.messages import RegionDescriptor

_log = structlog.get_logger()

OPEN_TIMEOUT_S: Final = 5.0
"""How long a peer may take to answer when it is opened."""
_CLOSE_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 50e-6
_SCRATCH_NBYTES: Final = 4096
_PROBE_NBYTES: Final = 8
_FLUSHES: Final = 16
_FLUSH_S: Final = 0.5
_PROTOCOL: Final = "tcp"  # the engine ignores it and chooses for itself
_READ_INTO_ANY_MEMORY: Final = ("tcp", "nvlink_intra")
"""Transports that read into local memory that is not registered."""


class Peer:
    """An opened peer, remembered until it is closed *and* its last read has ended (for `abort`)."""

    def __init__(self, name: str, memory: PeerMemory, data: tuple[str, int]) -> None:
        self.name = name
        """What the engine is told: the segment, or another spelling of it (see `_engine_name`)."""
        self.memory = memory
        self.data = data
        """Host and port to which the engine's connections for data go."""
        self.running = 0
        self.is_open = True


class _Batch(NamedTuple):
    engine_id: int
    session: SessionId


class MooncakePlane:
    """See `DataPlane`. `host` is the address that peers reach us by.

    Raises `DataPlaneError`, naming what is missing, where Mooncake cannot be had.
    """

    device = HOST
    pieces = 4

    def __init__(self, host: str) -> None:
        self._engine = _new_engine(host)
        self.segment = f"{host}:{self._engine.get_rpc_port()}"
        self._protocol = self._protocol_in_use()
        self.name = f"mooncake/{self._protocol}"
        self._staging: list[OwnRegion] = []
        self._shown: list[ReadOnlyMapping] = []
        self._bases: list[int] = []
        self._private: list[OwnRegion] = []
        self._local = LocalMemory()
        self._registered: list[int] = []
        self._registrations = 0
        self._peers: dict[SessionId, Peer] = {}
        self._owners: dict[str, tuple[str, int, str]] = {}
        self._batches: dict[int, _Batch] = {}
        self._next_ticket = 1
        self._closed = False
        self._opening = threading.Lock()
        """One at a time opens a peer or closes connections: they may be to the same engine."""
        self._flushers: list[threading.Thread] = []
        # Where the probe of a newly opened peer lands; nobody looks at it.
        self._scratch = self._receive_regions(1, _SCRATCH_NBYTES)[0]

    def _protocol_in_use(self) -> str:
        try:
            return ask_descriptor(self.segment, OPEN_TIMEOUT_S).protocol or "unknown"
        except OSError as error:
            self._drop_engine()
            raise DataPlaneError(f"mooncake: our own engine does not answer: {error}") from error

    # -- our regions -------------------------------------------------------------------------

    def allocate(self, count: int, region_nbytes: int, *, exported: bool) -> list[Region]:
        if not exported:
            return list(self._receive_regions(count, region_nbytes))
        if self._staging:
            raise DataPlaneError(f"{self.name}: the staging pool was already allocated")
        self._staging = allocate_shared(count, region_nbytes)
        self._local.add(self._staging)
        for region in self._staging:
            self._show(region)
        return list(self._staging)

    def _show(self, region: OwnRegion) -> None:
        """Register what peers may read: over TCP a second mapping that nobody can write through."""
        if self._protocol != "tcp":
            self._register(region.address, region.nbytes)
            self._bases.append(region.address)
            return
        assert region.fd is not None
        try:
            shown = ReadOnlyMapping(region.fd, region.nbytes)
        except OSError as error:
            raise DataPlaneError(f"{self.name}: cannot map {region.nbytes} B: {error}") from error
        self._shown.append(shown)
        self._register(shown.address, shown.nbytes)
        self._bases.append(shown.address)

    def _receive_regions(self, count: int, region_nbytes: int) -> list[OwnRegion]:
        regions = allocate_private(count, region_nbytes)
        self._private += regions
        self._local.add(regions)
        if self._protocol not in _READ_INTO_ANY_MEMORY:
            for region in regions:
                self._register(region.address, region.nbytes)
        return regions

    def _register(self, address: int, nbytes: int) -> None:
        self._registrations += 1
        code = self._engine.register_memory(address, nbytes)
        if code != 0:
            raise DataPlaneError(f"{self.name}: cannot register {nbytes} B: engine code {code}", code=code)
        self._registered.append(address)

    def words(self, nbytes: int) -> Region:
        return self._receive_regions(1, nbytes)[0]

    def digest(self, address: int, nbytes: int) -> bytes:
        return host_digest(address, nbytes)

    def export(self) -> tuple[RegionDescriptor, ...]:
        return tuple(
            RegionDescriptor(region.region, base, region.nbytes)
            for region, base in zip(self._staging, self._bases, strict=True)
        )

    # -- peers -------------------------------------------------------------------------------

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> ReadState:
        """May run in a thread of its own, beside the poller's (it can take `OPEN_TIMEOUT_S`)."""
        return self._open(session, segment, regions, "")

    def _open(
        self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor], owner: str
    ) -> ReadState:
        """`owner` distinguishes peers that the engine's ports do not."""
        try:
            descriptor = ask_descriptor(segment, OPEN_TIMEOUT_S)
            _check_exported(descriptor, regions)
        except OSError as error:
            _log.warning("mooncake: peer not reachable", segment=segment, reason=str(error))
            return ReadState.FAILED
        data = (descriptor.tcp_data_host or segment.rpartition(":")[0], descriptor.tcp_data_port)
        memory = PeerMemory([(r.region, r.base, r.nbytes) for r in regions])
        peer = Peer(self._engine_name(segment, (*data, owner)), memory, data)
        with self._opening:
            if not self._probe(session, peer, regions):
                _log.warning("mooncake: peer not readable", segment=segment)
                return ReadState.FAILED
            self._peers[session] = peer
        return ReadState.DONE

    def _engine_name(self, segment: str, owner: tuple[str, int, str]) -> str:
        """The engine never forgets a segment's descriptor. If another process took that port over,
        it gets another spelling of the name: leading zeros of the port."""
        host, _, port = segment.rpartition(":")
        name = segment
        while self._owners.setdefault(name, owner) != owner:
            port = f"0{port}"
            name = f"{host}:{port}"
        return name

    def _probe(self, session: SessionId, peer: Peer, regions: Sequence[RegionDescriptor]) -> bool:
        """One small read, so that the engine opens the segment now and not while others wait."""
        if not regions:
            return True
        nbytes = min(_PROBE_NBYTES, regions[0].nbytes)
        local = self._scratch.address
        return self._read_within(OPEN_TIMEOUT_S, peer, local, regions[0].base, nbytes) is ReadState.DONE

    def _read_within(self, limit_s: float, peer: Peer, local: int, source: int, nbytes: int) -> ReadState:
        """UNKNOWN: given up; its batch is never asked about again and those bytes belong to nobody."""
        batch = self._submit_read(peer.name, local, source, nbytes)
        give_up_s = time.monotonic() + limit_s
        while batch:
            status = self._engine.transfer_check_status(batch)
            if status in (1, -1):
                return ReadState.DONE if status == 1 else ReadState.FAILED
            if time.monotonic() > give_up_s:
                shut_connections(*peer.data)
                return ReadState.UNKNOWN
            time.sleep(_POLL_S)
        return ReadState.FAILED

    def close_peer(self, session: SessionId) -> None:
        peer = self._peers.get(session)
        if peer is not None:
            peer.is_open = False
            self._forget_if_over(session, peer)

    def _forget_if_over(self, session: SessionId, peer: Peer) -> None:
        if peer.is_open or peer.running:
            return
        del self._peers[session]
        if self._protocol == "tcp" and not self._closed:
            flusher = threading.Thread(
                target=self._flush, args=(peer,), name="epd-mooncake-flush", daemon=True
            )
            self._flushers = [one for one in self._flushers if one.is_alive()] + [flusher]
            flusher.start()

    def _flush(self, peer: Peer) -> None:
        """Close the connections to a peer that nobody reads from any more.

        The engine keeps them for its next read, also when their other end is gone: four descriptors for
        each incarnation that ever was. A read on one that was shut down fails, and then it is closed.
        """
        with self._opening:
            if any(other.data == peer.data for other in self._peers.values()):
                return
            dead: set[str] = set()
            for _ in range(_FLUSHES):
                dead = still_open(dead | shut_connections(*peer.data))
                if not dead:
                    return
                local, source = self._scratch.address, peer.memory.first_address
                read = self._read_within(_FLUSH_S, peer, local, source, _PROBE_NBYTES)
                if read is ReadState.UNKNOWN:
                    break
        _log.warning("mooncake: connections stay open", peer=peer.name, connections=len(dead))

    # -- reads -------------------------------------------------------------------------------

    def post(self, session: SessionId, piece: Piece) -> Posted | ReadState:
        peer = self._peers.get(session)
        if peer is None or not peer.is_open:
            return ReadState.REFUSED
        source = peer.memory.address_of(piece)
        if source is None or not self._local.holds(piece.local_address, piece.nbytes):
            return ReadState.REFUSED
        if piece.nbytes == 0:
            return ReadState.DONE
        batch = self._submit(peer.name, piece.local_address, source, piece.nbytes)
        if not batch:
            return ReadState.FAILED
        ticket = self._next_ticket
        self._next_ticket += 1
        self._batches[ticket] = _Batch(batch, session)
        peer.running += 1
        return Posted(ticket)

    def _submit(self, name: str, local: int, source: int, nbytes: int) -> int:
        return self._submit_read(name, local, source, nbytes)

    def _submit_read(self, name: str, local: int, source: int, nbytes: int) -> int:
        # One entry per call: of several, the status tells about the first only. 0: not submitted.
        return int(self._engine.batch_transfer_async_read(name, [local], [source], [nbytes]))

    def poll(self, ticket: int) -> ReadState:
        batch = self._batches[ticket]
        status = self._engine.transfer_check_status(batch.engine_id)
        if status not in (1, -1):
            return ReadState.UNKNOWN
        # The engine has freed the batch: asking again would be a use after free.
        del self._batches[ticket]
        peer = self._peers[batch.session]
        peer.running -= 1
        self._forget_if_over(batch.session, peer)
        return ReadState.DONE if status == 1 else ReadState.FAILED

    def read_now(self, session: SessionId, piece: Piece) -> ReadState:
        """Waits for the engine's own last word, for as long as that takes; see `abort`."""
        posted = self.post(session, piece)
        if isinstance(posted, ReadState):
            return posted
        while (state := self.poll(posted.ticket)) is ReadState.UNKNOWN:
            time.sleep(_POLL_S)
        return state

    def abort(self, session: SessionId) -> None:
        """Over TCP: shut our connections to that peer; other transports end by their own retries.

        The engine's next read from it may fail once, on a connection it still holds for good.
        """
        peer = self._peers.get(session)
        if peer is None or self._protocol != "tcp":
            return
        shut = shut_connections(*peer.data)
        log_info("mooncake: reads aborted", peer=peer.name, connections=len(shut))

    def registrations(self) -> int:
        return self._registrations

    def close(self) -> None:
        """Takes about a second. Memory that the engine may still touch is not unmapped."""
        if self._closed:
            return
        self._closed = True
        for flusher in self._flushers:
            flusher.join(_CLOSE_TIMEOUT_S)
        for address in self._registered:
            code = self._engine.unregister_memory(address)
            if code != 0:
                _log.warning("mooncake: unregister failed", code=code)
        if not self._drop_engine():
            _log.warning("mooncake: the engine does not end; its memory is left mapped")
            return
        self._release_memory()

    def _release_memory(self) -> None:
        for mapping in self._shown:
            mapping.close()
        for region in (*self._staging, *self._private):
            region.close()

    def _drop_engine(self) -> bool:
        """Dropping the last reference ends the engine's threads: in a thread, it takes a second."""
        holder = [self._engine]
        self._engine = None
        dropper = threading.Thread(target=holder.clear, name="epd-mooncake-close", daemon=True)
        dropper.start()
        dropper.join(_CLOSE_TIMEOUT_S)
        return not dropper.is_alive()


def _new_engine(host: str) -> Any:
    # Before the import: the engine reads its environment then, and logs every transfer otherwise.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise DataPlaneError(f"mooncake: {_missing(error)}") from error
    try:
        engine = TransferEngine()
        code = engine.initialize(host, "P2PHANDSHAKE", _PROTOCOL, "")
    except RuntimeError as error:  # of its C++: out of files, for one
        raise DataPlaneError(f"mooncake: the engine does not start on {host}: {error}") from error
    if code != 0:
        raise DataPlaneError(f"mooncake: the engine does not start on {host}: code {code}", code=code)
    return engine


def _missing(error: ImportError) -> str:
    text = str(error)
    if "libibverbs" in text:
        return f"the system library libibverbs1 is missing ({text})"
    if "libnuma" in text:
        return f"the system library libnuma1 is missing ({text})"
    if error.name is not None and error.name.partition(".")[0] == "mooncake":
        return "the package mooncake-transfer-engine (or -non-cuda, -cuda13) is not installed"
    return text


def _check_exported(descriptor: Descriptor, regions: Sequence[RegionDescriptor]) -> None:
    """Refused reads punish the lane to a peer, so what it announces is compared with what it exports.

    Raises `OSError`.
    """
    for region in regions:
        if not any(
            buffer.addr <= region.base and region.base + region.nbytes <= buffer.addr + buffer.length
            for buffer in descriptor.buffers
        ):
            raise OSError(f"region {region.region} of {region.nbytes} B is not exported")
