"""The prefill side's BufferManagerActor: the receive pool, its leases and slot machines (I1)."""

from collections.abc import Sequence
from typing import NamedTuple

from epd.memory.pool import Extent, Pool, aligned
from epd.memory.waiters import Waiters
from epd.protocol import slots
from epd.protocol.errors import RequestTooLarge
from epd.protocol.group import Read
from epd.protocol.ids import LeaseId, ReadId, TransferId
from epd.protocol.machine import Effect
from epd.protocol.messages import ErrorValue
from epd.protocol.prefill_types import ReadEnded
from epd.protocol.sources import sealed_nbytes
from epd.runtime.actor import Actor
from epd.runtime.machines import MachineTable
from epd.runtime.mailbox import Mailbox, Ref
from epd.runtime.runtime import Runtime


class RoomWanted(NamedTuple):
    transfer: TransferId
    sizes_nbytes: tuple[int, ...]


class RoomUnwanted(NamedTuple):
    transfer: TransferId


class ReadAsked(NamedTuple):
    read: Read


class LeaseDone(NamedTuple):
    """No more reads are wanted; answered by `LeaseLetGo` when none runs any more."""

    lease: LeaseId


class LeaseFree(NamedTuple):
    """No rank of the group touches it any more: back to the pool."""

    lease: LeaseId


class ReadNews(NamedTuple):
    """From the TransferActor: `ReadPosted` or `ReadTerminal` of one read."""

    lease: LeaseId
    event: slots.ReadPosted | slots.ReadTerminal


class RoomAnswer(NamedTuple):
    """To the PrefillActor: a lease with one extent per item, or why there will be none."""

    transfer: TransferId
    lease: LeaseId | None
    extents: tuple[Extent, ...]
    error: ErrorValue | None = None


class ItemRead(NamedTuple):
    """To the PrefillActor: one item's read has ended on this rank."""

    lease: LeaseId
    event: ReadEnded


class LeaseLetGo(NamedTuple):
    """To the PrefillActor: our engine does not touch this lease any more."""

    lease: LeaseId


class ReadOrder(NamedTuple):
    """To the TransferActor: read this source to `local_address`."""

    lease: LeaseId
    wanted: slots.Wanted
    local_address: int


class AbortOrder(NamedTuple):
    """To the TransferActor: end this read by our own side."""

    read: ReadId


Mail = RoomWanted | RoomUnwanted | ReadAsked | LeaseDone | LeaseFree | ReadNews


class ReceiveBuffers(Actor[Mail]):
    """Leases room in one total order; hands reads on; frees what the engine has let go of.

    `sealed`: each item gets room for its seal as well, which comes with its payload.
    """

    def __init__(
        self,
        runtime: Runtime,
        mailbox: Mailbox[Mail],
        pool: Pool,
        limits: slots.Limits,
        *,
        sealed: bool = False,
    ) -> None:
        super().__init__("buffers", mailbox)
        self._sealed = sealed
        self._pool = pool
        self._waiters: Waiters[TransferId] = Waiters(ageing_s=1.0)
        self._clock = runtime.clock
        self._leases: dict[LeaseId, tuple[Extent, ...]] = {}
        self._slots: MachineTable = runtime.machines("slots", slots, limits, self._perform)
        self._next_lease = 1
        self._next_read = 1
        self.to_prefill: Ref[RoomAnswer | ItemRead | LeaseLetGo]
        self.to_transfer: Ref[ReadOrder | AbortOrder]

    def handle(self, message: Mail) -> None:
        match message:
            case RoomWanted():
                self._want_room(message)
            case ReadAsked():
                self._ask_read(message)
            case ReadNews():
                self._slots.feed(message.lease, message.event)
            case LeaseDone():
                self._slots.feed(message.lease, slots.LeaseReturned())
            case LeaseFree():
                self._pool.give(self._leases.pop(message.lease))
                self._admit()
            case RoomUnwanted():
                if self._waiters.withdraw(message.transfer):
                    self._admit()

    def _want_room(self, message: RoomWanted) -> None:
        sizes = message.sizes_nbytes
        if self._sealed:
            sizes = tuple(sealed_nbytes(nbytes) for nbytes in sizes)
        if not self._pool.fits_empty(sizes):
            error = too_large(sizes, self._pool)
            self.to_prefill.tell(RoomAnswer(message.transfer, None, (), error.as_value()))
            return
        self._waiters.push(message.transfer, sizes, self._clock.now_s())
        self._admit()

    def _admit(self) -> None:
        for transfer, extents in self._waiters.admit(self._pool, self._clock.now_s()):
            lease = LeaseId(self._next_lease)
            self._next_lease += 1
            self._leases[lease] = extents
            self._slots.feed(lease, slots.LeaseTaken(lease))
            self.to_prefill.tell(RoomAnswer(transfer, lease, extents))

    def _ask_read(self, message: ReadAsked) -> None:
        read = message.read
        if read.lease not in self._leases:
            return
        wanted = slots.Wanted(
            ReadId(self._next_read),
            read.session,
            read.part,
            read.attempt,
            read.item,
            read.source,
            read.digest,
        )
        self._next_read += 1
        self._slots.feed(read.lease, slots.ReadWanted(wanted))

    def _perform(self, lease: LeaseId, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case slots.PostRead():
                    extent = self._leases[lease][effect.wanted.item]
                    address = self._pool.address(extent)
                    self.to_transfer.tell(ReadOrder(lease, effect.wanted, address))
                case slots.TellReadEnded():
                    ended = ReadEnded(effect.part, effect.attempt, effect.item, effect.error)
                    self.to_prefill.tell(ItemRead(lease, ended))
                case slots.AbortRead():
                    self.to_transfer.tell(AbortOrder(effect.read))
                case slots.FreeExtents():
                    self.to_prefill.tell(LeaseLetGo(lease))

    def lease_nbytes(self, lease: LeaseId) -> int:
        """What a lease takes from the pool; 0 if it is none."""
        return sum(aligned(extent.nbytes) for extent in self._leases.get(lease, ()))

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiters)

    def counts(self) -> dict[str, int]:
        quarantined = sum(isinstance(self._slots.state(lease), slots.Quarantined) for lease in self._leases)
        return {
            "slots": len(self._leases),
            "quarantined": quarantined,
            "room_waiters": len(self._waiters),
            "pool_free_nbytes": self._pool.free_nbytes,
            "pool_used_nbytes": self._pool.total_nbytes - self._pool.free_nbytes,
        }


def too_large(sizes_nbytes: Sequence[int], pool: Pool) -> RequestTooLarge:
    """Names the sizes that do not fit an empty pool."""
    largest, total = max(sizes_nbytes), sum(sizes_nbytes)
    return RequestTooLarge(
        f"{len(sizes_nbytes)} items of {total} B in all, the largest {largest} B; the pool has "
        f"{pool.total_nbytes} B in regions of {pool.region_nbytes} B",
        nbytes=total,
        largest_nbytes=largest,
        pool_nbytes=pool.total_nbytes,
        region_nbytes=pool.region_nbytes,
    )
