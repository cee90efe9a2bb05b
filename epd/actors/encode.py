"""The EncodeActor: plans items, joins jobs and grants, owns the forward worker."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from epd.actors.dedup import (
    ForwardEnded,
    ForwardStarted,
    ForwardUnqueued,
    ForwardUnwanted,
    ForwardWanted,
    JobNews,
    ResultWritten,
    SubscriberGranted,
    SubscriberLeft,
    Subscription,
    WorkerTooSlow,
)
from epd.actors.staging_buffers import PinAnswer, PinAsked, SourceEvent, UnpinAsked
from epd.encoders.base import Encoder
from epd.forward.base import ForwardItem, ForwardWorker, ItemResult
from epd.observe.log import log_transfer_ended
from epd.protocol import encoder as machine
from epd.protocol.errors import EpdError, ForwardFailed, MediaInvalid, RequestTooLarge, UnsupportedItem
from epd.protocol.ids import Part, SessionId, TransferId
from epd.protocol.job_key import JobKey, job_key
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import (
    BufferGrant,
    Cancel,
    DType,
    EmbeddingSpec,
    EncodeRequest,
    ErrorValue,
    Item,
    Receipt,
)
from epd.protocol.sources import Subscriber, sealed_nbytes
from epd.protocol.transfer_messages import heard_by_encoder, told_by_encoder
from epd.protocol.wire import MAX_AUX_NBYTES
from epd.runtime.actor import Actor
from epd.runtime.endpoint import Endpoint
from epd.runtime.machines import MachineTable
from epd.runtime.mailbox import Mailbox, Ref
from epd.runtime.runtime import Runtime

_log = structlog.get_logger()

TransferMessage = EncodeRequest | BufferGrant | Receipt | Cancel
Key = tuple[SessionId, TransferId, Part]


class FromPeer(NamedTuple):
    session: SessionId
    message: TransferMessage


class PeerOpened(NamedTuple):
    """A prefill node's session; `node` is its name, for the log."""

    session: SessionId
    node: str


class SessionOver(NamedTuple):
    session: SessionId


class Drain(NamedTuple):
    """Hand back what was not started; `idle` is called when no part is open any more."""

    idle: Callable[[], None]


class WorkerReady(NamedTuple):
    pass


class BatchEnded(NamedTuple):
    batch: int
    results: Sequence[ItemResult]


class WorkerDied(NamedTuple):
    reason: str


class WorkerLost(NamedTuple):
    reason: str


Mail = (
    FromPeer
    | PeerOpened
    | SessionOver
    | Drain
    | ForwardWanted
    | ForwardUnwanted
    | WorkerTooSlow
    | JobNews
    | ResultWritten
    | PinAnswer
    | WorkerReady
    | BatchEnded
    | WorkerDied
    | WorkerLost
)


class ItemLimits(NamedTuple):
    """What one item may need here."""

    media_nbytes: int
    region_nbytes: int
    pixels: int


class EncodeActor(Actor[Mail]):
    def __init__(
        self,
        runtime: Runtime,
        mailbox: Mailbox[Mail],
        endpoint: Endpoint,
        encoder: Encoder,
        worker: ForwardWorker,
        item_limits: ItemLimits,
        *,
        batch_items: int,
        digest: bool,
    ) -> None:
        super().__init__("encode", mailbox)
        self._clock = runtime.clock
        self._endpoint = endpoint
        self._encoder = encoder
        self._worker = worker
        self._item_limits = item_limits
        self._batch_items = batch_items
        self._digest = digest
        self._parts: MachineTable = runtime.machines("encoder", machine, machine.Limits(), self._perform)
        self._of_session: dict[SessionId, set[Key]] = {}
        self._jobs: dict[Key, dict[int, JobKey]] = {}
        self._peers: dict[SessionId, str] = {}
        self._phases_s: dict[Key, dict[str, float]] = {}
        """When each state of an open part was first seen."""
        self._queue: OrderedDict[JobKey, ForwardWanted] = OrderedDict()
        self._running: tuple[JobKey, ...] = ()
        self._batch = 0
        self._worker_ready = False
        self._draining = False
        self._when_idle: Callable[[], None] | None = None
        self.states_seen: set[str] = set()
        self.outcomes: dict[str, int] = {}
        self.worker_deaths = 0
        self.to_dedup: Ref[
            Subscription
            | SubscriberGranted
            | SubscriberLeft
            | ForwardStarted
            | ForwardUnqueued
            | ForwardEnded
        ]
        self.to_buffers: Ref[PinAsked | UnpinAsked | SourceEvent]

    # -- mail --------------------------------------------------------------------------------

    def handle(self, message: Mail) -> None:
        match message:
            case FromPeer():
                self._from_peer(message.session, message.message)
            case JobNews():
                self._feed_subscriber(message.subscriber, _job_event(message))
            case PinAnswer():
                self._feed_subscriber(message.subscriber, _pin_event(message))
            case ResultWritten():
                self.to_buffers.tell(message.written)
            case SessionOver():
                for key in list(self._of_session.get(message.session, ())):
                    self._feed(key, machine.SessionEnded())
                self._peers.pop(message.session, None)
            case PeerOpened():
                self._peers[message.session] = message.node
            case Drain():
                self._draining = True
                self._when_idle = message.idle
                for key in list(self._jobs):
                    self._feed(key, machine.DrainWanted())
                self._tell_idle()
            case _:
                self._from_worker_or_dedup(message)

    def _from_worker_or_dedup(self, message: Mail) -> None:
        match message:
            case ForwardWanted():
                self._queue[message.job] = message
            case ForwardUnwanted():
                # Not queued: it has started, which the coordinator is about to hear.
                if self._queue.pop(message.job, None) is not None:
                    self.to_dedup.tell(ForwardUnqueued(message.job))
            case WorkerReady():
                self._worker_ready = True
            case BatchEnded():
                if message.batch == self._batch:
                    self._end_batch(message.results)
            case WorkerDied():
                self._worker_ready = False
                self.worker_deaths += 1
                error = ForwardFailed(f"the forward worker died: {message.reason}").as_value()
                self._end_batch([ItemResult(error, None)] * len(self._running))
            case WorkerLost():
                # Nothing can be encoded; or its memory can be used again only when this process is gone (I2).
                raise ForwardFailed(f"the forward worker is lost: {message.reason}")
            case WorkerTooSlow():
                if message.job in self._running:
                    self._worker.kill()
        self._start_batch()

    def _from_peer(self, session: SessionId, message: TransferMessage) -> None:
        key = (session, message.transfer, message.part)
        match message:
            case EncodeRequest():
                self._receive_request(key, message)
            case _:
                self._feed(key, heard_by_encoder(message))

    def _receive_request(self, key: Key, request: EncodeRequest) -> None:
        deadline_s = self._clock.now_s() + request.remaining_ms / 1000
        specs: list[EmbeddingSpec] = []
        refusal: ErrorValue | None = None
        for number, item in enumerate(request.items):
            try:
                specs.append(self._plan(item, request))
            except EpdError as error:
                refusal = error.as_value(number)
                break
        event = machine.RequestReceived(
            request.attempt, request.items, tuple(specs), deadline_s, refusal, request.traceparent
        )
        self._feed(key, event)
        if self._draining:
            self._feed(key, machine.DrainWanted())

    def _plan(self, item: Item, request: EncodeRequest) -> EmbeddingSpec:
        dtype: DType = self._encoder.default_dtype if request.dtype == "model" else request.dtype
        if len(item.sha256) != 32 or item.media_nbytes < 0:
            raise MediaInvalid("the item has no SHA-256 of 32 bytes, or a negative size")
        probe, most = item.probe, self._item_limits.pixels
        if probe.kind == "image" and probe.width * probe.height > most:
            raise MediaInvalid(
                f"{probe.width}x{probe.height} is {probe.width * probe.height} pixels, the limit is {most}"
            )
        if item.media_nbytes > self._item_limits.media_nbytes:
            raise RequestTooLarge(
                f"media of {item.media_nbytes} B, an item may have {self._item_limits.media_nbytes} B"
            )
        spec = self._ask_plan(item, dtype)
        aux_nbytes = sum(len(aux.name) + len(aux.data) for aux in spec.aux)
        if spec.rows < 0 or spec.dim < 1 or aux_nbytes > MAX_AUX_NBYTES:
            raise UnsupportedItem(
                f"{self._encoder.name} plans {spec.rows}x{spec.dim} and aux tensors of {aux_nbytes} B; "
                f"an item may have {MAX_AUX_NBYTES} B of them"
            )
        if sealed_nbytes(spec.nbytes) > self._item_limits.region_nbytes:
            raise RequestTooLarge(
                f"an item of {spec.rows}x{spec.dim} {spec.dtype} needs {sealed_nbytes(spec.nbytes)} B, "
                f"a staging region has {self._item_limits.region_nbytes} B"
            )
        return spec

    def _ask_plan(self, item: Item, dtype: DType) -> EmbeddingSpec:
        """A plan that raises is a bug of a user's encoder: it fails its item, not the node."""
        try:
            return self._encoder.plan(item.probe, dtype)
        except EpdError:
            raise
        except Exception as error:
            _log.exception("plan failed", encoder=self._encoder.name)
            raise UnsupportedItem(f"{self._encoder.name}: {type(error).__name__}: {error}") from error

    # -- machine -----------------------------------------------------------------------------

    def _feed_subscriber(self, subscriber: Subscriber, event: Event) -> None:
        self._feed((subscriber.session, subscriber.transfer, subscriber.part), event)

    def _feed(self, key: Key, event: Event) -> None:
        self._parts.feed(key, event)
        state = self._parts.state(key)
        if isinstance(state, machine.Open):
            name = machine.state_name(state)
            self.states_seen.add(name)
            self._phases_s.setdefault(key, {}).setdefault(name, self._clock.now_s())
            self._of_session.setdefault(key[0], set()).add(key)
        else:
            self._forget_ended(key)

    def _forget_ended(self, key: Key) -> None:
        if key not in self._jobs or isinstance(self._parts.state(key), machine.Open):
            return
        del self._jobs[key]
        of_session = self._of_session[key[0]]
        of_session.discard(key)
        if not of_session:
            del self._of_session[key[0]]
        self._tell_idle()

    def _tell_idle(self) -> None:
        if not self._jobs and self._when_idle is not None:
            self._when_idle()

    def _perform(self, key: Key, effects: tuple[Effect, ...]) -> None:
        session, transfer, part = key
        for effect in effects:
            match effect:
                case machine.SendMetadata() | machine.SendForwardDone() | machine.SendFailed():
                    self._endpoint.send(session, told_by_encoder(transfer, part, effect))
                case machine.AttemptEnded():
                    self._note_end(key, effect)
                case _:
                    self._perform_item(key, effect)
        self._forget_ended(key)  # its own deadline ends a part without anybody feeding it

    def _note_end(self, key: Key, ended: machine.AttemptEnded) -> None:
        session, transfer, part = key
        received = ended.outcome == "received"
        self.outcomes[ended.outcome] = self.outcomes.get(ended.outcome, 0) + 1
        if received:
            self.states_seen.update(("rdma-written", "freed"))
        now_s = self._clock.now_s()
        phases_s = self._phases_s.pop(key, {})
        log_transfer_ended(
            request=f"part {part} attempt {ended.attempt}",
            transfer=transfer,
            peers=[self._peers.get(session, f"session {session:016x}")],
            outcome="freed" if received else ended.outcome,
            started_s=next(iter(phases_s.values()), now_s),
            phases_s=phases_s,
            ended_s=now_s,
        )

    def _perform_item(self, key: Key, effect: Effect) -> None:
        session, transfer, part = key
        match effect:
            case machine.Subscribe():
                job = job_key(effect.described, effect.spec.dtype)
                self._jobs.setdefault(key, {})[effect.item] = job
                subscriber = Subscriber(session, transfer, part, effect.attempt, effect.item)
                self.to_dedup.tell(Subscription(job, subscriber, effect.described, effect.spec))
            case machine.TellGranted():
                subscriber = Subscriber(session, transfer, part, effect.attempt, effect.item)
                self.to_dedup.tell(SubscriberGranted(self._jobs[key][effect.item], subscriber))
            case machine.Unsubscribe():
                subscriber = Subscriber(session, transfer, part, effect.attempt, effect.item)
                self.to_dedup.tell(SubscriberLeft(self._jobs[key][effect.item], subscriber))
            case machine.PinSource():
                subscriber = Subscriber(session, transfer, part, effect.attempt, effect.item)
                self.to_buffers.tell(PinAsked(effect.staged, subscriber))
            case machine.UnpinSource():
                subscriber = Subscriber(session, transfer, part, effect.attempt, effect.item)
                self.to_buffers.tell(UnpinAsked(effect.staged, subscriber))

    # -- forwards ----------------------------------------------------------------------------

    def _start_batch(self) -> None:
        if self._running or not self._worker_ready or not self._queue:
            return
        batch: list[ForwardWanted] = []
        while self._queue and len(batch) < self._batch_items:
            batch.append(self._queue.popitem(last=False)[1])
        self._batch += 1
        self._running = tuple(wanted.job for wanted in batch)
        for job in self._running:
            self.to_dedup.tell(ForwardStarted(job))
        items = [
            ForwardItem(
                wanted.media,
                wanted.item.probe,
                wanted.spec.dtype,
                wanted.spec,
                wanted.extent.region,
                wanted.extent.offset,
            )
            for wanted in batch
        ]
        self._worker.submit(self._batch, items, digest=self._digest)

    def _end_batch(self, results: Sequence[ItemResult]) -> None:
        for job, result in zip(self._running, results, strict=True):
            self.to_dedup.tell(ForwardEnded(job, result.error, result.digest))
        self._running = ()

    @property
    def can_serve(self) -> bool:
        """The worker has its model; may be asked from any thread."""
        return self._worker_ready

    @property
    def waiting(self) -> int:
        """Items whose forward has not started."""
        return len(self._queue)

    def counts(self) -> dict[str, int]:
        return {
            "parts": len(self._parts),
            "part_jobs": len(self._jobs),
            "forward_queue": len(self._queue),
            "forwards_running": len(self._running),
        }


class WorkerMail:
    """The worker's events as mail: called on the loop, handled in the actor's turn."""

    def __init__(self, tell: Callable[[WorkerReady | BatchEnded | WorkerDied | WorkerLost], None]) -> None:
        self._tell = tell

    def worker_ready(self) -> None:
        self._tell(WorkerReady())

    def batch_ended(self, batch: int, results: Sequence[ItemResult]) -> None:
        self._tell(BatchEnded(batch, results))

    def worker_died(self, reason: str) -> None:
        self._tell(WorkerDied(reason))

    def worker_lost(self, reason: str) -> None:
        self._tell(WorkerLost(reason))


def _job_event(news: JobNews) -> Event:
    subscriber = news.subscriber
    if news.error is not None:
        return machine.JobFailed(subscriber.attempt, subscriber.item, news.error)
    if news.staged is None:
        return machine.JobEvicted(subscriber.attempt, subscriber.item)
    return machine.JobReady(subscriber.attempt, subscriber.item, news.staged)


def _pin_event(answer: PinAnswer) -> Event:
    subscriber = answer.subscriber
    if answer.source is None:
        return machine.SourceGone(subscriber.attempt, subscriber.item)
    return machine.SourcePinned(
        subscriber.attempt, subscriber.item, answer.staged, answer.source, answer.digest
    )
