"""Rank 0's side of a rank group: the log, and its own place in it. A group of one has no other rank."""

from collections import deque
from collections.abc import Callable

from epd.actors.receive_buffers import ItemRead, LeaseDone, LeaseFree, ReadAsked
from epd.protocol import group, rank
from epd.protocol.errors import EpdError
from epd.protocol.ids import Incarnation, LeaseId, TransferId
from epd.protocol.machine import Effect, Ignored
from epd.protocol.messages import EmbeddingSpec, ErrorValue
from epd.protocol.prefill_types import ReadEnded, Released, StartRead
from epd.runtime.machines import MachineTable
from epd.runtime.runtime import Runtime

Shown = group.Deliver | group.Fail | group.Cancel
"""What a consumer gets, once every rank has applied it, in the log's order."""

_KEY, _OWN = 0, 0
"""The one group of a node, and rank 0 in it."""


class RankGroup:
    """Between the request machines, this rank's slots, and the consumer.

    `order` goes to this rank's buffers, `tell` to a request machine, `show` to the consumer. Any
    method raises `EpdError` if the group's incarnation ends: the node's ends with it.
    """

    def __init__(
        self,
        runtime: Runtime,
        incarnation: Incarnation,
        *,
        order: Callable[[ReadAsked | LeaseDone | LeaseFree], None],
        tell: Callable[[TransferId, ReadEnded | Released], None],
        show: Callable[[Shown], None],
    ) -> None:
        self._incarnation = incarnation
        self._order, self._tell, self._show = order, tell, show
        self._applied: deque[tuple[int, Shown]] = deque()
        self._log: MachineTable = runtime.machines(
            "group", group, group.Limits(), self._perform_log, counted=False
        )
        self._rank: MachineTable = runtime.machines(
            "rank", rank, rank.Limits(), self._perform_rank, counted=False
        )
        self._log.feed(_KEY, group.GroupFormed(incarnation, 1))
        self._rank.feed(_OWN, rank.Joined(incarnation, _OWN))
        self._log.feed(_KEY, group.RankJoined(incarnation, _OWN))

    # -- of the request machines -------------------------------------------------------------

    def take(self, lease: LeaseId, transfer: TransferId) -> None:
        self._log.feed(_KEY, group.LeaseTaken(lease, transfer))

    def read(self, start: StartRead) -> None:
        read = group.Read(
            start.lease, start.session, start.part, start.attempt, start.item, start.source, start.digest
        )
        self._log.feed(_KEY, group.ReadWanted(read))

    def deliver(self, lease: LeaseId, specs: tuple[EmbeddingSpec, ...]) -> None:
        self._log.feed(_KEY, group.DeliverWanted(lease, specs))

    def end(self, transfer: TransferId, error: ErrorValue) -> None:
        self._log.feed(_KEY, group.EndWanted(transfer, error))

    def give_back(self, lease: LeaseId) -> None:
        self._log.feed(_KEY, group.ReturnWanted(lease))

    # -- of this rank ------------------------------------------------------------------------

    def item_read(self, news: ItemRead) -> None:
        event = news.event
        read = group.RankRead(
            self._incarnation, _OWN, news.lease, event.part, event.attempt, event.item, event.error
        )
        self._log.feed(_KEY, read)

    def released(self, lease: LeaseId) -> None:
        self._log.feed(_KEY, group.RankReleased(self._incarnation, _OWN, lease))

    def let_go(self, lease: LeaseId) -> None:
        self._log.feed(_KEY, group.RankFreed(self._incarnation, _OWN, lease))

    # -- effects -----------------------------------------------------------------------------

    def _perform_log(self, _: int, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case group.Append():
                    received = rank.EntryReceived(self._incarnation, effect.number, effect.entry)
                    self._rank.feed(_OWN, received)
                case group.TellReadEnded():
                    ended = ReadEnded(effect.part, effect.attempt, effect.item, effect.error)
                    self._tell(effect.transfer, ended)
                case group.TellReleased():
                    self._tell(effect.transfer, Released())
                case group.Commit():
                    while self._applied and self._applied[0][0] <= effect.number:
                        self._show(self._applied.popleft()[1])
                case group.FreeLease():
                    self._order(LeaseFree(effect.lease))
                case group.EndGroup():
                    raise EpdError(f"the rank group has ended: {effect.reason}")
                case Ignored():
                    pass

    def _perform_rank(self, _: int, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case rank.Apply():
                    self._apply(effect.number, effect.entry)
                case rank.SendApplied():
                    self._log.feed(_KEY, group.RankApplied(self._incarnation, _OWN, effect.number))
                case rank.EndIncarnation():
                    raise EpdError(f"this rank has ended: {effect.reason}")

    def _apply(self, number: int, entry: group.AnyEntry) -> None:
        match entry:
            case group.Read():
                self._order(ReadAsked(entry))
            case group.Free():
                self._order(LeaseDone(entry.lease))
            case _:
                self._applied.append((number, entry))
