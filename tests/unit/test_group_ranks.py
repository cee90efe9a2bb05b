"""Rank 0 and its ranks together, in random orders: real machines, queues that keep their order (I1, I6).

Reads last as long as they like on each rank, some fail; requests are retried, cancelled, delivered;
there are fewer slots than requests, so a slot that is freed too early is written by two.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from machines import FIRST, NEAR, failure, source, specs

from epd.protocol import group, rank, slots
from epd.protocol.errors import Cancelled
from epd.protocol.ids import Attempt, Incarnation, LeaseId, ReadId, TransferId
from epd.protocol.machine import Effect, Event
from epd.protocol.unhandled import UNHANDLED

GROUP = Incarnation(9)
REQUESTS, SLOTS, ITEMS, ATTEMPTS = 12, 3, 2, 3


class Hosted:
    """One machine; an event fed by an effect waits for the other effects, as in the runtime."""

    def __init__(self, machine: Any, perform: Callable[[Effect], None]) -> None:
        self.machine, self.perform = machine, perform
        self.state = machine.INITIAL
        self.waiting: deque[Event] = deque()
        self.busy = False
        self.reasons = UNHANDLED[machine.__name__.rpartition(".")[2], "TRANSITIONS"]

    def feed(self, event: Event) -> None:
        self.waiting.append(event)
        if self.busy:
            return
        self.busy = True
        while self.waiting:
            event = self.waiting.popleft()
            reason = self.reasons.get((type(self.state), type(event)))
            assert reason is None or reason.kind == "ignored", (self.state, event, reason)
            self.state, effects = self.machine.step(self.state, event, 0.0, self.machine.Limits())
            for effect in effects:
                self.perform(effect)
        self.busy = False


class OneRank:
    def __init__(self, world: "World", number: int) -> None:
        self.world, self.number = world, number
        self.machine = Hosted(rank, self.perform)
        self.entries: deque[rank.EntryReceived] = deque()
        self.words: deque[Event] = deque()
        self.slots: dict[LeaseId, Hosted] = {}
        self.running: dict[ReadId, tuple[LeaseId, int, Attempt]] = {}
        self.whole: set[tuple[LeaseId, int]] = set()
        self.views: set[LeaseId] = set()
        self.shown: list[tuple[int, group.AnyEntry]] = []
        self.machine.feed(rank.Joined(GROUP, number))

    def perform(self, effect: Effect) -> None:
        match effect:
            case rank.Apply(number, entry):
                self.apply(number, entry)
            case rank.SendApplied(number):
                self.words.append(group.RankApplied(GROUP, self.number, number))
            case rank.EndIncarnation(reason):
                raise AssertionError(reason)

    def apply(self, number: int, entry: group.AnyEntry) -> None:
        match entry:
            case group.Read():
                wanted = slots.Wanted(
                    ReadId(number), NEAR, entry.part, entry.attempt, entry.item, entry.source
                )
                self.slot(entry.lease).feed(slots.ReadWanted(wanted))
            case group.Free():
                self.slot(entry.lease).feed(slots.LeaseReturned())
            case _:
                self.shown.append((number, entry))
                if isinstance(entry, group.Deliver):
                    self.views.add(entry.lease)

    def slot(self, lease: LeaseId) -> Hosted:
        if lease not in self.slots:
            self.slots[lease] = Hosted(slots, lambda effect: self.perform_slot(lease, effect))
            self.slots[lease].feed(slots.LeaseTaken(lease))
        return self.slots[lease]

    def perform_slot(self, lease: LeaseId, effect: Effect) -> None:
        match effect:
            case slots.PostRead(wanted):
                assert lease in self.world.holders.values(), "read into a slot of nobody, or of another"
                assert lease not in self.views
                self.running[wanted.read] = (lease, wanted.item, wanted.attempt)
                self.whole.discard((lease, wanted.item))
            case slots.TellReadEnded(part, attempt, item, error):
                self.words.append(group.RankRead(GROUP, self.number, lease, part, attempt, item, error))
            case slots.FreeExtents():
                self.words.append(group.RankFreed(GROUP, self.number, lease))

    def end_read(self) -> None:
        read = self.world.random.choice(list(self.running))
        lease, item, _ = self.running.pop(read)
        good = self.world.random.random() < 0.8
        if good:
            self.whole.add((lease, item))
        self.slots[lease].feed(slots.ReadTerminal(read, "ok" if good else "failed"))

    def release(self) -> None:
        lease = self.world.random.choice(list(self.views))
        self.views.remove(lease)
        self.words.append(group.RankReleased(GROUP, self.number, lease))

    def moves(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        if self.entries:
            found.append(lambda: self.machine.feed(self.entries.popleft()))
        if self.words:
            found.append(lambda: self.world.leader.feed(self.words.popleft()))
        if self.running:
            found.append(self.end_read)
        if self.views:
            found.append(self.release)
        return found


class World:
    """Rank 0's side: the log, the pool, and requests that know only what the group tells them."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.leader = Hosted(group, self.perform)
        self.log: list[group.AnyEntry] = []
        self.common = 0
        self.holders: dict[int, LeaseId] = {}
        self.leases: dict[TransferId, LeaseId] = {}
        self.left: dict[TransferId, dict[int, Attempt]] = {}
        self.submitted = 0
        self.ranks = [OneRank(self, number) for number in range(ranks)]
        self.leader.feed(group.GroupFormed(GROUP, ranks))
        for number in range(ranks):
            self.leader.feed(group.RankJoined(GROUP, number))

    def perform(self, effect: Effect) -> None:
        match effect:
            case group.Append(number, entry):
                self.log.append(entry)
                assert number == len(self.log)
                if isinstance(entry, group.Deliver):
                    whole = {(entry.lease, item) for item in range(ITEMS)}
                    assert all(whole <= one.whole for one in self.ranks), "delivered before all had read"
                for one in self.ranks:
                    one.entries.append(rank.EntryReceived(GROUP, number, entry))
            case group.TellReadEnded(transfer, _, attempt, item, error):
                self.hear_read(transfer, item, attempt, failed=error is not None)
            case group.TellReleased(transfer):
                self.leader.feed(group.ReturnWanted(self.leases.pop(transfer)))
            case group.Commit(number):
                self.common = number
                shown = [one.shown for one in self.ranks]
                assert all(any(at >= number for at, _ in entries) for entries in shown)
            case group.FreeLease(lease):
                for one in self.ranks:
                    assert lease not in one.views, "freed under a consumer"
                    assert all(running[0] != lease for running in one.running.values()), "freed under a read"
                self.holders = {slot: held for slot, held in self.holders.items() if held != lease}

    def submit(self) -> None:
        self.submitted += 1
        transfer, lease = TransferId(self.submitted), LeaseId(100 + self.submitted)
        slot = next(slot for slot in range(SLOTS) if slot not in self.holders)
        self.holders[slot] = self.leases[transfer] = lease
        self.leader.feed(group.LeaseTaken(lease, transfer))
        self.left[transfer] = {item: Attempt(1) for item in range(ITEMS)}
        for item in range(ITEMS):
            self.read(transfer, item)

    def read(self, transfer: TransferId, item: int) -> None:
        attempt = self.left[transfer][item]
        read = group.Read(self.leases[transfer], NEAR, FIRST, attempt, item, source(item))
        self.leader.feed(group.ReadWanted(read))

    def hear_read(self, transfer: TransferId, item: int, attempt: Attempt, *, failed: bool) -> None:
        left = self.left[transfer]
        assert left[item] == attempt
        if failed and attempt == ATTEMPTS:
            self.end(transfer, cancelled=False)
        elif failed:
            left[item] = Attempt(attempt + 1)
            self.read(transfer, item)
        else:
            del left[item]
            if not left:
                del self.left[transfer]
                self.leader.feed(group.DeliverWanted(self.leases[transfer], specs(range(ITEMS))))

    def end(self, transfer: TransferId, *, cancelled: bool) -> None:
        del self.left[transfer]
        error = Cancelled("on purpose").as_value() if cancelled else failure()
        self.leader.feed(group.ReturnWanted(self.leases.pop(transfer)))
        self.leader.feed(group.EndWanted(transfer, error))

    def supersede(self) -> None:
        """Another attempt while the reads of the last one run: its session has ended, say."""
        transfer = self.random.choice(list(self.left))
        item = self.random.choice(list(self.left[transfer]))
        if self.left[transfer][item] < ATTEMPTS:
            self.left[transfer][item] = Attempt(self.left[transfer][item] + 1)
            self.read(transfer, item)

    def run(self) -> None:
        while True:
            moves = [move for one in self.ranks for move in one.moves()]
            if self.submitted < REQUESTS and len(self.holders) < SLOTS:
                moves.append(self.submit)
            if not moves:
                return
            if self.left and self.random.random() < 0.03:
                self.end(self.random.choice(list(self.left)), cancelled=True)
            elif self.left and self.random.random() < 0.05:
                self.supersede()
            else:
                self.random.choice(moves)()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_agree_and_nothing_is_touched_that_is_free(ranks: int) -> None:
    ends: set[type] = set()
    for seed in range(40):
        world = World(ranks, seed)
        world.run()
        ends_only = group.Deliver | group.Fail | group.Cancel
        shown = [(at, entry) for at, entry in enumerate(world.log, 1) if isinstance(entry, ends_only)]
        assert [one.shown for one in world.ranks] == [shown] * ranks
        assert world.common == shown[-1][0]
        ended = [entry.transfer for _, entry in shown]
        assert sorted(ended) == list(range(1, REQUESTS + 1)), "each has one end, the same everywhere"
        ends |= {type(entry) for _, entry in shown}
        assert (world.holders, world.leases, world.left, world.leader.state.leases) == ({}, {}, {}, ())
        for one in world.ranks:
            assert all(isinstance(slot.state, slots.Free) for slot in one.slots.values())
    assert ends == {group.Deliver, group.Fail, group.Cancel}
