"""The encoder's BufferManagerActor: the staging pool, seals, pins and eviction (I2, I7)."""

from collections import OrderedDict
from typing import NamedTuple

from epd.actors.receive_buffers import too_large
from epd.memory.pool import Extent, Pool, aligned
from epd.memory.waiters import Waiters
from epd.protocol import sources
from epd.protocol.ids import LeaseId, Seal
from epd.protocol.job_key import JobKey
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import ErrorValue, Source
from epd.protocol.sources import Subscriber, seal_offset, sealed_nbytes
from epd.runtime.actor import Actor
from epd.runtime.machines import MachineTable
from epd.runtime.mailbox import Mailbox, Ref
from epd.runtime.runtime import Runtime


class StagingWanted(NamedTuple):
    job: JobKey
    nbytes: int


class StagingUnwanted(NamedTuple):
    job: JobKey


class SourceEvent(NamedTuple):
    """`Written`, `WriteEnded` or `ReleaseWanted` for one staged result."""

    staged: LeaseId
    event: Event
    digest: bytes | None = None


class PinAsked(NamedTuple):
    staged: LeaseId
    subscriber: Subscriber


class UnpinAsked(NamedTuple):
    staged: LeaseId
    subscriber: Subscriber


class StagingAnswer(NamedTuple):
    """To the DedupCoordinator."""

    job: JobKey
    staged: LeaseId | None
    extent: Extent | None
    error: ErrorValue | None = None


class StagedEvicted(NamedTuple):
    """To the DedupCoordinator: given up for room; nobody had pinned it."""

    job: JobKey
    staged: LeaseId


class PinAnswer(NamedTuple):
    """To the EncodeActor: the pinned source, or None if it is gone."""

    subscriber: Subscriber
    staged: LeaseId
    source: Source | None
    digest: bytes | None = None


Mail = StagingWanted | StagingUnwanted | SourceEvent | PinAsked | UnpinAsked


class _Staged:
    __slots__ = ("digest", "extent", "job", "nbytes")

    def __init__(self, job: JobKey, extent: Extent, nbytes: int) -> None:
        self.job = job
        self.extent = extent
        self.nbytes = nbytes
        self.digest: bytes | None = None


class StagingBuffers(Actor[Mail]):
    """Room for results in one total order; evicts what nobody reads; changes the seal before reuse."""

    def __init__(self, runtime: Runtime, mailbox: Mailbox[Mail], pool: Pool) -> None:
        super().__init__("buffers", mailbox)
        self._pool = pool
        self._clock = runtime.clock
        self._waiters: Waiters[JobKey] = Waiters(ageing_s=1.0)
        self._nbytes: dict[JobKey, int] = {}
        self._staged: OrderedDict[LeaseId, _Staged] = OrderedDict()  # least recently pinned first
        self._sources: MachineTable = runtime.machines("sources", sources, sources.Limits(), self._perform)
        self._next_staged = 1
        # Never repeated, not by another incarnation either: a random start and a counter.
        self._next_seal = runtime.randbits(64) | 1
        self.to_dedup: Ref[StagingAnswer | StagedEvicted]
        self.to_encode: Ref[PinAnswer]

    def handle(self, message: Mail) -> None:
        match message:
            case PinAsked():
                if message.staged in self._staged:
                    self._staged.move_to_end(message.staged)
                self._sources.feed(message.staged, sources.PinWanted(message.subscriber))
            case UnpinAsked():
                self._sources.feed(message.staged, sources.Unpinned(message.subscriber))
                self._admit()
            case StagingWanted():
                self._want(message)
            case SourceEvent():
                if message.digest is not None:
                    self._staged[message.staged].digest = message.digest
                self._sources.feed(message.staged, message.event)
                self._admit()
            case StagingUnwanted():
                self._nbytes.pop(message.job, None)
                if self._waiters.withdraw(message.job):
                    self._admit()

    def _want(self, message: StagingWanted) -> None:
        size = sealed_nbytes(message.nbytes)
        if not self._pool.fits_empty((size,)):
            error = too_large((size,), self._pool)
            self.to_dedup.tell(StagingAnswer(message.job, None, None, error.as_value()))
            return
        self._nbytes[message.job] = message.nbytes
        self._waiters.push(message.job, (size,), self._clock.now_s())
        self._admit()

    def _admit(self) -> None:
        """Give room in order; while the head does not fit, evict what nobody reads, oldest first."""
        while len(self._waiters):
            for job, (extent,) in self._waiters.admit(self._pool, self._clock.now_s()):
                self._reserve(job, extent)
            if not len(self._waiters) or not self._evict_one():
                return

    def _evict_one(self) -> bool:
        states = ((staged, self._sources.state(staged)) for staged in self._staged)
        unread = sources.first_unread(states)
        if unread is not None:
            self._sources.feed(unread, sources.EvictWanted())
        return unread is not None

    def _reserve(self, job: JobKey, extent: Extent) -> None:
        staged = LeaseId(self._next_staged)
        self._next_staged += 1
        self._staged[staged] = _Staged(job, extent, self._nbytes.pop(job))
        self._sources.feed(staged, sources.Reserved(staged, self._draw_seal(), self._draw_seal()))
        self.to_dedup.tell(StagingAnswer(job, staged, extent))

    def _draw_seal(self) -> Seal:
        self._next_seal = (self._next_seal + 2) & 0xFFFF_FFFF_FFFF_FFFF  # odd: never zero
        return Seal(self._next_seal)

    def _perform(self, staged: LeaseId, effects: tuple[Effect, ...]) -> None:
        entry = self._staged.get(staged)
        for effect in effects:
            match effect:
                case sources.TellGone():
                    self.to_encode.tell(PinAnswer(effect.subscriber, staged, None))
                case _ if entry is not None:
                    self._perform_on(staged, entry, effect)

    def _perform_on(self, staged: LeaseId, entry: _Staged, effect: Effect) -> None:
        match effect:
            case sources.WriteSeal():
                self._pool.write_seal(entry.extent, seal_offset(entry.nbytes), effect.seal)
            case sources.FreeExtent():
                del self._staged[staged]
                self._pool.give((entry.extent,))
            case sources.TellPinned():
                source = Source(entry.extent.region, entry.extent.offset, entry.nbytes, effect.seal)
                self.to_encode.tell(PinAnswer(effect.subscriber, staged, source, entry.digest))
            case sources.TellEvicted():
                self.to_dedup.tell(StagedEvicted(entry.job, staged))

    def staged(self) -> list[tuple[Extent, int]]:
        """Extent and payload size of every staged slot."""
        return [(entry.extent, entry.nbytes) for entry in self._staged.values()]

    def staged_nbytes(self, staged: LeaseId) -> int:
        """What a staged result takes from the pool; 0 if it is none."""
        entry = self._staged.get(staged)
        return 0 if entry is None else aligned(entry.extent.nbytes)

    @property
    def waiting(self) -> int:
        """Results that wait for room."""
        return len(self._waiters)

    def counts(self) -> dict[str, int]:
        states = [self._sources.state(staged) for staged in self._staged]
        return {
            "staged": len(states),
            "pins": sum(len(state.pins) for state in states if isinstance(state, sources.Stable)),
            "room_waiters": len(self._waiters),
            "pool_free_nbytes": self._pool.free_nbytes,
            "pool_used_nbytes": self._pool.total_nbytes - self._pool.free_nbytes,
        }
