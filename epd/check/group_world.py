"""A rank group as the checker sees it: request machines, rank 0's log, each rank's place in it, its slots.

The encoder is left out but for what a group can see of it: it answers, its sources stand until the receipt
or the attempt's end, sessions end. Each rank reads for itself; what a rank and rank 0 tell each other
arrives in order. A request has one picture. When a rank is lost, all start again.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from epd.check.invariants import (
    DeliveryView,
    LeaseView,
    PrefillView,
    RankView,
    View,
    Violation,
    WriteView,
    first_violation,
    i4_no_residue,
)
from epd.check.machines import DEADLINE_S, METADATA_S, PAUSE_S, Machines, Patch, Table, shipped
from epd.check.moves import DEADLINE, GIVE_UP, PAUSE, TURN, WORK, Move
from epd.check.prefill_node import PHASES
from epd.check.setup import Setup, picture, spec_of
from epd.protocol import group, rank, slots
from epd.protocol import messages as m
from epd.protocol import prefill_types as t
from epd.protocol.ids import (
    Attempt,
    Incarnation,
    LeaseId,
    Part,
    ReadId,
    RegionId,
    Seal,
    SessionId,
    TransferId,
)
from epd.protocol.machine import Effect, Event, TimerExpired

GROUP = Incarnation(9)
RANKS = 2


class Read(NamedTuple):
    rank: int
    read: int
    lease: int
    transfer: int
    attempt: int
    aborted: bool = False


class GroupState(NamedTuple):
    requests: tuple[tuple[int, Any], ...] = ()
    group: tuple[tuple[int, Any], ...] = ()
    ranks: tuple[tuple[int, Any], ...] = ()
    slots: tuple[tuple[tuple[int, int], Any], ...] = ()
    """By (rank, lease)."""
    leases: tuple[tuple[int, int, int], ...] = ()
    """Rank 0's: (lease, transfer, slot); the same slot on every rank."""
    waiting: tuple[int, ...] = ()
    to_ranks: tuple[tuple[Any, ...], ...] = ((),) * RANKS
    to_zero: tuple[tuple[Any, ...], ...] = ((),) * RANKS
    reads: tuple[Read, ...] = ()
    memory: tuple[tuple[int, ...], ...] = ()
    """Per rank and slot: transfer + 1 of the picture that is whole there, or 0."""
    asked: tuple[tuple[int, int, str], ...] = ()
    """The encoder's: (transfer, attempt, how far it is)."""
    standing: tuple[tuple[int, int], ...] = ()
    """Sources that were not reused: (transfer, attempt)."""
    session: int = 1
    told: tuple[tuple[str, ...], ...] = ()
    views: tuple[tuple[int, int, int], ...] = ()
    """(rank, transfer, lease) of deliveries that were not released."""
    log: tuple[str, ...] = ()
    applied: tuple[tuple[str, ...], ...] = ((),) * RANKS
    shown: int = 0
    over: bool = False
    submitted: int = 0
    faults: int = 0
    flaws: tuple[str, ...] = ()


class GroupWorld:
    """Explorable; `setup` gives the requests, the pool, the attempts and the faults."""

    def __init__(self, setup: Setup, patches: Mapping[str, Patch] | None = None) -> None:
        self.setup = setup
        self.machines = Machines(shipped(setup.attempts), patches or {})
        self.longest_queue = 0

    def initial(self) -> GroupState:
        node = _Node(self.setup, self.machines, GroupState(faults=self.setup.faults))
        node.form()
        return node.frozen()

    def apply(self, state: GroupState, move: Move) -> GroupState:
        if state.over:
            return state
        node = _Node(self.setup, self.machines, state)
        handler: Callable[..., None] = getattr(node, "on_" + move.words[0].replace("-", "_"))
        handler(*move.words[1:])
        after = node.frozen()
        self.longest_queue = max(self.longest_queue, *map(len, (*after.to_ranks, *after.to_zero)))
        return after._replace(faults=after.faults - move.cost)

    apply_logged = apply

    def moves(self, state: GroupState) -> Iterator[Move]:
        yield from (move for move in self.resting_moves(state) if move.cost <= state.faults)
        if state.over:
            return
        formed = len(state.ranks) == RANKS
        if formed and state.submitted < len(self.setup.requests):
            yield Move(0, None, ("submit", state.submitted))
        if not state.faults:
            return
        kinds = self.setup.kinds
        if "cut" in kinds and state.asked:
            yield Move(1, None, ("cut",))
        if "cancel" in kinds:
            for transfer, _ in state.requests:
                yield Move(1, None, ("cancel", transfer))
        if "lose-rank" in kinds:
            yield Move(1, None, ("lose-rank", 1))
            if formed:
                yield Move(1, None, ("join", 1))

    def resting_moves(self, state: GroupState) -> Iterator[Move]:
        if state.over:
            return
        if len(state.ranks) < RANKS:
            yield Move(0, TURN, ("join", 1))
        for number in range(RANKS):
            if state.to_ranks[number]:
                yield Move(0, TURN, ("entry", number))
            if state.to_zero[number]:
                yield Move(0, TURN, ("word", number))
        for transfer, _, stage in state.asked:
            if stage in {"asked", "granted"}:
                yield Move(0, WORK, ("answer" if stage == "asked" else "ready", transfer))
        kinds = self.setup.kinds
        for read in state.reads:
            yield Move(0, WORK, ("read-ends", read.rank, read.read, "ok"))
            fails = 0 if read.aborted else 1 if "read-fails" in kinds else 99
            yield Move(fails, None, ("read-ends", read.rank, read.read, "failed"))
        for (number, lease), slot in state.slots:
            if slot.deadline_s is not None:
                cost = 1 if "read-timeout" in kinds else 99
                yield Move(cost, GIVE_UP, ("read-timeout", number, lease, int(slot.deadline_s)))
        for number, transfer, _ in state.views:
            yield Move(0, WORK, ("release-rank", number, transfer))
        early = 1 if "timeout" in kinds else 99
        for transfer, request in state.requests:
            for part in getattr(request, "parts", ()):
                if isinstance(part, t.Placing) and part.deadline_s is not None:
                    yield Move(0, PAUSE, ("timeout", transfer, "pause"))
                if isinstance(part, t.Requested):
                    yield Move(early, GIVE_UP, ("timeout", transfer, "metadata"))
                yield Move(early, DEADLINE, ("timeout", transfer, "deadline"))

    def view(self, state: GroupState) -> View:
        prefills = []
        for number in range(RANKS):
            slot_of = {lease: slot for lease, _, slot in state.leases}
            deliveries = tuple(
                DeliveryView(
                    f"r{transfer} on rank {number}",
                    lease,
                    (slot_of[lease],) if lease in slot_of else (),
                    lease not in slot_of or state.memory[number][slot_of[lease]] == transfer + 1,
                )
                for on, transfer, lease in state.views
                if on == number
            )
            writes = tuple(
                WriteView(r.read, r.lease, slot_of.get(r.lease, -1)) for r in state.reads if r.rank == number
            )
            leases = tuple(LeaseView(lease, (slot,)) for lease, _, slot in state.leases)
            told = tuple((f"r{i}", words) for i, words in enumerate(state.told)) if number == 0 else ()
            held = self.held(state) if number == 0 else ()
            prefills.append(
                PrefillView(
                    self.setup.pool_slots, leases, writes, deliveries, told, flaws=state.flaws, held=held
                )
            )
        machines = dict(state.ranks)
        ranks = tuple(
            RankView(state.applied[n], state.log, getattr(machines.get(n), "applied", 0))
            for n in range(RANKS)
        )
        return View(prefills=tuple(prefills), ranks=ranks)

    def violation(self, state: GroupState) -> Violation | None:
        return None if state.over else first_violation(self.view(state))

    def residue(self, state: GroupState) -> Violation | None:
        if state.over:  # every rank's process ends, and all it held with it
            return None
        found = i4_no_residue(self.view(state))
        if found is None:
            for transfer in range(state.submitted):
                if len(state.told[transfer]) != 1:
                    return Violation("I3", f"r{transfer} has ended without a word")
        return found

    def told(self, state: GroupState) -> tuple[tuple[str, ...], ...]:
        """Per request, what rank 0's consumer was shown."""
        return state.told

    def held(self, state: GroupState) -> tuple[str, ...]:
        leading = dict(state.group).get(0)
        return (
            *(f"request r{transfer}" for transfer, _ in state.requests),
            *(f"slot of lease {lease} on rank {number}" for (number, lease), _ in state.slots),
            *(f"lease {lease}" for lease, _, _ in state.leases),
            *(f"lease {held.lease} of the group" for held in getattr(leading, "leases", ())),
            *(f"wish for room of r{transfer}" for transfer in state.waiting),
            *(f"read on rank {read.rank}" for read in state.reads),
            *(f"view of r{transfer} on rank {number}" for number, transfer, _ in state.views),
        )


class _Node:
    """All ranks at once, as one move changes them."""

    def __init__(self, setup: Setup, machines: Machines, state: GroupState) -> None:
        self._setup = setup
        self._state = state
        self._requests = Table("request", machines, state.requests, self._perform)
        self._group = Table("group", machines, state.group, self._perform_group)
        self._ranks = Table("rank", machines, state.ranks, self._perform_rank)
        self._slots = Table("slot", machines, state.slots, self._perform_slot)
        self._leases = list(state.leases)
        self._waiting = list(state.waiting)
        self._to_ranks = [list(queue) for queue in state.to_ranks]
        self._to_zero = [list(queue) for queue in state.to_zero]
        self._reads = {(read.rank, read.read): read for read in state.reads}
        self._memory = [list(cells) for cells in state.memory] or [
            [0] * setup.pool_slots for _ in range(RANKS)
        ]
        self._asked = {transfer: (attempt, stage) for transfer, attempt, stage in state.asked}
        self._standing = set(state.standing)
        self._session = state.session
        self._told = list(state.told) or [()] * len(setup.requests)
        self._views = list(state.views)
        self._log = list(state.log)
        self._applied = [list(entries) for entries in state.applied]
        self._shown, self._over = state.shown, state.over
        self._submitted = state.submitted
        self._flaws = list(state.flaws)

    def frozen(self) -> GroupState:
        if self._over:
            return GroupState(over=True, faults=self._state.faults, told=self._state.told)
        return GroupState(
            self._requests.frozen(),
            self._group.frozen(),
            self._ranks.frozen(),
            self._slots.frozen(),
            tuple(self._leases),
            tuple(self._waiting),
            tuple(map(tuple, self._to_ranks)),
            tuple(map(tuple, self._to_zero)),
            tuple(self._reads[key] for key in sorted(self._reads)),
            tuple(map(tuple, self._memory)),
            tuple((transfer, *self._asked[transfer]) for transfer in sorted(self._asked)),
            tuple(sorted(self._standing)),
            self._session,
            tuple(self._told),
            tuple(self._views),
            tuple(self._log),
            tuple(map(tuple, self._applied)),
            self._shown,
            False,
            self._submitted,
            self._state.faults,
            tuple(self._flaws),
        )

    def form(self) -> None:
        self._group.feed(0, group.GroupFormed(GROUP, RANKS))
        self.on_join(0)

    # -- moves -------------------------------------------------------------------------------

    def on_join(self, number: int) -> None:
        """Also again, as a process that has begun anew."""
        if number not in self._ranks.states:
            self._ranks.feed(number, rank.Joined(GROUP, number))
        self._group.feed(0, group.RankJoined(GROUP, number))

    def on_submit(self, transfer: int) -> None:
        self._submitted += 1
        kind = self._setup.requests[transfer][0].kinds[0]
        plan = t.PartPlan((0,), SessionId(self._session))
        self._requests.feed(transfer, t.Submitted((picture(kind),), "float32", DEADLINE_S, (plan,)))

    def on_entry(self, number: int) -> None:
        self._ranks.feed(number, self._to_ranks[number].pop(0))

    def on_word(self, number: int) -> None:
        self._group.feed(0, self._to_zero[number].pop(0))

    def on_answer(self, transfer: int) -> None:
        attempt, _ = self._asked[transfer]
        self._asked[transfer] = (attempt, "sized")
        spec = spec_of(self._setup, 0)
        sized = t.MetadataReceived(SessionId(self._session), Part(0), Attempt(attempt), (spec,))
        self._requests.feed(transfer, sized)

    def on_ready(self, transfer: int) -> None:
        attempt, _ = self._asked[transfer]
        self._asked[transfer] = (attempt, "ready")
        self._standing.add((transfer, attempt))
        spec = spec_of(self._setup, 0)
        ready = m.ReadyItem(m.Source(RegionId(0), 0, spec.nbytes, Seal(attempt)), spec)
        lease = LeaseId(transfer + 1)
        self._requests.feed(
            transfer,
            t.SourcesReady(SessionId(self._session), Part(0), Attempt(attempt), lease, 0, (ready,), True),
        )

    def on_read_ends(self, number: int, read: int, outcome: str) -> None:
        entry = self._reads.pop((number, read))
        slot = next((slot for lease, _, slot in self._leases if lease == entry.lease), None)
        if outcome == "ok":
            stands = (entry.transfer, entry.attempt) in self._standing
            if slot is not None:
                self._memory[number][slot] = entry.transfer + 1 if stands else 0
            outcome = "ok" if stands else "seal_mismatch"
        self._slots.feed((number, entry.lease), slots.ReadTerminal(ReadId(read), outcome))

    def on_read_timeout(self, number: int, lease: int, after_s: float) -> None:
        self._slots.feed((number, lease), TimerExpired(), float(after_s))

    def on_release_rank(self, number: int, transfer: int) -> None:
        view = next(view for view in self._views if view[:2] == (number, transfer))
        self._views.remove(view)
        self._say(number, group.RankReleased(GROUP, number, LeaseId(view[2])))

    def on_timeout(self, transfer: int, phase: str) -> None:
        self._requests.feed(transfer, TimerExpired(), PHASES[phase])
        state = self._requests.state(transfer)
        if hasattr(state, "parts"):
            self._requests.put(transfer, replace(state, parts=tuple(map(_from_zero, state.parts))))

    def on_cancel(self, transfer: int) -> None:
        self._requests.feed(transfer, t.CancelWanted())

    def on_cut(self) -> None:
        """The encoder's session ends, and there is another at once."""
        self._asked.clear()
        self._standing.clear()
        over, self._session = self._session, self._session + 1
        for transfer in list(self._requests.states):
            self._requests.feed(transfer, t.SessionEnded(SessionId(over)))

    def on_lose_rank(self, number: int) -> None:
        self._group.feed(0, group.RankLost(GROUP, number))
        if "replace a rank" in self._setup.broken and not self._over:
            # It comes again without its memory, at the log's end.
            at = self._ranks.state(number).applied + len(self._to_ranks[number])
            self._ranks.put(number, rank.Following(GROUP, number, at))
            self._to_ranks[number], self._to_zero[number], self._applied[number] = [], [], []
            self._memory[number] = [0] * self._setup.pool_slots
            for key in [key for key in self._reads if key[0] == number]:
                del self._reads[key]
            for key in [key for key in self._slots.states if key[0] == number]:
                del self._slots.states[key]
            self._views = [view for view in self._views if view[0] != number]

    # -- effects -----------------------------------------------------------------------------

    def _say(self, number: int, event: Event) -> None:
        if number:
            self._to_zero[number].append(event)
        else:
            self._group.feed(0, event)

    def _perform(self, transfer: int, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case t.SendEncodeRequest():
                    self._asked[transfer] = (effect.attempt, "asked")
                case t.SendGrant():
                    self._asked[transfer] = (effect.attempt, "granted")
                case t.SendReceipt():
                    self._take_receipt(transfer)
                case t.SendCancel():
                    self._asked.pop(transfer, None)
                    self._standing.discard((transfer, effect.attempt))
                case t.ChooseEncoder():
                    chosen = t.EncoderChosen(effect.part, SessionId(self._session))
                    self._requests.feed(transfer, chosen)
                case t.StartRead():
                    read = group.Read(
                        effect.lease, effect.session, effect.part, effect.attempt, effect.item, effect.source
                    )
                    self._group.feed(0, group.ReadWanted(read))
                case t.AskRoom():
                    self._waiting.append(transfer)
                    self._admit()
                case t.WithdrawRoom():
                    self._waiting.remove(transfer)
                case t.ReturnLease():
                    self._group.feed(0, group.ReturnWanted(effect.lease))
                case t.Deliver():
                    self._group.feed(0, group.DeliverWanted(effect.lease, effect.specs))
                case t.FailRequest():
                    self._group.feed(0, group.EndWanted(TransferId(transfer), effect.error))

    def _take_receipt(self, transfer: int) -> None:
        """The encoder may reuse the source from now on: every rank must have it whole."""
        attempt, _ = self._asked.pop(transfer)
        self._standing.discard((transfer, attempt))
        slot = next(slot for _, of, slot in self._leases if of == transfer)
        for number in range(RANKS):
            if self._memory[number][slot] != transfer + 1:
                self._flaws.append(f"I6: Receipt of r{transfer} before rank {number} has read it")

    def _admit(self) -> None:
        used = {slot for _, _, slot in self._leases}
        while self._waiting and len(used) < self._setup.pool_slots:
            transfer = self._waiting.pop(0)
            slot = next(slot for slot in range(self._setup.pool_slots) if slot not in used)
            used.add(slot)
            lease = LeaseId(transfer + 1)
            self._leases.append((lease, transfer, slot))
            for cells in self._memory:
                cells[slot] = 0
            self._group.feed(0, group.LeaseTaken(lease, TransferId(transfer)))
            self._slots.feed((0, lease), slots.LeaseTaken(lease))
            self._requests.feed(transfer, t.RoomLeased(lease))

    def _perform_group(self, _: int, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case group.Append():
                    self._log.append(_entry(effect.entry))
                    received = rank.EntryReceived(GROUP, effect.number, effect.entry)
                    for number in range(1, RANKS):
                        self._to_ranks[number].append(received)
                    self._ranks.feed(0, received)
                case group.TellReadEnded():
                    ended = t.ReadEnded(effect.part, effect.attempt, effect.item, effect.error)
                    self._requests.feed(effect.transfer, ended)
                case group.TellReleased():
                    self._requests.feed(effect.transfer, t.Released())
                case group.Commit():
                    self._show(effect.number)
                case group.FreeLease():
                    self._leases = [entry for entry in self._leases if entry[0] != effect.lease]
                    self._admit()
                case group.EndGroup():
                    for number in list(self._ranks.states):
                        self._ranks.feed(number, rank.GroupEnded(GROUP))
                    self._over = True

    def _show(self, number: int) -> None:
        """Rank 0's consumer sees the log up to here: every rank must have applied that."""
        for entry in self._log[self._shown : number]:
            what, _, transfer = entry.partition(" r")
            if what in {"deliver", "fail", "cancel"}:
                self._told[int(transfer)] = (*self._told[int(transfer)], what)
        for follower, entries in enumerate(self._applied):
            if len(entries) < number:
                self._flaws.append(f"I6: entry {number} was shown before rank {follower} applied it")
        self._shown = number

    def _perform_rank(self, number: int, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case rank.Apply():
                    self._applied[number].append(_entry(effect.entry))
                    self._apply(number, effect.number, effect.entry)
                case rank.SendApplied():
                    self._say(number, group.RankApplied(GROUP, number, effect.number))
                case rank.EndIncarnation():
                    self._over = True

    def _apply(self, number: int, at: int, entry: group.AnyEntry) -> None:
        match entry:
            case group.Read():
                if (number, entry.lease) not in self._slots.states:
                    self._slots.feed((number, entry.lease), slots.LeaseTaken(entry.lease))
                wanted = slots.Wanted(
                    ReadId(at), entry.session, entry.part, entry.attempt, entry.item, entry.source
                )
                self._slots.feed((number, entry.lease), slots.ReadWanted(wanted))
            case group.Free():
                if (number, entry.lease) not in self._slots.states:
                    self._slots.feed((number, entry.lease), slots.LeaseTaken(entry.lease))
                self._slots.feed((number, entry.lease), slots.LeaseReturned())
            case group.Deliver():
                self._views.append((number, entry.transfer, entry.lease))

    def _perform_slot(self, key: tuple[int, int], effects: tuple[Effect, ...]) -> None:
        number, lease = key
        for effect in effects:
            match effect:
                case slots.PostRead():
                    w = effect.wanted
                    self._reads[number, w.read] = Read(number, w.read, lease, lease - 1, w.attempt)
                    self._slots.feed(key, slots.ReadPosted(w.read))
                case slots.AbortRead():
                    read = self._reads.get((number, effect.read))
                    if read is not None:
                        self._reads[number, effect.read] = read._replace(aborted=True)
                case slots.TellReadEnded():
                    said = group.RankRead(
                        GROUP, number, LeaseId(lease), effect.part, effect.attempt, effect.item, effect.error
                    )
                    self._say(number, said)
                case slots.FreeExtents():
                    self._say(number, group.RankFreed(GROUP, number, LeaseId(lease)))


def _entry(entry: group.AnyEntry) -> str:
    """An entry as text: `read r0`, `deliver r0`."""
    transfer = (
        entry.transfer if isinstance(entry, group.Deliver | group.Fail | group.Cancel) else entry.lease - 1
    )
    return f"{type(entry).__name__.lower()} r{transfer}"


def _from_zero(part: Any) -> Any:
    if isinstance(part, t.Placing) and part.deadline_s is not None:
        return replace(part, deadline_s=PAUSE_S)
    return replace(part, deadline_s=METADATA_S) if isinstance(part, t.Requested) else part
