"""The prefill node of the coupled world: request and slot machines, the pool, reads in small steps."""

from collections import defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from coupled_base import DEADLINE_S, KINDS, POOL_SLOTS, Session, Table, picture

from epd.protocol import prefill, slots
from epd.protocol import prefill_types as pt
from epd.protocol.ids import Incarnation, LeaseId, ReadId, SessionId, TransferId
from epd.protocol.machine import Effect
from epd.protocol.messages import Item
from epd.protocol.placement import EncoderLoad, choose_encoder, plan_parts

if TYPE_CHECKING:
    from coupled_encoder import EncoderNode
    from coupled_world import World


class Reading:
    """A read that our engine has: the payload in two halves, then the seal."""

    def __init__(self, lease: LeaseId, wanted: slots.Wanted, node: "EncoderNode", *, hangs: bool) -> None:
        self.lease, self.wanted, self.node, self.hangs = lease, wanted, node, hangs
        self.aborted = False
        self.halves: list[object] = []


class PrefillNode:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.requests = Table(world, prefill, prefill.Limits(), self._perform)
        self.slots = Table(world, slots, slots.Limits(), self._perform_slot)
        self.sessions: dict[SessionId, Session] = {}
        self.items: dict[Hashable, tuple[Item, ...]] = {}
        self.media: dict[Hashable, tuple[Item, ...]] = {}
        self.outcomes: defaultdict[Hashable, list[str]] = defaultdict(list)
        self.delivered: dict[Hashable, LeaseId] = {}
        # buffers
        self.free = set(range(POOL_SLOTS))
        self.memory: dict[int, object] = {}
        self.extents: dict[LeaseId, tuple[int, ...]] = {}
        self.lease_of: dict[LeaseId, Hashable] = {}
        self.waiting: list[tuple[Hashable, int]] = []
        # transfer
        self.peers: set[SessionId] = set()
        self.reads: dict[ReadId, Reading] = {}

    # -- requests --------------------------------------------------------------------------

    def loads(self) -> list[EncoderLoad]:
        return [EncoderLoad(s, Incarnation(s), 0, 128) for s in self.sessions]

    def submit(self) -> None:
        random = self.world.random
        transfer = TransferId(self.world.number("transfer"))
        wanted = tuple(picture(random.randrange(KINDS)) for _ in range(random.randint(1, 3)))
        self.items[transfer] = self.media[transfer] = wanted
        plans = plan_parts(wanted, self.loads(), random.choice([1, 2, 128]))
        deadline_s = self.world.now_s + DEADLINE_S
        self.requests.feed(transfer, pt.Submitted(wanted, "float32", deadline_s, plans))

    def consume(self) -> bool:
        for transfer, lease in self.delivered.items():
            self.check_content(transfer, lease)
            del self.delivered[transfer]
            if self.world.chance(0.5):
                self.requests.feed(transfer, pt.Taken())
            self.requests.feed(transfer, pt.Released())
            return True
        return False

    def consume_some(self) -> None:
        if self.world.chance(0.1):
            self.consume()

    def check_content(self, transfer: Hashable, lease: LeaseId) -> None:
        got = [self.memory[extent] for extent in self.extents[lease]]
        assert got == [item.sha256 for item in self.items[transfer]], f"{transfer}: {got}"

    def open_session(self, session: Session) -> None:
        self.sessions[session.id] = session
        for transfer in list(self.requests.states):
            self.requests.feed(transfer, pt.EncoderAvailable())

    def end_session(self, number: SessionId) -> None:
        del self.sessions[number]
        self.world.tell("transfer", self.close_peer, number)
        for transfer in list(self.requests.states):
            self.requests.feed(transfer, pt.SessionEnded(number))

    def need_media(self, session: Session, sha256: bytes) -> None:
        have = any(item.sha256 == sha256 for items in self.media.values() for item in items)
        session.up(session.node.take_media, session.id, sha256, have)

    def _perform(self, transfer: Any, effect: Effect) -> None:
        tell, world = self.world.tell, self.world
        match effect:
            case pt.ChooseEncoder():
                chosen = choose_encoder(effect.items, self.loads(), effect.avoid)
                self.requests.feed(transfer, pt.EncoderChosen(effect.part, chosen))
            case pt.SendEncodeRequest() | pt.SendGrant() | pt.SendReceipt() | pt.SendCancel():
                session = world.sessions[effect.session]
                assert effect.session in self.sessions or session.ended, "sent into an ended session"
                remaining_s = getattr(effect, "deadline_s", 0.0) - world.now_s
                session.up(session.node.hear, session.id, transfer, effect, remaining_s)
            case pt.AskRoom():
                tell("prefill>buffers", self.want_room, transfer, len(effect.sizes_nbytes))
            case pt.WithdrawRoom():
                tell("prefill>buffers", self.withdraw, transfer)
            case pt.StartRead():
                tell("prefill>buffers", self.want_read, effect)
            case pt.ReturnLease():
                tell("prefill>buffers", self.slots.feed, effect.lease, slots.LeaseReturned())
            case pt.Deliver():
                self.outcomes[transfer].append("delivered")
                self.media.pop(transfer)
                self.delivered[transfer] = effect.lease
                self.check_content(transfer, effect.lease)
            case pt.FailRequest():
                self.outcomes[transfer].append(effect.error.code)
                self.media.pop(transfer)
            case _:
                pass

    # -- buffers ---------------------------------------------------------------------------

    def want_room(self, transfer: Hashable, count: int) -> None:
        self.waiting.append((transfer, count))
        self.admit()

    def withdraw(self, transfer: Hashable) -> None:
        self.waiting = [entry for entry in self.waiting if entry[0] != transfer]
        self.admit()

    def admit(self) -> None:
        while self.waiting and self.waiting[0][1] <= len(self.free):
            transfer, count = self.waiting.pop(0)
            lease = LeaseId(self.world.number("lease"))
            self.extents[lease] = tuple(self.free.pop() for _ in range(count))
            self.lease_of[lease] = transfer
            self.slots.feed(lease, slots.LeaseTaken(lease))
            self.world.tell("buffers>prefill", self.requests.feed, transfer, pt.RoomLeased(lease))

    def want_read(self, start: pt.StartRead) -> None:
        if start.lease not in self.extents:
            return
        read = ReadId(self.world.number("read"))
        wanted = slots.Wanted(
            read, start.session, start.part, start.attempt, start.item, start.source, start.digest
        )
        self.slots.feed(start.lease, slots.ReadWanted(wanted))

    def _perform_slot(self, lease: Any, effect: Effect) -> None:
        match effect:
            case slots.PostRead():
                self.world.tell("buffers>transfer", self.post, lease, effect.wanted)
            case slots.AbortRead():
                self.world.tell("buffers>transfer", self.abort, effect.read)
            case slots.TellReadEnded():
                ended = pt.ReadEnded(effect.part, effect.attempt, effect.item, effect.error)
                self.world.tell("buffers>prefill", self.requests.feed, self.lease_of[lease], ended)
            case slots.FreeExtents():
                assert not any(reading.lease == lease for reading in self.reads.values()), (
                    "freed under a read"
                )
                assert lease not in self.delivered.values(), "freed under its consumer"
                extents = self.extents.pop(lease)
                del self.lease_of[lease]
                assert not self.free & set(extents)
                self.free |= set(extents)
                self.admit()

    # -- transfer --------------------------------------------------------------------------

    def open_peer(self, session: SessionId) -> None:
        self.peers.add(session)

    def close_peer(self, session: SessionId) -> None:
        self.peers.discard(session)

    def post(self, lease: LeaseId, wanted: slots.Wanted) -> None:
        node = self.world.sessions[wanted.session].node
        if wanted.session not in self.peers:
            self.end_read(lease, wanted.read, "refused")
            return
        hangs = self.world.chance(self.world.faults.read_hangs)
        self.reads[wanted.read] = Reading(lease, wanted, node, hangs=hangs)
        self.world.tell("transfer>buffers", self.slots.feed, lease, slots.ReadPosted(wanted.read))

    def abort(self, read: ReadId) -> None:
        if read in self.reads:
            self.reads[read].aborted = True

    def go_on_reading(self, *, some: bool = False) -> bool:
        running = [r for r in self.reads.values() if r.aborted or not r.hangs]
        if not running or (some and not self.world.chance(0.3)):
            return False
        reading = self.world.random.choice(running)
        outcome = self.read_on(reading)
        if outcome is not None:
            del self.reads[reading.wanted.read]
            self.end_read(reading.lease, reading.wanted.read, outcome)
        return True

    def read_on(self, reading: Reading) -> str | None:
        wanted, random = reading.wanted, self.world.random
        if reading.aborted and random.random() < 0.5:
            return "aborted"
        if not reading.node.alive or self.world.chance(self.world.faults.read_fails):
            return "failed"
        content, seal = reading.node.memory[wanted.source.offset]
        extents = self.extents[reading.lease]
        if len(reading.halves) < 2:
            reading.halves.append(content)
            assert reading.lease not in self.delivered.values(), "written under its consumer"
            whole = reading.halves == [content] * 2
            self.memory[extents[wanted.item]] = content if whole else "torn"
            return None
        return "ok" if seal == wanted.source.seal else "seal_mismatch"

    def end_read(self, lease: LeaseId, read: ReadId, outcome: str) -> None:
        self.world.tell("transfer>buffers", self.slots.feed, lease, slots.ReadTerminal(read, outcome))

    def held(self) -> dict[str, object]:
        return {
            "requests": self.requests.states,
            "slots": self.slots.states,
            "extents": self.extents,
            "waiting": self.waiting,
            "reads": self.reads,
            "media": self.media,
            "pool": set(range(POOL_SLOTS)) - self.free,
        }
