"""Whole nodes in the caller's event loop: `PrefillNode` and `EncoderNode`.

A node owns everything it makes: data plane, pool, endpoint, actors, worker, recorder. Entering the
context builds it, leaving it ends it, on every path.
"""

import asyncio
import contextlib
import hashlib
import itertools
import platform
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import structlog

from epd.actors import clients, dedup, encode, prefill, push, transfer
from epd.actors.receive_buffers import ReceiveBuffers
from epd.actors.staging_buffers import StagingBuffers
from epd.config import Config, PicturesConfig
from epd.dataplane.base import DataPlane
from epd.dataplane.poller import ReadPoller, Tap
from epd.dataplane.push import PUSHED, PushPlane
from epd.dataplane.select import open_plane
from epd.encoders.base import Encoder
from epd.encoders.registry import load_encoder
from epd.forward.base import ForwardWorker
from epd.forward.process import ProcessWorker
from epd.forward.thread import ThreadWorker
from epd.memory.pool import Pool
from epd.memory.region import HOST
from epd.observe.families import Sample, samples
from epd.protocol import jobs, reads, slots
from epd.protocol.errors import Busy, ConfigError, spans_need_the_extra
from epd.protocol.ids import Incarnation, NodeId, ReadId, SessionId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import (
    AnyMessage,
    BufferGrant,
    Cancel,
    Drained,
    EmbeddingMetadata,
    EmbeddingWritten,
    EncodeRequest,
    Failed,
    ForwardDone,
    Heartbeat,
    Hello,
    Inventory,
    InventoryRequest,
    MediaChunk,
    MediaMissing,
    NeedMedia,
    PeerLimits,
    PushWanted,
    Receipt,
    Reconcile,
    Regions,
    Role,
    Submit,
    Windows,
)
from epd.protocol.prefill_types import Limits as PrefillLimits
from epd.protocol.push import Limits as PushLimits
from epd.protocol.session import SessionLimits
from epd.protocol.trace import LOGIC_VERSION, StateWritten
from epd.protocol.wire import MAX_ITEMS_PER_PART, PROTOCOL_VERSION
from epd.request import Delivery, EmbeddingRequest
from epd.runtime.actor import Actor
from epd.runtime.clock import MonotonicClock
from epd.runtime.endpoint import Endpoint, PeerInfo
from epd.runtime.keys import Security, read_peers, read_secret_key
from epd.runtime.links import Links
from epd.runtime.machines import Observe
from epd.runtime.mailbox import Mailbox
from epd.runtime.recorder import Recorder
from epd.runtime.runtime import Runtime
from epd.runtime.supervisor import Supervisor
from epd.runtime.timers import Timers

if TYPE_CHECKING:
    from epd.runtime.monitor import Monitor
    from epd.runtime.spans import Spans

_log = structlog.get_logger()

PlaneFactory = Callable[[], DataPlane]
_LAST_ANSWERS_S = 1.0


class Node(ABC):
    """One incarnation of either role."""

    role: ClassVar[Role]

    def __init__(self, config: Config, *, open_plane_with: PlaneFactory | None = None) -> None:
        self.config = config
        self.incarnation = Incarnation(secrets.randbits(64))
        self.node_id = NodeId(config.node or "")
        self.listen = ""
        self._open_plane = open_plane_with or (
            lambda: (
                open_plane(config.data_plane, config.plane_host(), config.device)
                if config.direction == "pull"
                else PushPlane(config.plane_host())
            )
        )
        self.security = _load_security(config)
        self._exit = contextlib.AsyncExitStack()
        self._actors: list[Actor[Any]] = []
        self._client_sessions: set[SessionId] = set()
        self.failure: asyncio.Future[None]
        self.plane: DataPlane
        self.pool: Pool
        self.endpoint: Endpoint
        self.runtime: Runtime
        self.clients: clients.ClientActor
        self.monitor: Monitor | None = None
        """Metrics and health; None without `metrics_port`."""
        self._spans: Spans | None = None

    @property
    def data_plane(self) -> str:
        """`shm` or `mooncake/TRANSPORT`, the one really in use."""
        return self.plane.name

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exit.__aexit__(kind, error, trace)

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        self.plane = await asyncio.to_thread(self._open_plane)
        stack.push_async_callback(asyncio.to_thread, self.plane.close)
        clock = MonotonicClock()
        supervisor = Supervisor(self._actors)
        timers = Timers(clock, loop.call_at, supervisor.fail)
        stack.callback(timers.close)  # nothing of the node stays in the caller's loop
        self.runtime = Runtime(clock, timers, None)
        stack.callback(self._close_recorder)  # after the endpoint: the ends of sessions are steps too
        self.endpoint = Endpoint(
            hello=self._hello,
            limits=self._session_limits(),
            clock=clock,
            timers=timers,
            recorder=None,
            handler=self,
            max_peers=self.config.limits.max_peers,
            on_error=supervisor.fail,
            security=self.security,
            rates=self.config.limits.rates(),
        )
        stack.push_async_callback(self.endpoint.close_all, 1.0)
        self.listen = self.endpoint.bind(self.config.listen, self.config.media_listen, accept=False)
        if not self.node_id:
            port = self.listen.rpartition(":")[2]
            self.node_id = NodeId(f"{self.role}-{platform.node()}-{port}")
        if self.config.metrics_port is not None:
            await self._start_monitor(self.config.metrics_port, stack)
        if self.config.spans:
            self._start_spans(stack)
        self._watch_steps()
        if self.config.trace is not None:
            recorder = Recorder(
                self.config.trace,
                self.node_id,
                self.role,
                self.incarnation,
                timers,
                file_nbytes=self.config.trace_file_nbytes,
                files=self.config.trace_files,
            )
            recorder.live = self._live_machines
            self.runtime.recorder = self.endpoint.recorder = recorder
        await self._build(stack)
        self.failure = supervisor.start()
        stack.push_async_callback(supervisor.stop)
        self.endpoint.accept()
        if self.monitor is not None:
            self.monitor.started(self.pool)
            self.failure.add_done_callback(self._note_failure)

    def _live_machines(self) -> Iterator[StateWritten]:
        return itertools.chain(self.runtime.live(), self.endpoint.live())

    def _close_recorder(self) -> None:
        if self.runtime.recorder is not None:
            self.runtime.recorder.close()

    async def _start_monitor(self, port: int, stack: contextlib.AsyncExitStack) -> None:
        from epd.runtime.monitor import Monitor  # its exposition takes 50 ms to import

        monitor = Monitor(self.role, self.config.metrics_listen, port, self._can_serve, self._samples)
        self.monitor = monitor
        stack.push_async_callback(monitor.close)

    def _start_spans(self, stack: contextlib.AsyncExitStack) -> None:
        try:
            from epd.runtime.spans import Spans
        except ImportError as error:
            raise spans_need_the_extra(error) from error
        self._spans = Spans()
        stack.callback(self._spans.close)

    def _watch_steps(self) -> None:
        watchers: dict[str, tuple[Observe, ...]] = {}
        for observers in (
            {} if self.monitor is None else self.monitor.steps.observers,
            {} if self._spans is None else self._spans.observers,
        ):
            for kind, observe in observers.items():
                watchers[kind] = (*watchers.get(kind, ()), observe)
        self.runtime.observers = watchers
        self.endpoint.observe(watchers.get("session", ()))

    def _note_failure(self, failure: "asyncio.Future[None]") -> None:
        if self.monitor is not None and not failure.cancelled() and failure.exception() is not None:
            self.monitor.health.failed = True

    def _note_draining(self) -> None:
        if self.monitor is not None:
            self.monitor.health.draining = True

    @abstractmethod
    async def _build(self, stack: contextlib.AsyncExitStack) -> None:
        """Pool, actors and what else the role has."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Everything held, by name; all zero when nothing is open (I4), but for `*_free_nbytes`."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """The model's; empty from a prefill node that has not met an encoder."""

    # -- shared parts ------------------------------------------------------------------------

    def _mailbox(self, name: str) -> Mailbox[Any]:
        return Mailbox(f"{self.node_id}/{name}", self.config.mailbox_bound())

    def _add_clients(self, submit_to: Mailbox[Any] | None, stack: contextlib.AsyncExitStack) -> None:
        hasher = ThreadPoolExecutor(1, "epd-hasher")
        stack.callback(hasher.shutdown)
        self.clients = clients.ClientActor(
            self._mailbox("clients"),
            self.endpoint,
            submit_to,
            self.inventory,
            self.config.limits.media_nbytes,
            hasher,
        )
        self._actors.append(self.clients)

    def inventory(self) -> Inventory:
        """What `Inventory` answers: counts of everything held, and the state names seen."""
        return Inventory(self.counts(), tuple(sorted(self._states_seen())))

    @abstractmethod
    def _states_seen(self) -> set[str]: ...

    def _counts(self, *parts: dict[str, int]) -> dict[str, int]:
        counts: dict[str, int] = self.runtime.counts() | self.endpoint.counts() | self.clients.counts()
        counts["registrations"] = self.plane.registrations()
        counts["mail"] = sum(len(actor.mailbox) for actor in self._actors)
        for part in parts:
            counts |= part
        return counts

    @abstractmethod
    def _can_serve(self) -> bool:
        """A request that comes now would be worked on. For any thread."""

    def _samples(self) -> Iterator[Sample]:
        """What no machine's step tells, as it is now. For any thread."""
        roles: dict[str, int] = {"prefill": 0, "encoder": 0, "client": 0}
        for peer in self.endpoint.peers().values():
            roles[peer.role] += 1
        yield from samples("epd_sessions", roles)
        yield from samples("epd_rejected_frames", self.endpoint.rejected_frames)
        yield from samples("epd_mailbox_messages", {a.name: len(a.mailbox) for a in self._actors})

    def _hello(self) -> Hello:
        limits = PeerLimits(
            MAX_ITEMS_PER_PART,
            self._region_nbytes(),
            self.config.limits.max_item_media_nbytes,
        )
        return Hello(
            self.node_id,
            self.incarnation,
            self.role,
            PROTOCOL_VERSION,
            LOGIC_VERSION,
            self.fingerprint,
            PUSHED * (self.config.direction == "push") + self.plane.name,
            self.plane.segment,
            limits,
        )

    @abstractmethod
    def _region_nbytes(self) -> int: ...

    def _session_limits(self) -> SessionLimits:
        timeouts = self.config.timeouts
        return SessionLimits(
            heartbeat_s=timeouts.heartbeat_s,
            suspect_after_s=timeouts.suspect_after_s,
            dead_after_s=timeouts.dead_after_s,
            connect_s=timeouts.connect_s,
        )

    # -- SessionHandler: each message to the actor that owns it -------------------------------

    def session_opened(self, session: SessionId, peer: PeerInfo) -> None:
        if peer.role == "client":
            self._client_sessions.add(session)
        else:
            self._peer_opened(session, peer)

    def session_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None:
        if session in self._client_sessions:
            self._client_sessions.discard(session)
            self.clients.mailbox.tell(clients.ClientGone(session))
        else:
            self._peer_ended(session, peer, code, reason)

    def messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None:
        try:
            if session in self._client_sessions:
                self._client_messages(session, messages)
            else:
                self._peer_messages(session, messages)
        except Busy as error:  # more than its credits allow: a peer that floods loses its session
            self.endpoint.close(session, error.code, error.message)

    def _client_messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None:
        for message in messages:
            if isinstance(message, Submit | MediaChunk | MediaMissing | InventoryRequest):
                self.clients.mailbox.tell(clients.FromClient(session, message))

    def media_writable(self, session: SessionId) -> None:
        if session in self._client_sessions:
            self.clients.mailbox.tell(clients.MediaWritable(session))
        else:
            self._peer_writable(session)

    @abstractmethod
    def session_suspect(self, session: SessionId, suspect: bool) -> None: ...

    @abstractmethod
    def load(self) -> Heartbeat: ...

    @abstractmethod
    def _peer_opened(self, session: SessionId, peer: PeerInfo) -> None: ...

    @abstractmethod
    def _peer_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None: ...

    @abstractmethod
    def _peer_messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None: ...

    @abstractmethod
    def _peer_writable(self, session: SessionId) -> None: ...


class PrefillNode(Node):
    """Receives embeddings: dials the configured encoders, reads, delivers."""

    role = "prefill"

    async def _build(self, stack: contextlib.AsyncExitStack) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        self._read_states: dict[ReadId, reads.AnyState] = {}
        memory = config.pool
        regions = await asyncio.to_thread(
            self.plane.allocate, memory.regions, memory.region_nbytes, exported=False
        )
        self.pool = Pool(regions)
        timeouts = config.timeouts
        self.buffers = ReceiveBuffers(
            self.runtime,
            self._mailbox("buffers"),
            self.pool,
            slots.Limits(timeouts.read_base_s, timeouts.read_min_bandwidth_bytes_per_s),
            sealed=config.direction == "push",
        )
        if self.monitor is not None:
            self.monitor.steps.nbytes_of = self.buffers.lease_nbytes
        transfer_mailbox = self._mailbox("transfer")
        self.pushed: push.PushedReads | None = None
        reads_by: transfer.Reads
        if isinstance(self.plane, PushPlane):
            reads_by = self.pushed = self._make_pushed_reads(self.plane, transfer_mailbox, stack)
        else:
            reads_by = poller = ReadPoller(
                self.plane,
                lambda results: transfer_mailbox.tell(transfer.PollerNews(results)),
                loop,
                tap=self._tap_reads(),
                check=config.verify != "off",
            )
            stack.push_async_callback(asyncio.to_thread, poller.stop)
        self.transfer = transfer.TransferActor(transfer_mailbox, reads_by)
        self.prefill = prefill.PrefillActor(
            self.runtime,
            self._mailbox("prefill"),
            self.endpoint,
            self.pool,
            PrefillLimits(
                timeouts.metadata_s,
                timeouts.room_s,
                timeouts.consume_warning_s,
                config.limits.max_attempts,
            ),
            self.incarnation,
            max_open_requests=config.limits.max_open_requests,
            compares_digests=config.verify != "off",
        )
        if self._spans is not None:
            self.prefill.begin_span = self._spans.begin_request
        self.buffers.to_prefill = self.transfer.to_prefill = self.prefill.mailbox
        self.buffers.to_transfer = self.prefill.to_transfer = transfer_mailbox
        self.transfer.to_buffers = self.prefill.to_buffers = self.buffers.mailbox
        self._actors += [self.buffers, self.transfer, self.prefill]
        self._add_clients(self.prefill.mailbox, stack)
        self._model = ""
        links = Links(self.endpoint, config.encoders, self.runtime.timers, self.runtime.clock)
        self._links = links
        links.start()
        stack.callback(links.stop)

    def _make_pushed_reads(
        self, plane: PushPlane, to_transfer: Mailbox[Any], stack: contextlib.AsyncExitStack
    ) -> push.PushedReads:
        thread = ThreadPoolExecutor(1, "epd-windows")
        stack.callback(thread.shutdown)
        pushed = push.PushedReads(
            self.runtime,
            self._mailbox("push"),
            self.endpoint,
            plane,
            thread,
            PushLimits(self.config.timeouts.suspect_after_s),
            check=self.config.verify != "off",
        )
        pushed.to_transfer = to_transfer
        self._actors.append(pushed)
        return pushed

    def _tap_reads(self) -> Tap | None:
        """Steps of the read machines are made in the poller's thread and recorded in the loop's."""
        recorder = self.runtime.recorder
        if recorder is None:
            return None
        recorder.declare("reads", reads.Limits())
        states = self._read_states

        def record(
            read: ReadId, event: Event, now_s: float, effects: tuple[Effect, ...], state: reads.AnyState
        ) -> None:
            recorder.record("reads", read, event, now_s, effects)
            if state.final:
                states.pop(read, None)
            else:
                states[read] = state

        return record

    def _live_machines(self) -> Iterator[StateWritten]:
        yield from super()._live_machines()
        for read, state in self._read_states.items():
            yield "reads", read, state

    # -- for the caller ----------------------------------------------------------------------

    def submit(self, request: EmbeddingRequest, sink: Callable[[Delivery], None]) -> None:
        """`sink` is called once, in the loop's thread, with the delivery or the error."""
        try:
            self.prefill.mailbox.tell(prefill.SubmitRequest(request, sink))
        except Busy as error:
            sink(Delivery(request.request_id, error=error))

    async def encode(self, request: EmbeddingRequest) -> Delivery:
        """Wait for one request. Raises its error; release the delivery when done."""
        ended: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()

        def sink(delivery: Delivery) -> None:
            if not ended.done():
                ended.set_result(delivery)
            else:  # the caller was cancelled: nobody will ever use it
                delivery.release()

        self.submit(request, sink)
        try:
            delivery = await ended
        except asyncio.CancelledError:
            self.cancel(request.request_id)
            raise
        if delivery.error is not None:
            raise delivery.error
        delivery.take()
        return delivery

    def cancel(self, request_id: str) -> None:
        """End a request that was not delivered yet; its sink gets `Cancelled`."""
        self.prefill.mailbox.tell(prefill.CancelRequest(request_id))

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests; wait until the running ones have ended. False if time ran out.

        Then what was not delivered has failed as `draining` (retryable), and its clients were told.
        """
        self._note_draining()
        idle, told = asyncio.Event(), asyncio.Event()
        self.prefill.mailbox.tell(prefill.Drain(idle.set))
        if await _is_set_within(idle, timeout_s):
            return True
        # In this order: clients hear from the prefill actor of what it has failed, then of the end.
        to_clients = self.clients.mailbox
        self.prefill.mailbox.tell(prefill.EndOpen(lambda: to_clients.tell(prefill.EndOpen(told.set))))
        await _is_set_within(told, _LAST_ANSWERS_S)
        return False

    def counts(self) -> dict[str, int]:
        pushed = {} if self.pushed is None else self.pushed.counts()
        return self._counts(self.buffers.counts(), self.transfer.counts(), self.prefill.counts(), pushed)

    def _can_serve(self) -> bool:
        return self.prefill.can_serve

    def _samples(self) -> Iterator[Sample]:
        yield from super()._samples()
        plane, _, transport = self.plane.name.partition("/")
        labels = (plane, transport or plane)
        reads = self.transfer
        yield Sample("epd_read_bytes", labels, reads.read_nbytes)
        yield Sample("epd_read_seconds", labels, reads.read_s)
        yield Sample("epd_reads_running", (), reads.running)
        for outcome, count in list(reads.outcomes.items()):
            yield Sample("epd_reads", (*labels, outcome), count)
        if self.pushed is not None:
            yield from samples("epd_push_windows", self.pushed.windows)
            yield Sample("epd_push_fences", (), self.pushed.fenced)
            yield Sample("epd_push_quarantined_bytes", (), self.pushed.quarantined_nbytes)
        yield Sample("epd_room_waiting", (), self.buffers.waiting)
        yield from samples("epd_requests_refused", self.prefill.refused)

    def _states_seen(self) -> set[str]:
        return self.prefill.states_seen

    @property
    def fingerprint(self) -> str:
        return self._model

    def _region_nbytes(self) -> int:
        return self.config.pool.region_nbytes

    # -- sessions ----------------------------------------------------------------------------

    def _peer_opened(self, session: SessionId, peer: PeerInfo) -> None:
        self._model = self._model or peer.fingerprint
        self._links.session_opened(session, peer)
        self.prefill.mailbox.tell(prefill.EncoderOpened(session, peer))

    def _peer_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None:
        self._links.session_ended(session, code, reason)
        self.prefill.mailbox.tell(prefill.EncoderLost(session))

    def session_suspect(self, session: SessionId, suspect: bool) -> None:
        if not suspect:
            self.prefill.mailbox.tell(prefill.EncoderBack(session))

    def _peer_messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None:
        for message in messages:
            if isinstance(
                message,
                EmbeddingMetadata | ForwardDone | Failed | NeedMedia | Regions,
            ):
                self.prefill.mailbox.tell(prefill.FromEncoder(session, message))
            elif isinstance(message, EmbeddingWritten | Drained) and self.pushed is not None:
                self.pushed.mailbox.tell(push.FromWriter(session, message))

    def _peer_writable(self, session: SessionId) -> None:
        self.prefill.mailbox.tell(prefill.MediaWritable(session))

    def load(self) -> Heartbeat:
        return Heartbeat(0, 0, self.pool.free_nbytes)


class EncoderNode(Node):
    """Encodes and exports results; never dials."""

    role = "encoder"

    def __init__(
        self,
        config: Config,
        *,
        open_plane_with: PlaneFactory | None = None,
        encoder: Encoder | None = None,
        worker: ForwardWorker | None = None,
    ) -> None:
        super().__init__(config, open_plane_with=open_plane_with)
        self.encoder = encoder or load_encoder(config.model)
        self._given_worker = worker
        self.worker: ForwardWorker

    async def _build(self, stack: contextlib.AsyncExitStack) -> None:
        config = self.config
        memory = config.staging
        regions = await asyncio.to_thread(
            self.plane.allocate, memory.regions, memory.region_nbytes, exported=True
        )
        self.pool = Pool(regions)
        self.worker = self._given_worker or make_worker(config, self.plane.device)
        timeouts = config.timeouts
        self.buffers = StagingBuffers(self.runtime, self._mailbox("buffers"), self.pool)
        if self.monitor is not None:
            self.monitor.steps.nbytes_of = self.buffers.staged_nbytes
        self.dedup = dedup.DedupCoordinator(
            self.runtime,
            self._mailbox("dedup"),
            self.endpoint,
            jobs.Limits(timeouts.media_s, timeouts.forward_s, timeouts.dedup_retention_s),
            config.limits.media_nbytes,
        )
        self.encode = encode.EncodeActor(
            self.runtime,
            self._mailbox("encode"),
            self.endpoint,
            self.encoder,
            self.worker,
            encode.ItemLimits(
                config.limits.max_item_media_nbytes, memory.region_nbytes, config.pictures.max_pixels
            ),
            batch_items=config.worker.batch_items,
            digest=config.verify == "checksum",
        )
        self.encode.to_dedup = self.buffers.to_dedup = self.dedup.mailbox
        self.encode.to_buffers = self.dedup.to_buffers = self.buffers.mailbox
        self.buffers.to_encode = self.dedup.to_encode = self.encode.mailbox
        self._actors += [self.buffers, self.dedup, self.encode]
        self._add_clients(None, stack)
        self.push_writer: push.PushWriter | None = None
        if isinstance(self.plane, PushPlane):
            self.push_writer = self._make_push_writer(self.plane, stack)
        self.worker.start(regions, encode.WorkerMail(self.encode.mailbox.tell))
        stack.push_async_callback(asyncio.to_thread, self.worker.stop)

    def _make_push_writer(self, plane: PushPlane, stack: contextlib.AsyncExitStack) -> push.PushWriter:
        mailbox = self._mailbox("push")
        poller = ReadPoller(
            plane,
            lambda results: mailbox.tell(transfer.PollerNews(results)),
            asyncio.get_running_loop(),
            check=False,
        )
        stack.push_async_callback(asyncio.to_thread, poller.stop)
        writer = push.PushWriter(mailbox, self.endpoint, self.pool, poller)
        self._actors.append(writer)
        return writer

    async def drain(self, timeout_s: float) -> bool:
        """Hand unstarted parts back; wait until the started ones are received. False if time ran out."""
        self._note_draining()
        self.endpoint.goodbye("draining")
        idle = asyncio.Event()
        self.encode.mailbox.tell(encode.Drain(idle.set))
        return await _is_set_within(idle, timeout_s)

    def counts(self) -> dict[str, int]:
        writer = {} if self.push_writer is None else self.push_writer.counts()
        return self._counts(self.buffers.counts(), self.dedup.counts(), self.encode.counts(), writer)

    def _can_serve(self) -> bool:
        return self.encode.can_serve

    def _samples(self) -> Iterator[Sample]:
        yield from super()._samples()
        yield Sample("epd_room_waiting", (), self.buffers.waiting)
        yield Sample("epd_media_bytes", (), self.dedup.media_nbytes)
        yield Sample("epd_forward_queue", (), self.encode.waiting)
        yield Sample("epd_worker_deaths", (), self.encode.worker_deaths)

    def _states_seen(self) -> set[str]:
        return self.encode.states_seen

    @property
    def fingerprint(self) -> str:
        """The encoder's; another background makes another one, as it is in the embeddings."""
        pictures = self.config.pictures
        if pictures.background == PicturesConfig().background:
            return self.encoder.fingerprint
        facts = f"{self.encoder.fingerprint} over {pictures.background.lower()}"
        return hashlib.sha256(facts.encode()).hexdigest()

    def _region_nbytes(self) -> int:
        return self.config.staging.region_nbytes

    # -- sessions ----------------------------------------------------------------------------

    def _peer_opened(self, session: SessionId, peer: PeerInfo) -> None:
        self.encode.mailbox.tell(encode.PeerOpened(session, peer.node))
        if self.push_writer is not None:
            self.push_writer.mailbox.tell(push.ReaderOpened(session, peer.segment))
        self.endpoint.send(session, Regions(self.plane.export()))

    def _peer_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None:
        self.encode.mailbox.tell(encode.SessionOver(session))
        self.dedup.mailbox.tell(dedup.SessionOver(session))
        if self.push_writer is not None:
            self.push_writer.mailbox.tell(push.ReaderGone(session))

    def session_suspect(self, session: SessionId, suspect: bool) -> None:
        """A silent prefill node keeps what it has until its session is dead."""

    def _peer_messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None:
        for message in messages:
            if isinstance(message, EncodeRequest | BufferGrant | Receipt | Cancel):
                self.encode.mailbox.tell(encode.FromPeer(session, message))
            elif isinstance(message, MediaChunk):
                self.dedup.mailbox.tell(dedup.ChunkReceived(session, message))
            elif isinstance(message, MediaMissing):
                self.dedup.mailbox.tell(dedup.MediaAbsent(session, message.sha256))
            elif isinstance(message, Windows | PushWanted | Reconcile) and self.push_writer is not None:
                self.push_writer.mailbox.tell(push.FromReader(session, message))

    def _peer_writable(self, session: SessionId) -> None:
        """An encoder sends nothing on the media lane of its prefill nodes."""

    def load(self) -> Heartbeat:
        counts = self.encode.counts()
        return Heartbeat(
            counts["forward_queue"] + counts["forwards_running"],
            0,
            self.pool.free_nbytes,
        )


def make_worker(config: Config, device: str) -> ForwardWorker:
    """The form that a forward takes on `device`: a process on the CPU, a thread on a GPU."""
    threads, batch_items, rules = config.worker_threads(), config.worker.batch_items, config.pictures.rules()
    if device == HOST:
        return ProcessWorker(config.model, threads, batch_items, rules)
    return ThreadWorker(config.model, device, threads, batch_items, rules)


def _load_security(config: Config) -> Security | None:
    """Raises `ConfigError` for a file that cannot be used, or an encoder without a key."""
    files = config.security
    if files.secret_key is None or files.peers is None:
        return None
    security = Security(read_secret_key(files.secret_key), read_peers(files.peers))
    for address in config.encoders:
        if security.peers.key_at(address) is None:
            message = f"security.peers: {files.peers}: no entry has {address} of encoders in its addresses"
            raise ConfigError(message, key="security.peers", given=address)
    return security


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
