"""`EncoderNode`: encodes and exports results."""

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator, Sequence

from epd.actors import dedup, encode, push_writer, transfer
from epd.actors.staging_buffers import StagingBuffers
from epd.config import Config, PicturesConfig
from epd.dataplane.push import PushPlane
from epd.encoders.base import Encoder
from epd.encoders.registry import load_encoder
from epd.forward.base import ForwardWorker
from epd.forward.process import ProcessWorker
from epd.forward.thread import ThreadWorker
from epd.memory.pool import Pool
from epd.memory.region import HOST
from epd.node.base import Node, PlaneFactory, is_set_within
from epd.node.host import THIS_HOST, Host
from epd.observe.families import Sample
from epd.protocol import jobs
from epd.protocol.ids import SessionId
from epd.protocol.messages import (
    AnyMessage,
    BufferGrant,
    Cancel,
    EncodeRequest,
    Heartbeat,
    MediaChunk,
    MediaMissing,
    PushWanted,
    Receipt,
    Reconcile,
    Regions,
    Windows,
)
from epd.runtime.endpoint import PeerInfo


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
        host: Host = THIS_HOST,
    ) -> None:
        super().__init__(config, open_plane_with=open_plane_with, host=host)
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
        self.push_writer: push_writer.PushWriter | None = None
        if isinstance(self.plane, PushPlane):
            self.push_writer = self._make_push_writer(self.plane, stack)
        self.worker.start(regions, encode.WorkerMail(self.encode.mailbox.tell))
        stack.push_async_callback(asyncio.to_thread, self.worker.stop)

    def _make_push_writer(self, plane: PushPlane, stack: contextlib.AsyncExitStack) -> push_writer.PushWriter:
        mailbox = self._mailbox("push")
        poller = self.host.poller(
            plane,
            lambda results: mailbox.tell(transfer.PollerNews(results)),
            asyncio.get_running_loop(),
            check=False,
        )
        stack.push_async_callback(asyncio.to_thread, poller.stop)
        writer = push_writer.PushWriter(mailbox, self.endpoint, self.pool, poller)
        self._actors.append(writer)
        return writer

    async def drain(self, timeout_s: float) -> bool:
        """Hand unstarted parts back; wait until the started ones are received. False if time ran out."""
        self._note_draining()
        self.endpoint.goodbye("draining")
        idle = asyncio.Event()
        self.encode.mailbox.tell(encode.Drain(idle.set))
        return await is_set_within(idle, timeout_s)

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
            self.push_writer.mailbox.tell(push_writer.ReaderOpened(session, peer.segment))
        self.endpoint.send(session, Regions(self.plane.export()))

    def _peer_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None:
        self.encode.mailbox.tell(encode.SessionOver(session))
        self.dedup.mailbox.tell(dedup.SessionOver(session))
        if self.push_writer is not None:
            self.push_writer.mailbox.tell(push_writer.ReaderGone(session))

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
                self.push_writer.mailbox.tell(push_writer.FromReader(session, message))

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
