"""The request machines of both sides, coupled in memory by the ordered channel, driven step by step.

No node, socket or clock of the system: whoever drives it delivers one message or answers one wish at a
time, in any order between the two directions, so that every interleaving can be written down. What the
machines want of their node (room, a forward, a read) waits in `wishes` until it is answered.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from epd.check.traces.findings import Finding
from epd.check.traces.node_rules import check_node
from epd.observe.timeline.load import NodeTrace, TracedStep
from epd.protocol import encoder as e
from epd.protocol import prefill as prefill_machine
from epd.protocol import prefill_types as p
from epd.protocol.ids import (
    Attempt,
    Incarnation,
    LeaseId,
    NodeId,
    Part,
    RegionId,
    Seal,
    SessionId,
    TransferId,
)
from epd.protocol.machine import Effect, Event, TimerExpired
from epd.protocol.messages import EmbeddingSpec, ErrorValue, Item, Probe, Source
from epd.protocol.registry import MACHINES
from epd.protocol.trace import TraceHeader
from epd.protocol.transfer_messages import (
    heard_by_encoder,
    heard_by_prefill,
    told_by_encoder,
    told_by_prefill,
)
from epd.testing.virtual_clock import VirtualClock

PartKey = tuple[SessionId, TransferId, Part]
Key = TransferId | PartKey

_DEADLINE_S: Final = 60.0
_REQUEST: Final = MACHINES["prefill"].module
_PART: Final = MACHINES["encoder"].module
_WISHES: Final = (p.AskRoom, p.ChooseEncoder, p.StartRead, p.Deliver, e.TellGranted, e.PinSource)
_MESSAGES: Final = (
    p.SendEncodeRequest,
    p.SendGrant,
    p.SendReceipt,
    p.SendCancel,
    e.SendMetadata,
    e.SendForwardDone,
    e.SendFailed,
)


class Channel:
    """Messages on their way in one direction, in order."""

    def __init__(self, hear: Callable[[Key, Any], None]) -> None:
        self._hear = hear
        self._messages: deque[tuple[Key, Any]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def waiting(self) -> list[str]:
        """What is on its way, by its name, the next one first."""
        return [type(message).__name__.removeprefix("Send") for _, message in self._messages]

    def deliver(self) -> Any:
        """Let the next message arrive; returns the effect that sent it. Raises `IndexError` if none is."""
        key, message = self._messages.popleft()
        self._hear(key, message)
        return message

    def _send(self, key: Key, message: Any) -> None:
        self._messages.append((key, message))

    def _lose(self) -> None:
        self._messages.clear()


class MachinePair:
    """One prefill node's request machines and one encoder's, in one session at a time.

    `to_encoder` and `to_prefill` are the channel; `wishes` are `(key, effect)` that were not answered;
    `done` are all other effects, in order; `outcomes` is `delivered` or an error's code by transfer.
    """

    def __init__(self, limits: p.Limits | None = None) -> None:
        self.clock = VirtualClock()
        self.to_encoder = Channel(self._encoder_hears)
        self.to_prefill = Channel(self._prefill_hears)
        self.wishes: list[tuple[Key, Effect]] = []
        self.done: list[tuple[Key, Effect]] = []
        self.outcomes: dict[TransferId, str] = {}
        self.requests: dict[TransferId, Any] = {}
        self.parts: dict[PartKey, Any] = {}
        self.session = SessionId(1)
        self._limits = limits or p.Limits()
        self._numbers = 0
        self._nodes = (_trace("prefill", 1), _trace("encoder", 2))

    # -- driving -----------------------------------------------------------------------------

    def submit(self, *sizes_nbytes: int, deadline_s: float = _DEADLINE_S) -> TransferId:
        """A request of one part with an item of each size (multiples of 4)."""
        transfer = TransferId(self._number())
        items = tuple(Item(Probe("image", n // 4, 1), bytes([i]) * 32, 1) for i, n in enumerate(sizes_nbytes))
        plans = (p.PartPlan(tuple(range(len(items))), self.session),)
        self.feed_request(transfer, p.Submitted(items, "float32", self.clock.now_s() + deadline_s, plans))
        return transfer

    def cancel(self, transfer: TransferId) -> None:
        self.feed_request(transfer, p.CancelWanted())

    def answer(self, wish: type[Effect], error: ErrorValue | None = None) -> Effect:
        """Do what the oldest wish of this type asks for, or fail it with `error`; returns it.

        `AskRoom` gets its lease, `ChooseEncoder` this session, `TellGranted` a result of the forward,
        `PinSource` its source, `StartRead` a whole read, `Deliver` its release. Raises `LookupError` if
        nobody wishes that.
        """
        found = next((one for one in self.wishes if isinstance(one[1], wish)), None)
        if found is None:
            raise LookupError(f"nobody wishes {wish.__name__}; the wishes are {self.wishes}")
        self.wishes.remove(found)
        key, effect = found
        self._answer(key, effect, error)
        return effect

    def settle(self) -> None:
        """Deliver and answer everything until nothing is left to do."""
        while True:
            if self.to_encoder:
                self.to_encoder.deliver()
            elif self.to_prefill:
                self.to_prefill.deliver()
            elif self.wishes:
                self.answer(type(self.wishes[0][1]))
            else:
                return

    def end_session(self, *, new: bool = True) -> None:
        """The session is over on both sides; what was on its way is lost. `new`: another one opens."""
        self.to_encoder._lose()
        self.to_prefill._lose()
        old = self.session
        for key in [key for key in self.parts if key[0] == old]:
            self.feed_part(key, e.SessionEnded())
        for transfer in list(self.requests):
            self.feed_request(transfer, p.SessionEnded(old))
        if new:
            self.session = SessionId(old + 1)
            for transfer in list(self.requests):
                self.feed_request(transfer, p.EncoderAvailable())

    def advance(self, seconds: float) -> None:
        """Move the clock on; every deadline that passes is fed at its own time."""
        target_s = self.clock.now_s() + seconds
        while due := self._next_deadline(target_s):
            at_s, feed = due
            self.clock.advance_to(max(at_s, self.clock.now_s()))
            feed()
        self.clock.advance_to(target_s)

    # -- looking -----------------------------------------------------------------------------

    def state(self, transfer: TransferId) -> str:
        """The prefill side's name for where it is; `freed` once it is over."""
        state = self.requests.get(transfer)
        return "freed" if state is None else prefill_machine.state_name(state)

    def encoder_state(self, transfer: TransferId) -> str:
        """The encoder side's, of the part in this session."""
        return e.state_name(self.parts.get((self.session, transfer, Part(0)), e.INITIAL))

    def findings(self) -> list[Finding]:
        """Which invariants were broken so far."""
        return [finding for node in self._nodes for finding in check_node(node)]

    def check(self) -> None:
        """Raises `AssertionError` if an invariant was broken."""
        findings = self.findings()
        assert not findings, "\n".join(map(str, findings))

    # -- machines ----------------------------------------------------------------------------

    def feed_request(self, transfer: TransferId, event: Event) -> None:
        """Any event, to a request machine."""
        before = self.requests.get(transfer, prefill_machine.INITIAL)
        now_s = self.clock.now_s()
        after, effects = _REQUEST.step(before, event, now_s, self._limits)
        self._note(0, "prefill", transfer, event, effects, before, after)
        _keep(self.requests, transfer, after)
        self._perform(transfer, effects)

    def feed_part(self, key: PartKey, event: Event) -> None:
        """Any event, to a part's machine of the encoder."""
        before = self.parts.get(key, e.INITIAL)
        after, effects = _PART.step(before, event, self.clock.now_s(), e.Limits())
        self._note(1, "encoder", key, event, effects, before, after)
        _keep(self.parts, key, after)
        self._perform(key, effects)

    def _note(
        self, node: int, kind: str, key: Any, event: Event, effects: Any, before: Any, after: Any
    ) -> None:
        step = TracedStep(kind, key, self.clock.now_s(), event, effects, before, after)
        self._nodes[node].steps.append(step)

    def _perform(self, key: Key, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, _MESSAGES):
                # To a session that is over nothing is sent any more.
                session = key[0] if isinstance(key, tuple) else getattr(effect, "session", self.session)
                if session == self.session:
                    (self.to_prefill if isinstance(key, tuple) else self.to_encoder)._send(key, effect)
            elif isinstance(effect, _WISHES):
                self.wishes.append((key, effect))
            else:
                self.done.append((key, effect))
            if not isinstance(key, tuple):
                self._note_outcome(key, effect)

    def _note_outcome(self, transfer: TransferId, effect: Effect) -> None:
        match effect:
            case p.Deliver():
                self.outcomes[transfer] = "delivered"
            case p.FailRequest():
                self.outcomes[transfer] = effect.error.code

    def _answer(self, key: Any, wish: Effect, error: ErrorValue | None) -> None:
        match wish:
            case p.AskRoom():
                lease = LeaseId(self._number())
                self.feed_request(key, p.RoomRefused(error) if error else p.RoomLeased(lease))
            case p.ChooseEncoder():
                self.feed_request(key, p.EncoderChosen(wish.part, None if error else self.session))
            case p.StartRead():
                self.feed_request(key, p.ReadEnded(wish.part, wish.attempt, wish.item, error))
            case p.Deliver():
                self.feed_request(key, p.Taken())
                self.feed_request(key, p.Released())
            case e.TellGranted():
                staged = LeaseId(self._number())
                ready = e.JobReady(wish.attempt, wish.item, staged)
                self.feed_part(key, e.JobFailed(wish.attempt, wish.item, error) if error else ready)
            case e.PinSource():
                self._pin(key, wish.attempt, wish.item, wish.staged, gone=error is not None)

    def _pin(self, key: PartKey, attempt: Attempt, item: int, staged: LeaseId, *, gone: bool) -> None:
        if gone:
            self.feed_part(key, e.SourceGone(attempt, item))
            return
        state = self.parts.get(key)
        nbytes = state.specs[item].nbytes if isinstance(state, e.Open) else 0
        source = Source(RegionId(0), staged * 4096, nbytes, Seal(staged))
        self.feed_part(key, e.SourcePinned(attempt, item, staged, source))

    def _encoder_hears(self, transfer: Any, message: Any) -> None:
        key: PartKey = (self.session, transfer, message.part)
        match message:
            case p.SendEncodeRequest():
                specs = tuple(EmbeddingSpec(item.probe.width, 1, "float32") for item in message.items)
                event: Event = e.RequestReceived(message.attempt, message.items, specs, message.deadline_s)
            case _:
                told: Any = told_by_prefill(transfer, message, self.clock.now_s())
                event = heard_by_encoder(told)
        self.feed_part(key, event)

    def _prefill_hears(self, key: Any, message: Any) -> None:
        session, transfer, part = key
        told = told_by_encoder(transfer, part, message)
        self.feed_request(transfer, heard_by_prefill(session, told))

    def _next_deadline(self, until_s: float) -> tuple[float, Callable[[], None]] | None:
        due: list[tuple[float, Callable[[], None]]] = []
        for transfer, request in self.requests.items():
            if request.deadline_s is not None and request.deadline_s <= until_s:
                due.append((request.deadline_s, partial(self.feed_request, transfer, TimerExpired())))
        for key, part in self.parts.items():
            if part.deadline_s is not None and part.deadline_s <= until_s:
                due.append((part.deadline_s, partial(self.feed_part, key, TimerExpired())))
        return min(due, key=lambda one: one[0]) if due else None

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def _keep(states: dict[Any, Any], key: Any, after: Any) -> None:
    states.pop(key, None)
    if not after.final and after != prefill_machine.INITIAL:
        states[key] = after


def _trace(role: Any, incarnation: int) -> NodeTrace:
    header = TraceHeader(
        node=NodeId(role), role=role, incarnation=Incarnation(incarnation), started_unix_s=0.0
    )
    return NodeTrace(header)
