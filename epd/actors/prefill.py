"""The PrefillActor: requests, placement over encoders, retries, receipts."""

from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from epd.actors.encoders import Encoder, Encoders
from epd.actors.group import RankGroup, Shown
from epd.actors.holders import Holder, say_who_holds
from epd.actors.outgoing import OfferedMedia
from epd.actors.receive_buffers import (
    ItemRead,
    LeaseDone,
    LeaseFree,
    LeaseLetGo,
    ReadAsked,
    RoomAnswer,
    RoomUnwanted,
    RoomWanted,
)
from epd.actors.transfer import PeerAnnounced, PeerAnswer, PeerGone
from epd.memory.pool import Extent, Pool
from epd.observe.log import log_transfer_ended
from epd.protocol import prefill as machine
from epd.protocol import prefill_types as t
from epd.protocol.errors import (
    Busy,
    Cancelled,
    Draining,
    EpdError,
    MediaInvalid,
    PoolExhausted,
    error_from_value,
)
from epd.protocol.group import Deliver
from epd.protocol.ids import Incarnation, LeaseId, Part, SessionId, TransferId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import EmbeddingMetadata, ErrorValue, Failed, ForwardDone, NeedMedia, Regions
from epd.protocol.placement import choose_encoder, plan_parts
from epd.protocol.transfer_messages import SentByPrefill, heard_by_prefill, told_by_prefill
from epd.protocol.wire import MAX_ITEMS_PER_PART
from epd.request import Delivery, EmbeddingRequest, Fence
from epd.runtime.actor import Actor
from epd.runtime.endpoint import Endpoint, PeerInfo
from epd.runtime.machines import MachineTable
from epd.runtime.mailbox import Mailbox, Ref
from epd.runtime.runtime import Runtime

_log = structlog.get_logger()

_FENCE_POLL_S: Final = 0.001

EncoderMessage = EmbeddingMetadata | ForwardDone | Failed | NeedMedia | Regions


class SubmitRequest(NamedTuple):
    """`sink` gets the one `Delivery` of this request, in the loop's thread."""

    request: EmbeddingRequest
    sink: Callable[[Delivery], None]


class CancelRequest(NamedTuple):
    request_id: str


class DeliveryNews(NamedTuple):
    """The consumer `taken` or `released` its delivery; of a release on a GPU, what it has queued there."""

    lease: LeaseId
    transfer: TransferId
    news: str
    fence: Fence | None = None


class FromEncoder(NamedTuple):
    session: SessionId
    message: EncoderMessage


class EncoderOpened(NamedTuple):
    session: SessionId
    peer: PeerInfo


class EncoderBack(NamedTuple):
    """A silent encoder speaks again."""

    session: SessionId


class EncoderLost(NamedTuple):
    session: SessionId


class MediaWritable(NamedTuple):
    session: SessionId


class Drain(NamedTuple):
    """Take no new requests; `idle` is called when none is open any more."""

    idle: Callable[[], None]


class EndOpen(NamedTuple):
    """The time for draining is over: what is open and not delivered fails as `draining`, then `done`."""

    done: Callable[[], None]


Mail = (
    SubmitRequest
    | CancelRequest
    | DeliveryNews
    | FromEncoder
    | EncoderOpened
    | EncoderBack
    | EncoderLost
    | MediaWritable
    | Drain
    | EndOpen
    | RoomAnswer
    | ItemRead
    | LeaseLetGo
    | PeerAnswer
)


class _Request:
    """One open request. `phases_s` are the seconds at which each state name was first seen."""

    __slots__ = (
        "attempts",
        "extents",
        "peers",
        "phases_s",
        "request",
        "sink",
        "started_s",
        "transfer",
        "verified",
    )

    def __init__(self, transfer: TransferId, message: SubmitRequest, now_s: float) -> None:
        self.transfer = transfer
        self.request = message.request
        self.sink = message.sink
        self.started_s = now_s
        self.extents: tuple[Extent, ...] = ()
        self.phases_s: dict[str, float] = {}
        self.attempts: dict[Part, tuple[SessionId, int]] = {}  # open attempts and how many items they ask
        self.peers: set[str] = set()  # names of the nodes that were asked
        self.verified: set[int] = set()  # items whose read compares the bytes with a digest


class PrefillActor(Actor[Mail]):
    def __init__(
        self,
        runtime: Runtime,
        mailbox: Mailbox[Mail],
        endpoint: Endpoint,
        pool: Pool,
        limits: machine.Limits,
        incarnation: Incarnation,
        *,
        max_open_requests: int,
        compares_digests: bool = True,
    ) -> None:
        super().__init__("prefill", mailbox)
        self._clock = runtime.clock
        self._timers = runtime.timers
        self._endpoint = endpoint
        self._pool = pool
        self._max_open = max_open_requests
        self._compares_digests = compares_digests
        self._transfers: MachineTable = runtime.machines("prefill", machine, limits, self._perform)
        self._group = RankGroup(
            runtime,
            incarnation,
            order=self._order,
            tell=self._feed,
            show=self._show,
        )
        self._open: dict[TransferId, _Request] = {}
        self._unshown: dict[TransferId, _Request] = {}  # the log has not shown their end yet
        self._by_id: dict[str, TransferId] = {}
        self.encoders = Encoders()
        self._media = OfferedMedia(endpoint)
        self._next_transfer = 1
        self._draining = False
        self._out_of_time = False
        self.states_seen: set[str] = set()
        self.outcomes: dict[str, int] = {}
        self.begin_span: Callable[[TransferId, str | None], str | None] = lambda _, traceparent: traceparent
        """Gives the `traceparent` that a request's messages carry, from the caller's."""
        self.refused: dict[str, int] = {}
        """Requests that were refused at submit, by code."""
        self._when_idle: Callable[[], None] | None = None
        self.to_buffers: Ref[RoomWanted | RoomUnwanted | ReadAsked | LeaseDone | LeaseFree]
        self.to_transfer: Ref[PeerAnnounced | PeerGone]

    # -- mail --------------------------------------------------------------------------------

    def handle(self, message: Mail) -> None:
        match message:
            case FromEncoder():
                self._from_encoder(message.session, message.message)
            case ItemRead():
                self._group.item_read(message)
            case LeaseLetGo():
                self._group.let_go(message.lease)
            case RoomAnswer():
                self._take_room(message)
            case SubmitRequest():
                self._submit(message)
            case DeliveryNews():
                self._hear_consumer(message)
            case CancelRequest():
                transfer = self._by_id.get(message.request_id)
                if transfer is not None:
                    self._feed(transfer, t.CancelWanted())
            case MediaWritable():
                self._media.pump(message.session)
            case Drain():
                self._draining = True
                self._when_idle = message.idle
                if not self._open:
                    message.idle()
            case EndOpen():
                self._out_of_time = True
                for transfer in list(self._open):
                    self._feed(transfer, t.CancelWanted())
                message.done()
            case _:
                self._encoder_news(message)

    def _encoder_news(self, message: Mail) -> None:
        match message:
            case EncoderOpened():
                self.encoders[message.session] = Encoder(message.session, message.peer)
            case PeerAnswer():
                encoder = self.encoders.get(message.session)
                if encoder is not None and message.ok:
                    encoder.readable = True
                    self._encoder_available()
                elif encoder is not None:
                    self._endpoint.close(message.session, "data_plane", message.reason)
            case EncoderBack():
                self._encoder_available()
            case EncoderLost():
                self._lose_encoder(message.session)

    def _from_encoder(self, session: SessionId, message: EncoderMessage) -> None:
        encoder = self.encoders.get(session)
        if encoder is None:
            return
        match message:
            case EmbeddingMetadata() | ForwardDone() | Failed():
                self._feed(message.transfer, heard_by_prefill(session, message))
            case NeedMedia():
                self._media.send(session, message.sha256)
            case Regions():
                self.to_transfer.tell(PeerAnnounced(session, encoder.peer.segment, message.regions))

    # -- requests ----------------------------------------------------------------------------

    def _submit(self, message: SubmitRequest) -> None:
        request, now_s = message.request, self._clock.now_s()
        refusal: EpdError | None = None
        if self._draining:
            refusal = Draining("this prefill node drains")
        elif len(self._open) >= self._max_open:
            refusal = Busy(f"{len(self._open)} requests are open, the bound is {self._max_open}")
        elif request.request_id in self._by_id:
            refusal = Busy(f"a request named {request.request_id!r} is open already")
        elif not request.items:
            refusal = MediaInvalid("a request needs at least one item")
        if refusal is not None:
            self.refused[refusal.code] = self.refused.get(refusal.code, 0) + 1
            message.sink(Delivery(request.request_id, error=refusal))
            return
        transfer = TransferId(self._next_transfer)
        self._next_transfer += 1
        self._open[transfer] = self._unshown[transfer] = _Request(transfer, message, now_s)
        self._by_id[request.request_id] = transfer
        items = tuple(item.described() for item in request.items)
        self._media.offer(transfer, request.items)
        plans = plan_parts(items, self.encoders.loads(), MAX_ITEMS_PER_PART)
        deadline_s = now_s + request.deadline_s
        traceparent = self.begin_span(transfer, request.traceparent)
        self._feed(
            transfer,
            t.Submitted(items, request.dtype, deadline_s, plans, traceparent),
        )

    def _take_room(self, answer: RoomAnswer) -> None:
        if answer.lease is None:
            assert answer.error is not None
            self._feed(answer.transfer, t.RoomRefused(answer.error))
            return
        open_request = self._open.get(answer.transfer)
        if open_request is not None:
            open_request.extents = answer.extents
        self._group.take(answer.lease, answer.transfer)
        self._feed(answer.transfer, t.RoomLeased(answer.lease))

    def _hear_consumer(self, message: DeliveryNews) -> None:
        if message.fence is not None and not message.fence.query():
            # Kernels that read the memory are still queued: not ours to lease again yet.
            self._timers.after(_FENCE_POLL_S, lambda: self.mailbox.tell(message))
            return
        if message.news == "released":
            self._group.released(message.lease)
            return
        self._feed(message.transfer, t.Taken())  # has no effects, so `_perform` is not called
        open_request = self._open.get(message.transfer)
        if open_request is not None:
            self._note_state(open_request)

    def _feed(self, transfer: TransferId, event: Event) -> None:
        self._transfers.feed(transfer, event)

    def _order(self, order: ReadAsked | LeaseDone | LeaseFree) -> None:
        self.to_buffers.tell(order)

    def _note_state(self, open_request: _Request) -> None:
        state = self._transfers.state(open_request.transfer)
        name = machine.state_name(state)
        if isinstance(state, t.New):  # ended, so the table has forgotten it
            name = "freed" if "rdma-written" in open_request.phases_s else "failed"
        if name not in open_request.phases_s:
            open_request.phases_s[name] = self._clock.now_s()
            self.states_seen.add(name)

    # -- effects -----------------------------------------------------------------------------

    def _perform(self, transfer: TransferId, effects: tuple[Effect, ...]) -> None:
        open_request = self._open.get(transfer)
        if open_request is None:  # ended: only a stray lease is left to give back
            for effect in effects:
                if isinstance(effect, t.ReturnLease):
                    self._group.give_back(effect.lease)
            return
        self._note_state(open_request)
        for effect in effects:
            match effect:
                case t.SendEncodeRequest() | t.SendGrant() | t.SendReceipt() | t.SendCancel():
                    self._send(open_request, effect)
                case t.StartRead():
                    if effect.digest is not None and self._compares_digests:
                        open_request.verified.add(effect.item)
                    self._group.read(effect)
                case t.AskRoom():
                    self.to_buffers.tell(RoomWanted(transfer, effect.sizes_nbytes))
                case t.WithdrawRoom():
                    self.to_buffers.tell(RoomUnwanted(transfer))
                case t.ReturnLease():
                    self._group.give_back(effect.lease)
                case t.ChooseEncoder():
                    session = choose_encoder(effect.items, self.encoders.loads(), effect.avoid)
                    self._feed(transfer, t.EncoderChosen(effect.part, session))
                case t.Deliver():
                    self._media.withdraw(transfer, open_request.request.items)
                    self._group.deliver(effect.lease, effect.specs)
                case t.FailRequest():
                    self._group.end(transfer, self._explained(open_request, effect.error))
                case t.WarnUnconsumed():
                    _log.warning("delivery not consumed", request=open_request.request.request_id)
        if isinstance(self._transfers.state(transfer), t.New):
            self._forget(open_request)

    def _explained(self, failed: _Request, error: ErrorValue) -> ErrorValue:
        if error.code != PoolExhausted.code:
            return error
        holders = [
            Holder(one.request.request_id, next(reversed(one.phases_s)), one.extents)
            for one in (*self._open.values(), *self._unshown.values())
            if one.extents
        ]
        return say_who_holds(self._pool, holders, failed.request.request_id, error)

    def _send(self, open_request: _Request, effect: SentByPrefill) -> None:
        part, session = effect.part, effect.session
        match effect:
            case t.SendEncodeRequest():
                self._close_attempt(open_request, part)
                self._open_attempt(open_request, part, session, len(effect.items))
            case t.SendReceipt(last=True) | t.SendCancel():
                self._close_attempt(open_request, part)
        message = told_by_prefill(open_request.transfer, effect, self._clock.now_s())
        self._endpoint.send(session, message)

    def _open_attempt(self, open_request: _Request, part: Part, session: SessionId, items: int) -> None:
        open_request.attempts[part] = (session, items)
        self.encoders.add_items(session, items)
        if session in self.encoders:
            open_request.peers.add(self.encoders[session].peer.node)

    def _close_attempt(self, open_request: _Request, part: Part) -> None:
        attempt = open_request.attempts.pop(part, None)
        if attempt is not None:
            session, items = attempt
            self.encoders.add_items(session, -items)

    def _show(self, entry: Shown) -> None:
        open_request = self._unshown.pop(entry.transfer)
        if isinstance(entry, Deliver):
            self._deliver(open_request, entry)
        else:
            self._fail(open_request, entry.error)

    def _deliver(self, open_request: _Request, entry: Deliver) -> None:
        views = tuple(
            self._pool.part(extent, spec.nbytes)
            for extent, spec in zip(open_request.extents, entry.specs, strict=True)
        )
        delivery = Delivery(
            open_request.request.request_id,
            entry.specs,
            views,
            None,
            open_request.phases_s,
            tuple(item in open_request.verified for item in range(len(entry.specs))),
            lambda news, fence: self.mailbox.tell(DeliveryNews(entry.lease, entry.transfer, news, fence)),
        )
        open_request.sink(delivery)

    def _fail(self, open_request: _Request, error: ErrorValue) -> None:
        request_id = open_request.request.request_id
        if self._out_of_time and error.code == Cancelled.code:  # by us, not by its consumer
            error = Draining("the node stops: its time for draining is over").as_value()
        self._note_outcome(error.code)
        self._log_ended(open_request, error.code)
        error_raised = error_from_value(error)
        open_request.sink(Delivery(request_id, error=error_raised, phases_s=open_request.phases_s))

    def _note_outcome(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def _log_ended(self, open_request: _Request, outcome: str) -> None:
        log_transfer_ended(
            request=open_request.request.request_id,
            transfer=open_request.transfer,
            peers=sorted(open_request.peers),
            outcome=outcome,
            started_s=open_request.started_s,
            phases_s=open_request.phases_s,
            ended_s=self._clock.now_s(),
        )

    def _forget(self, open_request: _Request) -> None:
        if open_request.phases_s.get("rdma-written") is not None and "freed" in open_request.phases_s:
            self._note_outcome("freed")
            self._log_ended(open_request, "freed")
        for part in list(open_request.attempts):
            self._close_attempt(open_request, part)
        self._media.withdraw(open_request.transfer, open_request.request.items)
        self._open.pop(open_request.transfer, None)
        self._by_id.pop(open_request.request.request_id, None)
        if not self._open and self._when_idle is not None:
            self._when_idle()

    # -- encoders ----------------------------------------------------------------------------

    def _encoder_available(self) -> None:
        for transfer in list(self._open):
            if self._has_placing(transfer):
                self._feed(transfer, t.EncoderAvailable())

    def _has_placing(self, transfer: TransferId) -> bool:
        parts = getattr(self._transfers.state(transfer), "parts", ())
        return any(isinstance(part, t.Placing) for part in parts)

    def _lose_encoder(self, session: SessionId) -> None:
        if self.encoders.pop(session, None) is None:
            return
        self._media.drop(session)
        self.to_transfer.tell(PeerGone(session))
        for transfer, open_request in list(self._open.items()):
            if any(opened == session for opened, _ in open_request.attempts.values()):
                self._feed(transfer, t.SessionEnded(session))

    @property
    def can_serve(self) -> bool:
        """Some encoder could get work now; may be asked from any thread."""
        return any(encoder.usable for encoder in list(self.encoders.values()))

    def counts(self) -> dict[str, int]:
        return (
            {
                "requests": len(self._open),
                "unshown": len(self._unshown),
            }
            | self.encoders.counts()
            | self._media.counts()
        )
