"""A data plane between simulated hosts: bytes are copied when they land, whoever has their memory then.

An engine of its own moves them, not the process: what was posted and not aborted lands although nobody
polls, half of a piece before the other half. Where `one_sided`, a stopped process's memory is read all
the same, as by a NIC; else its engine stands still with it.
"""

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Final

from epd.dataplane.base import Piece, Posted, ReadState
from epd.dataplane.mappings import LocalMemory, OwnRegion, PeerMemory, allocate_private, host_digest
from epd.memory.region import HOST, Region
from epd.protocol.ids import SessionId
from epd.protocol.messages import RegionDescriptor
from epd.sim.network import Network
from epd.sim.process import Process, between
from epd.sim.watch import overlap

_ASK_AGAIN_S: Final = 0.05
_ABORT_MISSES: Final = 0.1
_ABORT_TAKES_S: Final = (1e-4, 0.5)
"""From the word to the last byte: the engine may write until then."""
_NOTICED_S: Final = 0.01
"""How long a dead peer's connection takes to break."""
_HALVED_FROM_NBYTES: Final = 4096


class _Read:
    """One piece that was posted."""

    __slots__ = ("aborted", "address", "done_nbytes", "peer", "piece", "session", "state")

    def __init__(self, session: SessionId, peer: "SimPlane", piece: Piece, address: int) -> None:
        self.session = session
        self.peer = peer
        self.piece = piece
        self.address = address
        """Of the peer's memory."""
        self.done_nbytes = 0
        self.aborted = False
        self.state = ReadState.UNKNOWN


class Engines:
    """All planes of a run, by segment. `written(process, address, nbytes)` is asked before bytes land: may
    they?"""

    def __init__(
        self,
        network: Network,
        rng: random.Random,
        written: Callable[[Process, int, int], None],
        violated: Callable[[str], None],
        *,
        one_sided: bool,
    ) -> None:
        self.network = network
        self.rng = rng
        self.written = written
        self.violated = violated
        self.one_sided = one_sided
        self.planes: dict[str, SimPlane] = {}
        self.landed = 0
        self._stalled: dict[tuple[str, str], float] = {}
        self._opened = 0

    def open(self, process: Process, host: str) -> "SimPlane":
        self._opened += 1
        plane = SimPlane(self, process, host, f"sim:{process.name}:{self._opened}")
        self.planes[plane.segment] = plane
        process.when_killed.append(plane.close)
        return plane

    def stall(self, reader: str, source: str, seconds: float) -> None:
        """Nothing is read by host `reader` from host `source` for so long; messages pass."""
        self._stalled[reader, source] = self.network.time.now_s + seconds

    def heal(self) -> None:
        """Nothing stalls from now on."""
        self._stalled.clear()

    def reachable(self, reader: "SimPlane", source: "SimPlane") -> bool:
        """Whether something can be moved now."""
        moves = self.one_sided or (source.process.runs and reader.process.runs)
        stalled = self._stalled.get((reader.host, source.host), 0.0) > self.network.time.now_s
        return moves and not stalled and self.network.is_whole(reader.host, source.host)


class SimPlane:
    """See `DataPlane`."""

    name = "sim"
    device = HOST
    pieces = 4

    def __init__(self, engines: Engines, process: Process, host: str, segment: str) -> None:
        self.segment = segment
        self.process = process
        self.host = host
        self.closed = False
        self._engines = engines
        self._regions: list[OwnRegion] = []
        self._exported: list[OwnRegion] = []
        self._local = LocalMemory()
        self._peers: dict[SessionId, tuple[SimPlane, PeerMemory]] = {}
        self._reads: dict[int, _Read] = {}
        self._next_ticket = 1

    # -- our regions -------------------------------------------------------------------------

    def allocate(self, count: int, region_nbytes: int, *, exported: bool) -> list[Region]:
        regions = allocate_private(count, region_nbytes)
        self._regions += regions
        if exported:
            self._exported = regions
        self._local.add(regions)
        return list(regions)

    def words(self, nbytes: int) -> Region:
        return self.allocate(1, max(4096, nbytes), exported=False)[0]

    def digest(self, address: int, nbytes: int) -> bytes:
        return host_digest(address, nbytes)

    def export(self) -> tuple[RegionDescriptor, ...]:
        """Without addresses: they differ between two runs of one seed."""
        return tuple(RegionDescriptor(region.region, 0, region.nbytes) for region in self._exported)

    # -- peers -------------------------------------------------------------------------------

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> ReadState:
        peer = self._engines.planes.get(segment)
        if peer is None or not self._engines.reachable(self, peer):
            return ReadState.FAILED
        own = {region.region: region for region in peer._exported}
        if any(r.region not in own or own[r.region].nbytes != r.nbytes for r in regions):
            return ReadState.FAILED
        memory = PeerMemory([(r.region, own[r.region].address, r.nbytes) for r in regions])
        self._peers[session] = (peer, memory)
        return ReadState.DONE

    def close_peer(self, session: SessionId) -> None:
        self._peers.pop(session, None)

    # -- reads -------------------------------------------------------------------------------

    def post(self, session: SessionId, piece: Piece) -> Posted | ReadState:
        known = self._peers.get(session)
        if known is None or not self._local.holds(piece.local_address, piece.nbytes):
            return ReadState.REFUSED
        peer, memory = known
        address = memory.address_of(piece)
        if address is None:
            return ReadState.REFUSED
        if self.writes(piece.local_address, piece.nbytes):
            self._engines.violated(f"{self.process.name} reads into a place where another read still writes")
        read = _Read(session, peer, piece, address)
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._reads[ticket] = read
        network = self._engines.network
        there_s = network.latency_s(self.host, peer.host, 0)
        back_s = network.latency_s(peer.host, self.host, piece.nbytes)
        network.time.after(there_s + back_s, self._move, read)
        return Posted(ticket)

    def _move(self, read: _Read) -> None:
        """Some of the bytes arrive, or wait until they can."""
        if read.state is not ReadState.UNKNOWN or read.aborted or self.closed:
            return
        engines, peer, time = self._engines, read.peer, self._engines.network.time
        if peer.closed:
            time.after(_NOTICED_S, self._fail, read)
            return
        if not engines.reachable(self, peer):
            engines.network.provoked("read_stood")
            time.after(_ASK_AGAIN_S, self._move, read)
            return
        self._write(read)
        if read.done_nbytes == read.piece.nbytes:
            engines.landed += 1
            read.state = ReadState.DONE
        else:
            time.after(engines.network.latency_s(peer.host, self.host, read.done_nbytes), self._move, read)

    def _write(self, read: _Read) -> None:
        """Of a larger piece half at once."""
        piece, start = read.piece, read.done_nbytes
        end = piece.nbytes
        if start == 0 and end >= _HALVED_FROM_NBYTES:
            end //= 2
        if end > start:
            self._engines.written(self.process, piece.local_address + start, end - start)
            ctypes.memmove(piece.local_address + start, read.address + start, end - start)
        read.done_nbytes = end

    def _give_up(self, read: _Read) -> None:
        """An aborted read ends; its last bytes may have been on their way."""
        if read.state is ReadState.UNKNOWN and not self.closed:
            if not read.peer.closed and self._engines.rng.random() < 0.5:
                self._engines.network.provoked("landed_while_aborted")
                self._write(read)
            read.state = ReadState.FAILED

    def _fail(self, read: _Read) -> None:
        if read.state is ReadState.UNKNOWN:
            read.state = ReadState.FAILED

    def poll(self, ticket: int) -> ReadState:
        state = self._reads[ticket].state
        if state is not ReadState.UNKNOWN:
            del self._reads[ticket]
        return state

    def read_now(self, session: SessionId, piece: Piece) -> ReadState:
        """Nothing waits in virtual time."""
        raise NotImplementedError

    def abort(self, session: SessionId) -> None:
        engines = self._engines
        for read in self._reads.values():
            if read.session != session or read.state is not ReadState.UNKNOWN or read.aborted:
                continue
            if engines.rng.random() < _ABORT_MISSES:
                engines.network.provoked("abort_missed")
                continue
            read.aborted = True
            seconds = between(engines.rng, *_ABORT_TAKES_S)
            engines.network.time.after(seconds, self._give_up, read)

    def writes(self, address: int, nbytes: int) -> bool:
        """Whether a read that is not over may write there."""
        running = [read.piece for read in self._reads.values() if read.state is ReadState.UNKNOWN]
        return any(overlap(address, nbytes, piece.local_address, piece.nbytes) for piece in running)

    def registrations(self) -> int:
        return len(self._regions)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._engines.planes.pop(self.segment, None)
        for read in self._reads.values():
            self._fail(read)
        for region in self._regions:
            region.close()
