"""An encoder node of the coupled world: `encode`, `dedup`, `buffers`, and a queue between each two."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coupled_base import STAGING_SLOTS, Session, Table, picture, size_of
from machines import failure

from epd.protocol import encoder, jobs, sources
from epd.protocol import prefill_types as pt
from epd.protocol.ids import LeaseId, Part, RegionId, Seal, SessionId, TransferId
from epd.protocol.machine import Effect, Event, Ignored
from epd.protocol.messages import ErrorValue, Item, Source
from epd.protocol.sources import Subscriber

if TYPE_CHECKING:
    from coupled_world import World

PartKey = tuple[SessionId, TransferId, Part]


class EncoderNode:
    """`encode`, `dedup` and `buffers` with a queue between each two of them, and one worker."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.name = world.number("encoder")
        self.alive = True
        self.draining = False
        self.sessions: set[SessionId] = set()
        self.parts = Table(world, encoder, encoder.Limits(), self._perform_part)
        self.jobs = Table(world, jobs, jobs.Limits(), self._perform_job)
        self.sources = Table(world, sources, sources.Limits(), self._perform_source)
        self.item_of: dict[Subscriber, Item] = {}
        self.fetching: dict[bytes, SessionId] = {}
        self.media: set[bytes] = set()
        self.digests: set[bytes] = set()
        # buffers
        self.memory: dict[int, tuple[object, int]] = dict.fromkeys(range(STAGING_SLOTS), ("nothing", 0))
        self.free = set(range(STAGING_SLOTS))
        self.staged: dict[LeaseId, tuple[bytes, int]] = {}
        self.waiting: list[bytes] = []
        # worker
        self.queue: dict[bytes, LeaseId] = {}
        self.running: tuple[bytes, LeaseId, int] | None = None
        self.hangs = self.killed = False

    def tell(self, queue: str, handler: Callable[..., None], *args: Any) -> None:
        self.world.tell((self.name, queue), self._if_alive, handler, args)

    def _if_alive(self, handler: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.alive:
            handler(*args)

    # -- sessions --------------------------------------------------------------------------

    def open_session(self, session: Session) -> None:
        session.greeted = True
        for older in list(self.sessions):
            self.end_session(older)
        self.sessions.add(session.id)

    def end_session(self, session: SessionId) -> None:
        if not self.alive or session not in self.sessions:
            return
        self.sessions.discard(session)
        self.tell("node>dedup", self._session_over, session)
        for key in [key for key in self.parts.states if key[0] == session]:
            self.parts.feed(key, encoder.SessionEnded())

    def _session_over(self, session: SessionId) -> None:
        for sha256 in [sha256 for sha256, sender in self.fetching.items() if sender == session]:
            error = failure("media_unavailable", retryable=False)
            self.jobs.feed(sha256, jobs.MediaFailed(session, error))

    def drain(self) -> None:
        for key in list(self.parts.states):
            self.parts.feed(key, encoder.DrainWanted())

    def hear(self, session: SessionId, transfer: TransferId, effect: Any, remaining_s: float) -> None:
        if not self.alive or session not in self.sessions:
            return
        key: PartKey = (session, transfer, effect.part)
        event: Event
        match effect:
            case pt.SendEncodeRequest():
                deadline_s = self.world.now_s + remaining_s
                sizes = tuple(map(size_of, effect.items))
                event = encoder.RequestReceived(effect.attempt, effect.items, sizes, deadline_s)
            case pt.SendGrant():
                event = encoder.GrantReceived(effect.attempt, effect.lease)
            case pt.SendReceipt():
                event = encoder.ReceiptReceived(effect.attempt, effect.lease, effect.first, effect.count)
            case _:
                event = encoder.CancelReceived(effect.attempt)
        self.parts.feed(key, event)

    # -- encode ----------------------------------------------------------------------------

    def _perform_part(self, key: Any, effect: Any) -> None:
        number, transfer, part = key
        session, requests = self.world.sessions[number], self.world.prefill.requests
        if isinstance(effect, Ignored):
            return
        who = Subscriber(number, transfer, part, effect.attempt, getattr(effect, "item", 0))
        match effect:
            case encoder.SendMetadata():
                event: Event = pt.MetadataReceived(number, part, effect.attempt, effect.specs)
                session.down(requests.feed, transfer, event)
            case encoder.SendForwardDone():
                event = pt.SourcesReady(
                    number, part, effect.attempt, effect.grant, effect.first, effect.ready, effect.last
                )
                session.down(requests.feed, transfer, event)
            case encoder.SendFailed():
                event = pt.AttemptFailed(number, part, effect.attempt, effect.error)
                session.down(requests.feed, transfer, event)
            case encoder.Subscribe():
                self.item_of[who] = effect.described
                self.tell("encode>dedup", self.jobs.feed, effect.described.sha256, jobs.Subscribed(who))
            case encoder.TellGranted():
                self.tell("encode>dedup", self.jobs.feed, self.item_of[who].sha256, jobs.Granted(who))
            case encoder.Unsubscribe():
                self.tell("encode>dedup", self.jobs.feed, self.item_of.pop(who).sha256, jobs.Left(who))
            case encoder.PinSource():
                self.tell("encode>buffers", self.sources.feed, effect.staged, sources.PinWanted(who))
            case encoder.UnpinSource():
                self.tell("encode>buffers", self.sources.feed, effect.staged, sources.Unpinned(who))
                self.tell("encode>buffers", self.admit)

    def _feed_part(self, who: Subscriber, event: Event) -> None:
        self.parts.feed((who.session, who.transfer, who.part), event)

    # -- dedup -----------------------------------------------------------------------------

    def take_media(self, session: SessionId, sha256: bytes, have: bool) -> None:
        if self.alive and session in self.sessions:
            self.tell("node>dedup", self._media_here, session, sha256, have)

    def _media_here(self, session: SessionId, sha256: bytes, have: bool) -> None:
        if self.fetching.get(sha256) != session:
            return
        if not have or self.world.chance(self.world.faults.media_fail):
            code = "media_mismatch" if have else "media_unavailable"
            self.jobs.feed(sha256, jobs.MediaFailed(session, failure(code, retryable=False)))
            return
        del self.fetching[sha256]
        self.media.add(sha256)
        self.jobs.feed(sha256, jobs.MediaArrived())

    def _perform_job(self, sha256: Any, effect: Effect) -> None:
        world = self.world
        match effect:
            case jobs.FetchMedia():
                self.fetching[sha256] = effect.sender
                session = world.sessions[effect.sender]
                session.down(world.prefill.need_media, session, sha256)
                self.tell("dedup>dedup", self.jobs.feed, sha256, jobs.MediaProgress())
            case jobs.DropMedia():
                self.fetching.pop(sha256, None)
                self.media.discard(sha256)
            case jobs.AskStaging():
                self.tell("dedup>buffers", self.want_staging, sha256)
            case jobs.WithdrawStaging():
                self.tell("dedup>buffers", self.withdraw, sha256)
            case jobs.QueueForward():
                assert sha256 in self.media
                self.tell("dedup>encode", self._queue_forward, sha256, effect.staged)
            case jobs.UnqueueForward():
                self.tell("dedup>encode", self._unqueue, sha256)
            case jobs.KillWorker():
                self.tell("dedup>encode", self._kill, sha256)
            case jobs.MarkWritten():
                self.tell("dedup>buffers", self._source_event, effect.staged, sources.Written())
            case jobs.MarkWriteEnded():
                self.tell("dedup>buffers", self._source_event, effect.staged, sources.WriteEnded())
            case jobs.ReleaseStaged():
                self.tell("dedup>buffers", self._source_event, effect.staged, sources.ReleaseWanted())
            case jobs.TellReady():
                who = effect.subscriber
                event: Event = encoder.JobReady(who.attempt, who.item, effect.staged)
                self.tell("dedup>encode", self._feed_part, who, event)
            case jobs.TellEvicted():
                who = effect.subscriber
                self.tell("dedup>encode", self._feed_part, who, encoder.JobEvicted(who.attempt, who.item))
            case jobs.TellFailed():
                who = effect.subscriber
                event = encoder.JobFailed(who.attempt, who.item, effect.error)
                self.tell("dedup>encode", self._feed_part, who, event)

    # -- worker ----------------------------------------------------------------------------

    def _queue_forward(self, sha256: bytes, staged: LeaseId) -> None:
        assert sha256 not in self.queue
        self.queue[sha256] = staged

    def _unqueue(self, sha256: bytes) -> None:
        if self.queue.pop(sha256, None) is not None:
            self.tell("encode>dedup", self.jobs.feed, sha256, jobs.ForwardUnqueued())

    def _kill(self, sha256: bytes) -> None:
        self.killed = self.running is not None and self.running[0] == sha256

    def work(self) -> bool:
        """Start or end a forward; one that hangs ends only by the worker's death."""
        if self.running is not None:
            if self.hangs and not self.killed:
                return False
            sha256, staged, extent = self.running
            error: ErrorValue | None = None
            if self.killed or self.world.chance(self.world.faults.forward_fails):
                error = failure()
            self._write(staged, extent, sha256 if error is None else "half")
            self.running, self.hangs, self.killed = None, False, False
            self.tell("encode>dedup", self.jobs.feed, sha256, jobs.ForwardEnded(error))
            return True
        if self.queue:
            sha256 = next(iter(self.queue))
            staged = self.queue.pop(sha256)
            self.running = (sha256, staged, self.staged[staged][1])
            self.hangs = self.world.chance(self.world.faults.forward_hangs)
            self._write(staged, self.running[2], "half")
            self.tell("encode>dedup", self.jobs.feed, sha256, jobs.ForwardStarted())
            return True
        return False

    def _write(self, staged: LeaseId, extent: int, content: object) -> None:
        assert isinstance(self.sources.state(staged), sources.Writing), "written after it was given up"
        assert self.staged[staged][1] == extent
        self.memory[extent] = (content, self.memory[extent][1])

    # -- buffers ---------------------------------------------------------------------------

    def want_staging(self, sha256: bytes) -> None:
        self.waiting.append(sha256)
        self.admit()

    def withdraw(self, sha256: bytes) -> None:
        if sha256 in self.waiting:
            self.waiting.remove(sha256)

    def _source_event(self, staged: LeaseId, event: Event) -> None:
        self.sources.feed(staged, event)
        self.admit()

    def admit(self) -> None:
        while self.waiting:
            while not self.free and self.evict_one():
                pass
            if not self.free:
                return
            sha256, extent = self.waiting.pop(0), self.free.pop()
            staged = LeaseId(self.world.number("staged"))
            self.staged[staged] = (sha256, extent)
            seal, following = self.world.number("seal"), self.world.number("seal")
            self.sources.feed(staged, sources.Reserved(staged, Seal(seal), Seal(following)))
            self.tell("buffers>dedup", self.jobs.feed, sha256, jobs.StagingReserved(staged))

    def evict_one(self) -> bool:
        for staged, state in self.sources.states.items():
            if isinstance(state, sources.Stable) and not state.pins:
                self.sources.feed(staged, sources.EvictWanted())
                return True
        return False

    def _perform_source(self, staged: Any, effect: Effect) -> None:
        match effect:
            case sources.WriteSeal():
                extent = self.staged[staged][1]
                self.memory[extent] = (self.memory[extent][0], effect.seal)
            case sources.FreeExtent():
                assert self.running is None or self.running[1] != staged, "freed under the worker"
                extent = self.staged.pop(staged)[1]
                assert extent not in self.free
                self.free.add(extent)
            case sources.TellPinned():
                who, (sha256, extent) = effect.subscriber, self.staged[staged]
                source = Source(RegionId(0), extent, size_of(picture(sha256[0])).nbytes, effect.seal)
                event: Event = encoder.SourcePinned(who.attempt, who.item, staged, source)
                self.tell("buffers>encode", self._feed_part, who, event)
            case sources.TellGone():
                who = effect.subscriber
                event = encoder.SourceGone(who.attempt, who.item)
                self.tell("buffers>encode", self._feed_part, who, event)
            case sources.TellEvicted():
                # Its entry is gone; the job is found by the result's number.
                self.tell("buffers>dedup", self._evicted, staged)

    def _evicted(self, staged: LeaseId) -> None:
        for sha256, state in list(self.jobs.states.items()):
            if getattr(state, "staged", None) == staged:
                self.jobs.feed(sha256, jobs.Evicted(staged))

    def held(self) -> dict[str, object]:
        return {
            "parts": self.parts.states,
            "jobs": self.jobs.states,
            "sources": self.sources.states,
            "staged": self.staged,
            "waiting": self.waiting,
            "queue": self.queue,
            "running": self.running,
            "media": self.media | set(self.fetching),
            "subscribers": self.item_of,
            "pool": set(range(STAGING_SLOTS)) - self.free,
        }
