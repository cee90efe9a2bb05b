"""The DedupCoordinator: jobs by content key, their subscribers, and the media they need."""

from typing import NamedTuple

from epd.actors.media import Arrived, MediaStore, Progress, Refused
from epd.actors.staging_buffers import (
    SourceEvent,
    StagedEvicted,
    StagingAnswer,
    StagingUnwanted,
    StagingWanted,
)
from epd.memory.pool import Extent
from epd.protocol import jobs, sources
from epd.protocol.ids import LeaseId, SessionId
from epd.protocol.job_key import JobKey
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import EmbeddingSpec, ErrorValue, Item, MediaChunk, NeedMedia
from epd.protocol.sources import Subscriber
from epd.runtime.actor import Actor
from epd.runtime.endpoint import Endpoint
from epd.runtime.machines import MachineTable
from epd.runtime.mailbox import Mailbox, Ref
from epd.runtime.runtime import Runtime


class Subscription(NamedTuple):
    job: JobKey
    subscriber: Subscriber
    item: Item
    spec: EmbeddingSpec


class SubscriberGranted(NamedTuple):
    job: JobKey
    subscriber: Subscriber


class SubscriberLeft(NamedTuple):
    job: JobKey
    subscriber: Subscriber


class ChunkReceived(NamedTuple):
    session: SessionId
    chunk: MediaChunk


class MediaAbsent(NamedTuple):
    """The peer's `MediaMissing`."""

    session: SessionId
    sha256: bytes


class SessionOver(NamedTuple):
    session: SessionId


class ForwardStarted(NamedTuple):
    job: JobKey


class ForwardUnqueued(NamedTuple):
    """From the EncodeActor: answer to `ForwardUnwanted` for a forward that had not started."""

    job: JobKey


class ForwardEnded(NamedTuple):
    """From the EncodeActor: the worker's own word, or its death."""

    job: JobKey
    error: ErrorValue | None
    digest: bytes | None


class ForwardWanted(NamedTuple):
    """To the EncodeActor: the media are here, the staging slot is reserved."""

    job: JobKey
    item: Item
    spec: EmbeddingSpec
    extent: Extent
    media: memoryview


class ForwardUnwanted(NamedTuple):
    job: JobKey


class ResultWritten(NamedTuple):
    """To the EncodeActor, behind the `JobNews` of it: tell the BufferManagerActor `written`.

    By this way its pins are asked for before anybody there can evict it. Told directly, it would be
    evicted at once whenever another job waits for its slot, and two such jobs would do that in turn for
    ever.
    """

    written: SourceEvent


class WorkerTooSlow(NamedTuple):
    job: JobKey


class JobNews(NamedTuple):
    """To the EncodeActor, for one subscriber: ready (staged), evicted (None), or failed (error)."""

    subscriber: Subscriber
    staged: LeaseId | None
    error: ErrorValue | None = None


Mail = (
    Subscription
    | SubscriberGranted
    | SubscriberLeft
    | ChunkReceived
    | MediaAbsent
    | SessionOver
    | ForwardStarted
    | ForwardUnqueued
    | ForwardEnded
    | StagingAnswer
    | StagedEvicted
)
EncodeMail = ForwardWanted | ForwardUnwanted | WorkerTooSlow | JobNews | ResultWritten


class DedupCoordinator(Actor[Mail]):
    def __init__(
        self,
        runtime: Runtime,
        mailbox: Mailbox[Mail],
        endpoint: Endpoint,
        limits: jobs.Limits,
        media_budget_nbytes: int,
    ) -> None:
        super().__init__("dedup", mailbox)
        self._endpoint = endpoint
        self._jobs: MachineTable = runtime.machines("jobs", jobs, limits, self._perform)
        self._about: dict[JobKey, tuple[Item, EmbeddingSpec]] = {}
        self._extents: dict[LeaseId, Extent] = {}
        self._digests: dict[JobKey, bytes] = {}
        self._media: MediaStore[JobKey] = MediaStore(
            media_budget_nbytes,
            ask=self._ask_media,
            report=self._media_news,
        )
        self.forwards = 0
        self.to_buffers: Ref[StagingWanted | StagingUnwanted | SourceEvent]
        self.to_encode: Ref[EncodeMail]

    def handle(self, message: Mail) -> None:
        match message:
            case Subscription():
                self._about[message.job] = (message.item, message.spec)
                self._feed(message.job, jobs.Subscribed(message.subscriber))
            case SubscriberGranted():
                self._feed(message.job, jobs.Granted(message.subscriber))
            case SubscriberLeft():
                self._feed(message.job, jobs.Left(message.subscriber))
            case ChunkReceived():
                self._media.take_chunk(message.session, message.chunk)
            case ForwardStarted():
                self.forwards += 1
                self._feed(message.job, jobs.ForwardStarted())
            case ForwardUnqueued():
                self._feed(message.job, jobs.ForwardUnqueued())
            case ForwardEnded():
                if message.digest is not None:
                    self._digests[message.job] = message.digest
                self._feed(message.job, jobs.ForwardEnded(message.error))
            case StagingAnswer():
                self._take_staging(message)
            case StagedEvicted():
                self._extents.pop(message.staged, None)
                self._feed(message.job, jobs.Evicted(message.staged))
            case MediaAbsent():
                self._media.missing(message.session, message.sha256)
            case SessionOver():
                self._media.session_ended(message.session)

    def _take_staging(self, answer: StagingAnswer) -> None:
        if answer.error is not None:
            self._feed(answer.job, jobs.StagingRefused(answer.error))
            return
        assert answer.staged is not None and answer.extent is not None
        self._extents[answer.staged] = answer.extent
        self._feed(answer.job, jobs.StagingReserved(answer.staged))

    def _feed(self, job: JobKey, event: Event) -> None:
        self._jobs.feed(job, event)
        self._forget_ended(job)  # it may have ended without an effect: evicted, and nobody was waiting

    def _ask_media(self, session: SessionId, sha256: bytes) -> None:
        self._endpoint.send(session, NeedMedia(sha256))  # unsent: the session has ended, we shall be told

    def _media_news(self, job: JobKey, news: Progress | Arrived | Refused) -> None:
        match news:
            case Progress():
                self._feed(job, jobs.MediaProgress())
            case Arrived():
                self._feed(job, jobs.MediaArrived())
            case Refused():
                self._feed(job, jobs.MediaFailed(news.sender, news.error.as_value()))

    def _perform(self, job: JobKey, effects: tuple[Effect, ...]) -> None:
        about = self._about.get(job)
        if about is None:  # its job is over: a stray reservation is still given back
            for effect in effects:
                self._perform_staged(job, effect)
            return
        item, spec = about
        for effect in effects:
            match effect:
                case jobs.FetchMedia():
                    self._media.fetch(job, item.sha256, item.media_nbytes, effect.sender)
                case jobs.DropMedia():
                    self._media.drop(job, item.sha256)
                case jobs.AskStaging():
                    self.to_buffers.tell(StagingWanted(job, spec.nbytes))
                case jobs.WithdrawStaging():
                    self.to_buffers.tell(StagingUnwanted(job))
                case jobs.QueueForward():
                    extent = self._extents[effect.staged]
                    media = self._media.get(item.sha256)
                    self.to_encode.tell(ForwardWanted(job, item, spec, extent, media))
                case jobs.UnqueueForward():
                    self.to_encode.tell(ForwardUnwanted(job))
                case jobs.KillWorker():
                    self.to_encode.tell(WorkerTooSlow(job))
                case _:
                    self._perform_staged(job, effect)
        for effect in effects:
            if isinstance(effect, jobs.MarkWritten):
                written = SourceEvent(effect.staged, sources.Written(), self._digests.pop(job, None))
                self.to_encode.tell(ResultWritten(written))
        self._forget_ended(job)

    def _perform_staged(self, job: JobKey, effect: Effect) -> None:
        match effect:
            case jobs.MarkWriteEnded():
                self._extents.pop(effect.staged, None)
                self.to_buffers.tell(SourceEvent(effect.staged, sources.WriteEnded()))
            case jobs.ReleaseStaged():
                self._extents.pop(effect.staged, None)
                self.to_buffers.tell(SourceEvent(effect.staged, sources.ReleaseWanted()))
            case jobs.TellReady():
                self.to_encode.tell(JobNews(effect.subscriber, effect.staged))
            case jobs.TellEvicted():
                self.to_encode.tell(JobNews(effect.subscriber, None))
            case jobs.TellFailed():
                self.to_encode.tell(JobNews(effect.subscriber, None, effect.error))

    def _forget_ended(self, job: JobKey) -> None:
        if isinstance(self._jobs.state(job), jobs.Absent):
            self._about.pop(job, None)
            self._digests.pop(job, None)

    @property
    def media_nbytes(self) -> int:
        return self._media.held_nbytes

    def counts(self) -> dict[str, int]:
        return {
            "jobs": len(self._about),
            "media": len(self._media),
            "media_nbytes": self._media.held_nbytes,
            "staged_extents": len(self._extents),
        }
