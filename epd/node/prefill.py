"""`PrefillNode`: dials encoders, reads, delivers."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from epd.actors import prefill, pushed_reads, transfer
from epd.actors.receive_buffers import ReceiveBuffers
from epd.dataplane.poller import Tap
from epd.dataplane.push import PushPlane
from epd.memory.pool import Pool
from epd.node.base import Node, is_set_within
from epd.observe.families import Sample, samples
from epd.protocol import reads, slots
from epd.protocol.errors import Busy
from epd.protocol.ids import ReadId, SessionId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import (
    AnyMessage,
    Drained,
    EmbeddingMetadata,
    EmbeddingWritten,
    Failed,
    ForwardDone,
    Heartbeat,
    NeedMedia,
    Regions,
)
from epd.protocol.prefill_types import Limits as PrefillLimits
from epd.protocol.push import Limits as PushLimits
from epd.protocol.trace import StateWritten
from epd.request import Delivery, EmbeddingRequest
from epd.runtime.endpoint import PeerInfo
from epd.runtime.links import Links
from epd.runtime.mailbox import Mailbox

_LAST_ANSWERS_S = 1.0


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
        self.pushed: pushed_reads.PushedReads | None = None
        reads_by: transfer.Reads
        if isinstance(self.plane, PushPlane):
            reads_by = self.pushed = self._make_pushed_reads(self.plane, transfer_mailbox, stack)
        else:
            reads_by = poller = self.host.poller(
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
        links = Links(
            self.endpoint, config.encoders, self.runtime.timers, self.runtime.clock, self.host.jitter
        )
        self._links = links
        links.start()
        stack.callback(links.stop)

    def _make_pushed_reads(
        self, plane: PushPlane, to_transfer: Mailbox[Any], stack: contextlib.AsyncExitStack
    ) -> pushed_reads.PushedReads:
        thread = ThreadPoolExecutor(1, "epd-windows")
        stack.callback(thread.shutdown)
        pushed = pushed_reads.PushedReads(
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
        if await is_set_within(idle, timeout_s):
            return True
        # In this order: clients hear from the prefill actor of what it has failed, then of the end.
        to_clients = self.clients.mailbox
        self.prefill.mailbox.tell(prefill.EndOpen(lambda: to_clients.tell(prefill.EndOpen(told.set))))
        await is_set_within(told, _LAST_ANSWERS_S)
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
                self.pushed.mailbox.tell(pushed_reads.FromWriter(session, message))

    def _peer_writable(self, session: SessionId) -> None:
        self.prefill.mailbox.tell(prefill.MediaWritable(session))

    def load(self) -> Heartbeat:
        return Heartbeat(0, 0, self.pool.free_nbytes)
