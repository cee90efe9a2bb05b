"""A prefill node as the checker sees it: request, slot and read machines, the pool, the engine's reads.

The glue of the actors `prefill`, `buffers` and `transfer`, without sockets and clocks. A node is a frozen
`PrefillState`; `PrefillNode` is the copy that one input works on.
"""

from typing import Any, NamedTuple

from msgspec.structs import replace

from epd.check.machines import DEADLINE_S, METADATA_S, PAUSE_S, ROOM_S, WARNING_S, Machines, Table, described
from epd.check.node import CheckedNode, Mail
from epd.check.setup import Setup, content, picture, rows_of
from epd.protocol import messages as m
from epd.protocol import prefill_types as t
from epd.protocol import reads, slots
from epd.protocol.ids import Incarnation, LeaseId, ReadId, SessionId, TransferId
from epd.protocol.machine import Effect, Event, TimerExpired
from epd.protocol.placement import EncoderLoad, choose_encoder
from epd.protocol.transfer_messages import heard_by_prefill, told_by_prefill

ENCODERS = 4
"""A session's number modulo this is its encoder's."""
PHASES = {
    "pause": PAUSE_S,
    "metadata": METADATA_S,
    "room": ROOM_S,
    "warning": WARNING_S,
    "deadline": DEADLINE_S,
}


class Read(NamedTuple):
    """A read that the engine has: where it writes, what of it is still posted (in `machine`)."""

    read: int
    lease: int
    slot: int
    session: int
    source: m.Source
    machine: Any
    loose: bool = False
    """Aborted: its pieces may end in any way."""
    stuck: bool = False
    """It does not go on before it is aborted."""
    early_seal: int = 0


class Leased(NamedTuple):
    lease: int
    transfer: int
    slots: tuple[int, ...]


class PrefillState(NamedTuple):
    requests: tuple[tuple[int, Any], ...] = ()
    slots: tuple[tuple[int, Any], ...] = ()
    leases: tuple[Leased, ...] = ()
    waiting: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """Transfer, slots wanted, slots already held (never any, unless a rule is broken)."""
    sessions: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    reads: tuple[Read, ...] = ()
    memory: tuple[tuple[int, ...], ...] = ()
    told: tuple[tuple[str, ...], ...] = ()
    """Per request, what its consumer was told."""
    held: tuple[tuple[int, int], ...] = ()
    """(transfer, lease) of deliveries that were not released."""
    mail: Mail = ()
    flaws: tuple[str, ...] = ()


class PrefillNode(CheckedNode[PrefillState]):
    def __init__(self, setup: Setup, machines: Machines, state: PrefillState) -> None:
        super().__init__("prefill", setup, state.sessions, state.mail, state.flaws)
        self._machines = machines
        self._requests = Table("request", machines, state.requests, self._perform)
        self._slots = Table("slot", machines, state.slots, self._perform_slot)
        self._leases = {entry.lease: entry for entry in state.leases}
        self._waiting = list(state.waiting)
        self._peers = list(state.peers)
        self._reads = {entry.read: entry for entry in state.reads}
        self._memory = list(state.memory) or [()] * setup.pool_slots
        self._told = list(state.told) or [()] * len(setup.requests)
        self._held = list(state.held)

    def frozen(self) -> PrefillState:
        return PrefillState(
            self._requests.frozen(),
            self._slots.frozen(),
            tuple(sorted(self._leases.values())),
            tuple(self._waiting),
            tuple(self._sessions),
            tuple(self._peers),
            tuple(self._reads[read] for read in sorted(self._reads)),
            tuple(self._memory),
            tuple(self._told),
            tuple(self._held),
            tuple(self._mail),
            tuple(self._flaws),
        )

    # -- from outside ------------------------------------------------------------------------

    def _on_submit(self, transfer: int) -> None:
        plans: list[t.PartPlan] = []
        items: list[m.Item] = []
        for part in self._setup.requests[transfer]:
            numbers = tuple(range(len(items), len(items) + len(part.kinds)))
            items.extend(map(picture, part.kinds))
            session = next((s for s in self._sessions if s % ENCODERS == part.encoder), None)
            plans.append(t.PartPlan(numbers, None if session is None else SessionId(session)))
        self._requests.feed(transfer, t.Submitted(tuple(items), "float32", DEADLINE_S, tuple(plans)))

    def _on_message(self, session: int, message: Any) -> None:
        if session not in self._sessions and "any session" not in self._setup.broken:
            return
        if isinstance(message, m.NeedMedia):
            wanted = any(
                message.sha256 == item.sha256
                for _, state in self._requests.states.items()
                for item in getattr(state, "items", ())
            )
            self._send(session, message if wanted else m.MediaMissing(message.sha256))
            return
        if session not in self._sessions:
            self._flaws.append(f"I8: acted on {type(message).__name__} of session {session}, which is over")
        self._requests.feed(message.transfer, heard_by_prefill(SessionId(session), message))

    def _on_up(self, session: int) -> None:
        self._sessions.append(session)
        self._tell("transfer", "open_peer", session)
        for transfer, state in list(self._requests.states.items()):
            if any(isinstance(part, t.Placing) for part in getattr(state, "parts", ())):
                self._requests.feed(transfer, t.EncoderAvailable())

    def _on_down(self, session: int) -> None:
        if session not in self._sessions:
            return
        self._sessions.remove(session)
        self._tell("transfer", "close_peer", session)
        for transfer, state in list(self._requests.states.items()):
            if any(getattr(part, "session", None) == session for part in getattr(state, "parts", ())):
                self._requests.feed(transfer, t.SessionEnded(SessionId(session)))

    def _on_timeout(self, transfer: int, phase: str) -> None:
        self._requests.feed(transfer, TimerExpired(), PHASES[phase])
        state = self._requests.state(transfer)
        if hasattr(state, "parts"):  # what was set now counts from now, which is second 0 again
            parts = tuple(map(_from_zero, state.parts))
            state = replace(state, parts=parts)
            if isinstance(state, t.AwaitingRoom):
                state = replace(state, room_deadline_s=ROOM_S)
            self._requests.put(transfer, state)

    def _on_read_timeout(self, lease: int, after_s: float) -> None:
        self._slots.feed(lease, TimerExpired(), float(after_s))

    def _on_take(self, transfer: int) -> None:
        self._requests.feed(transfer, t.Taken())

    def _on_release(self, transfer: int) -> None:
        self._held = [entry for entry in self._held if entry[0] != transfer]
        self._requests.feed(transfer, t.Released())

    def _on_cancel(self, transfer: int) -> None:
        self._requests.feed(transfer, t.CancelWanted())

    def _on_piece(self, read: int, index: int, outcome: reads.PieceOutcome, cell: int, seal: int) -> None:
        """One piece ends; if it is done, what the encoder's memory holds now lands in our slot."""
        entry = self._reads[read]
        if outcome == "done":
            cells = list(self._memory[entry.slot])
            cells += [0] * (rows_of(entry.source) - len(cells))
            cells[index] = cell
            self._memory[entry.slot] = tuple(cells)
            if "early seal" in self._setup.broken and not entry.early_seal:
                self._reads[read] = entry._replace(early_seal=seal)
        self._feed_read(read, reads.PieceEnded(index, outcome))

    def _on_seal(self, read: int, seal: int) -> None:
        self._feed_read(read, reads.SealRead(seal or None))

    def _on_stick(self, read: int) -> None:
        self._reads[read] = self._reads[read]._replace(stuck=True)

    def _on_restart_buffers(self) -> None:
        """Only under a broken rule: the actor that owns the leases starts again without them."""
        self._slots.states.clear()
        self._leases.clear()
        self._waiting.clear()

    # -- actor `prefill` ---------------------------------------------------------------------

    def _perform(self, transfer: int, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            self._perform_effect(transfer, effect)

    def _perform_effect(self, transfer: int, effect: Effect) -> None:
        match effect:
            case t.SendEncodeRequest() | t.SendGrant() | t.SendReceipt() | t.SendCancel():
                self._send(effect.session, told_by_prefill(TransferId(transfer), effect, now_s=0.0))
            case t.ChooseEncoder():
                loads = [EncoderLoad(SessionId(s), Incarnation(s % ENCODERS), 0, 128) for s in self._sessions]
                chosen = choose_encoder(effect.items, loads, effect.avoid)
                self._requests.feed(transfer, t.EncoderChosen(effect.part, chosen))
            case t.StartRead():
                self._tell("buffers", "want_read", effect)
            case t.AskRoom():
                self._tell("buffers", "want_room", transfer, len(effect.sizes_nbytes))
            case t.WithdrawRoom():
                self._tell("buffers", "withdraw_room", transfer)
            case t.ReturnLease():
                self._tell("buffers", "slot_event", effect.lease, slots.LeaseReturned())
            case t.Deliver():
                self._told[transfer] = (*self._told[transfer], "delivered")
                self._held.append((transfer, effect.lease))
            case t.FailRequest():
                self._told[transfer] = (*self._told[transfer], effect.error.code)

    def _feed_request(self, transfer: int, event: Event) -> None:
        self._requests.feed(transfer, event)

    # -- actor `buffers` ---------------------------------------------------------------------

    def _want_room(self, transfer: int, count: int) -> None:
        if count > self._setup.pool_slots:
            error = m.ErrorValue("request_too_large", False, "would not fit an empty pool")
            self._tell("prefill", "feed_request", transfer, t.RoomRefused(error))
            return
        self._waiting.append((transfer, count, ()))
        self._admit()

    def _withdraw_room(self, transfer: int) -> None:
        self._waiting = [entry for entry in self._waiting if entry[0] != transfer]
        self._admit()

    def _free_slots(self) -> list[int]:
        used = {slot for entry in self._leases.values() for slot in entry.slots}
        used |= {slot for _, _, held in self._waiting for slot in held}
        return [slot for slot in range(self._setup.pool_slots) if slot not in used]

    def _admit(self) -> None:
        if "hold and wait" in self._setup.broken:
            for index, (transfer, count, held) in enumerate(self._waiting):
                more = self._free_slots()[:1] if len(held) < count else []
                self._waiting[index] = (transfer, count, (*held, *more))
            for transfer, count, held in list(self._waiting):
                if len(held) == count:
                    self._waiting.remove((transfer, count, held))
                    self._lease(transfer, held)
            return
        while self._waiting and self._waiting[0][1] <= len(self._free_slots()):
            transfer, count, _ = self._waiting.pop(0)
            self._lease(transfer, tuple(self._free_slots()[:count]))

    def _lease(self, transfer: int, extents: tuple[int, ...]) -> None:
        # A request asks for room once, so its own number will do for its lease's.
        lease = LeaseId(transfer + 1)
        for slot in extents:
            self._memory[slot] = ()
        self._leases[lease] = Leased(lease, transfer, extents)
        self._slots.feed(lease, slots.LeaseTaken(lease))
        self._tell("prefill", "feed_request", transfer, t.RoomLeased(lease))

    def _want_read(self, start: t.StartRead) -> None:
        if start.lease not in self._leases:
            return
        # In the order of the attempts, as the node's own counter would have it.
        read = (((start.lease * 4) + start.part) * 8 + start.attempt) * 4 + start.item
        wanted = slots.Wanted(
            ReadId(read), start.session, start.part, start.attempt, start.item, start.source, start.digest
        )
        self._slots.feed(start.lease, slots.ReadWanted(wanted))

    def _slot_event(self, lease: int, event: Event) -> None:
        self._slots.feed(lease, event)

    def _perform_slot(self, lease: int, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case slots.PostRead():
                    slot = self._leases[lease].slots[effect.wanted.item]
                    self._tell("transfer", "post", lease, effect.wanted, slot)
                case slots.AbortRead():
                    self._tell("transfer", "abort", effect.read)
                case slots.TellReadEnded():
                    ended = t.ReadEnded(effect.part, effect.attempt, effect.item, effect.error)
                    self._tell("prefill", "feed_request", self._leases[lease].transfer, ended)
                case slots.FreeExtents():
                    for slot in self._leases.pop(lease).slots:
                        self._memory[slot] = ()
                    self._admit()

    # -- actor `transfer` --------------------------------------------------------------------

    def _open_peer(self, session: int) -> None:
        self._peers.append(session)

    def _close_peer(self, session: int) -> None:
        self._peers.remove(session)

    def _post(self, lease: int, wanted: slots.Wanted, slot: int) -> None:
        if wanted.session not in self._peers:
            self._tell("buffers", "slot_event", lease, slots.ReadTerminal(wanted.read, "refused"))
            return
        machine = self._machines.initial("read")
        self._reads[wanted.read] = Read(wanted.read, lease, slot, wanted.session, wanted.source, machine)

    def _on_post(self, read: int) -> None:
        """The poller takes it up."""
        entry = self._reads[read]
        self._tell("buffers", "slot_event", entry.lease, slots.ReadPosted(ReadId(read)))
        self._feed_read(read, reads.ReadWanted(rows_of(entry.source), entry.source.seal))

    def _abort(self, read: int) -> None:
        if read in self._reads:
            self._feed_read(read, reads.AbortWanted())

    def _feed_read(self, read: int, event: Event) -> None:
        entry = self._reads[read]
        before = entry.machine
        after, effects = self._machines.step("read", before, event)
        if self._machines.log is not None:
            self._machines.log.append(described("read", read, before, event, after, effects))
        self._reads[read] = entry._replace(machine=after)
        for effect in effects:
            match effect:
                case reads.AbortPeer():
                    for number, other in self._reads.items():
                        if other.session == entry.session:
                            self._reads[number] = other._replace(loose=True)
                case reads.ReadSeal() if entry.early_seal:
                    self._feed_read(read, reads.SealRead(entry.early_seal))
                    return
                case reads.Finish():
                    del self._reads[read]
                    terminal = slots.ReadTerminal(ReadId(read), effect.outcome)
                    self._tell("buffers", "slot_event", entry.lease, terminal)


def _from_zero(part: Any) -> Any:
    if isinstance(part, t.Placing) and part.deadline_s is not None:
        return replace(part, deadline_s=PAUSE_S)
    if isinstance(part, t.Requested):
        return replace(part, deadline_s=METADATA_S)
    return part


def expected(setup: Setup, transfer: int) -> tuple[tuple[int, ...], ...]:
    """The cells of a whole delivery, item by item."""
    kinds = [kind for part in setup.requests[transfer] for kind in part.kinds]
    return tuple(tuple(content(kind, row) for row in range(setup.rows[kind])) for kind in kinds)
