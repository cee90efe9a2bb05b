"""An encoder node as the checker sees it: part, job and source machines, staging memory, one worker.

The glue of the actors `encode`, `dedup` and `buffers`, without sockets, clocks and media bytes. Memory is
cells: a row of an embedding, junk of a forward that runs, or a seal behind the rows.
"""

from typing import Any, NamedTuple

from msgspec.structs import replace

from epd.check.machines import DEADLINE_S, Machines, Table
from epd.check.node import CheckedNode, Mail
from epd.check.setup import JUNK, SEAL, Setup, content, kind_of, spec_of
from epd.protocol import encoder, jobs, sources
from epd.protocol import messages as m
from epd.protocol.ids import Attempt, LeaseId, RegionId, Seal, SessionId
from epd.protocol.machine import Effect, Event, TimerExpired
from epd.protocol.sources import Subscriber
from epd.protocol.transfer_messages import heard_by_encoder, told_by_encoder


class Staged(NamedTuple):
    """A staging slot in use; in the node's order, the one that was pinned longest ago first."""

    staged: int
    kind: int
    slot: int


class Running(NamedTuple):
    """The worker's forward; `written` rows hold junk already."""

    kind: int
    staged: int
    slot: int
    written: int = 0
    stuck: bool = False
    killed: bool = False


class EncoderState(NamedTuple):
    parts: tuple[tuple[Any, Any], ...] = ()
    jobs: tuple[tuple[int, Any], ...] = ()
    sources: tuple[tuple[int, Any], ...] = ()
    kinds: tuple[tuple[Any, int], ...] = ()
    """Of the open parts' items: ((part key, item), kind)."""
    fetching: tuple[tuple[int, int], ...] = ()
    media: tuple[int, ...] = ()
    memory: tuple[tuple[int, ...], ...] = ()
    staged: tuple[Staged, ...] = ()
    waiting: tuple[int, ...] = ()
    queue: tuple[tuple[int, int], ...] = ()
    running: Running | None = None
    sessions: tuple[int, ...] = ()
    draining: bool = False
    mail: Mail = ()
    """The first argument of each is the number of a staged result, or 0."""
    flaws: tuple[str, ...] = ()


class EncoderNode(CheckedNode[EncoderState]):
    def __init__(
        self, setup: Setup, machines: Machines, state: EncoderState, fresh_seals: tuple[int, ...]
    ) -> None:
        super().__init__("encoder", setup, state.sessions, state.mail, state.flaws)
        self._fresh_seals = list(fresh_seals)
        self._parts = Table("part", machines, state.parts, self._perform_part)
        self._jobs = Table("job", machines, state.jobs, self._perform_job)
        self._sources = Table("source", machines, state.sources, self._perform_source)
        self._kinds = dict(state.kinds)
        self._fetching = dict(state.fetching)
        self._media = set(state.media)
        self._memory = [list(cells) for cells in state.memory]
        if not self._memory:
            self._memory = [[0] * (max(setup.rows) + 1) for _ in range(setup.staging_slots)]
        self._staged = {entry.staged: entry for entry in state.staged}
        self._waiting = list(state.waiting)
        self._queue = dict(state.queue)
        self._running = state.running
        self._draining = state.draining

    def frozen(self) -> EncoderState:
        return EncoderState(
            self._parts.frozen(),
            self._jobs.frozen(),
            self._sources.frozen(),
            tuple(sorted(self._kinds.items())),
            tuple(sorted(self._fetching.items())),
            tuple(sorted(self._media)),
            tuple(map(tuple, self._memory)),
            tuple(self._staged.values()),
            tuple(self._waiting),
            tuple(self._queue.items()),
            self._running,
            tuple(self._sessions),
            self._draining,
            tuple(self._mail),
            tuple(self._flaws),
        )

    # -- from outside ------------------------------------------------------------------------

    def _on_up(self, session: int) -> None:
        """A `Hello`: ends the same node's older sessions first."""
        if "two sessions" not in self._setup.broken:
            for older in list(self._sessions):
                self._on_down(older)
        self._sessions.append(session)

    def _on_down(self, session: int) -> None:
        if session not in self._sessions:
            return
        self._sessions.remove(session)
        self._tell("dedup", "media_session_over", 0, session)
        for key in [key for key in self._parts.states if key[0] == session]:
            self._feed_part(key, encoder.SessionEnded())

    def _on_message(self, session: int, message: Any) -> None:
        if session not in self._sessions:
            if "any session" not in self._setup.broken:
                return
            self._flaws.append(f"I8: acted on {type(message).__name__} of session {session}, which is over")
        match message:
            case m.MediaMissing():
                self._tell("dedup", "take_media", 0, session, message.sha256[0], False)
                return
            case m.NeedMedia():  # comes back as the media themselves
                self._tell("dedup", "take_media", 0, session, message.sha256[0], True)
                return
        key: tuple[int, ...] = (session, message.transfer, message.part)
        if "two attempts" in self._setup.broken:
            key = (*key, message.attempt)
        match message:
            case m.EncodeRequest():
                specs = tuple(spec_of(self._setup, kind_of(item)) for item in message.items)
                large = [item for item, spec in enumerate(specs) if spec.rows > self._setup.staging_rows]
                refusal = m.ErrorValue("request_too_large", False, "", large[0]) if large else None
                request = encoder.RequestReceived(message.attempt, message.items, specs, DEADLINE_S, refusal)
                self._feed_part(key, request)
                if self._draining:
                    self._feed_part(key, encoder.DrainWanted())
            case m.BufferGrant() | m.Receipt() | m.Cancel():
                self._feed_part(key, heard_by_encoder(message))

    def _on_bad_media(self, session: int, kind: int) -> None:
        if self._fetching.get(kind) == session:
            self._media_failed(kind, session, "media_mismatch")

    def _on_deadline(self, *key: int) -> None:
        self._feed_part(key, TimerExpired(), DEADLINE_S)

    def _on_job_timeout(self, kind: int) -> None:
        self._jobs.feed(kind, TimerExpired())

    def _on_evict(self, staged: int) -> None:
        self._sources.feed(staged, sources.EvictWanted())

    def _on_drain(self) -> None:
        self._draining = True
        for key in list(self._parts.states):
            self._feed_part(key, encoder.DrainWanted())

    def _on_start(self) -> None:
        kind, staged = next(iter(self._queue.items()))
        del self._queue[kind]
        entry = self._staged.get(staged)
        self._running = Running(kind, staged, entry.slot if entry else 0)
        self._tell("dedup", "feed_job", 0, kind, jobs.ForwardStarted())

    def _on_write(self) -> None:
        running = self._running
        assert running is not None
        self._memory[running.slot][running.written] = JUNK
        self._running = running._replace(written=running.written + 1)

    def _on_finish(self, outcome: str) -> None:
        """The forward ends: `ok`, `failed`, or its worker `died`."""
        running, error = self._running, None
        assert running is not None
        if outcome == "ok":
            for row in range(self._setup.rows[running.kind]):
                self._memory[running.slot][row] = content(running.kind, row)
        else:
            error = m.ErrorValue("forward_failed", True, outcome)
        self._running = None
        self._tell("dedup", "feed_job", 0, running.kind, jobs.ForwardEnded(error))

    def _on_stick(self) -> None:
        assert self._running is not None
        self._running = self._running._replace(stuck=True)

    # -- actor `encode` ----------------------------------------------------------------------

    def _feed_part(self, key: tuple[int, ...], event: Event, now_s: float = 0.0) -> None:
        self._parts.feed(key, event, now_s)
        if key not in self._parts.states:
            for entry in [entry for entry in self._kinds if entry[0] == key]:
                del self._kinds[entry]

    def _subscriber_event(self, _staged: int, who: Subscriber, event: Event) -> None:
        key: tuple[int, ...] = (who.session, who.transfer, who.part)
        if "two attempts" in self._setup.broken:
            key = (*key, who.attempt)
        self._feed_part(key, event)

    def _perform_part(self, key: Any, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            self._perform_part_effect(key, effect)

    def _perform_part_effect(self, key: Any, effect: Any) -> None:
        session, transfer, part = key[:3]
        attempt = getattr(effect, "attempt", Attempt(0))
        who = Subscriber(session, transfer, part, attempt, getattr(effect, "item", 0))
        match effect:
            case encoder.SendMetadata() | encoder.SendForwardDone():
                self._send(session, told_by_encoder(transfer, part, effect))
            case encoder.SendFailed():  # no rule looks at its words
                self._send(session, replace(told_by_encoder(transfer, part, effect), reason=""))
            case encoder.Subscribe():
                kind = kind_of(effect.described)
                self._kinds[key, effect.item] = kind
                self._tell("dedup", "feed_job", 0, kind, jobs.Subscribed(who))
            case encoder.TellGranted():
                self._tell("dedup", "feed_job", 0, self._kinds[key, effect.item], jobs.Granted(who))
            case encoder.Unsubscribe():
                self._tell("dedup", "feed_job", 0, self._kinds[key, effect.item], jobs.Left(who))
            case encoder.PinSource():
                self._tell("buffers", "pin", effect.staged, who)
            case encoder.UnpinSource():
                self._tell("buffers", "source_event", effect.staged, sources.Unpinned(who))

    def _queue_forward(self, staged: int, kind: int) -> None:
        self._queue[kind] = staged

    def _unqueue_forward(self, _staged: int, kind: int) -> None:
        if self._queue.pop(kind, None) is not None:
            self._tell("dedup", "feed_job", 0, kind, jobs.ForwardUnqueued())

    def _kill_worker(self, _staged: int, kind: int) -> None:
        if self._running is not None and self._running.kind == kind:
            self._running = self._running._replace(killed=True)

    def _pass_on_written(self, staged: int) -> None:
        self._tell("buffers", "source_event", staged, sources.Written())

    # -- actor `dedup` -----------------------------------------------------------------------

    def _feed_job(self, _staged: int, kind: int, event: Event) -> None:
        self._jobs.feed(kind, event)

    def _take_media(self, _staged: int, session: int, kind: int, have: bool) -> None:
        if self._fetching.get(kind) != session:
            return
        if not have:
            self._media_failed(kind, session, "media_unavailable")
            return
        del self._fetching[kind]
        self._media.add(kind)
        self._jobs.feed(kind, jobs.MediaArrived())

    def _media_session_over(self, _staged: int, session: int) -> None:
        for kind in [kind for kind, sender in self._fetching.items() if sender == session]:
            self._media_failed(kind, session, "media_unavailable")

    def _media_failed(self, kind: int, session: int, code: str) -> None:
        error = m.ErrorValue(code, False, "")
        self._jobs.feed(kind, jobs.MediaFailed(SessionId(session), error))

    def _perform_job(self, kind: int, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            self._perform_job_effect(kind, effect)
        # After the news of it and by way of `encode`, so that its pins are there before it can be evicted.
        for effect in effects:
            if isinstance(effect, jobs.MarkWritten) and "evict before the pin" not in self._setup.broken:
                self._tell("encode", "pass_on_written", effect.staged)

    def _perform_job_effect(self, kind: int, effect: Effect) -> None:
        match effect:
            case jobs.FetchMedia():
                self._fetching[kind] = effect.sender
                self._send(effect.sender, m.NeedMedia(bytes([kind]) * 32))
                self._jobs.feed(kind, jobs.MediaProgress())
            case jobs.DropMedia():
                self._fetching.pop(kind, None)
                self._media.discard(kind)
            case jobs.AskStaging():
                self._tell("buffers", "want_staging", 0, kind)
            case jobs.WithdrawStaging():
                self._tell("buffers", "withdraw_staging", 0, kind)
            case jobs.QueueForward():
                self._tell("encode", "queue_forward", effect.staged, kind)
            case jobs.UnqueueForward():
                self._tell("encode", "unqueue_forward", 0, kind)
            case jobs.KillWorker():
                self._tell("encode", "kill_worker", 0, kind)
            case jobs.MarkWritten() if "evict before the pin" in self._setup.broken:
                self._tell("buffers", "source_event", effect.staged, sources.Written())
            case jobs.MarkWriteEnded():
                self._tell("buffers", "source_event", effect.staged, sources.WriteEnded())
            case jobs.ReleaseStaged():
                self._tell("buffers", "source_event", effect.staged, sources.ReleaseWanted())
            case jobs.TellReady():
                who = effect.subscriber
                ready = encoder.JobReady(who.attempt, who.item, effect.staged)
                self._tell("encode", "subscriber_event", effect.staged, who, ready)
            case jobs.TellEvicted():
                who = effect.subscriber
                evicted = encoder.JobEvicted(who.attempt, who.item)
                self._tell("encode", "subscriber_event", 0, who, evicted)
            case jobs.TellFailed():
                who = effect.subscriber
                failed = encoder.JobFailed(who.attempt, who.item, effect.error)
                self._tell("encode", "subscriber_event", 0, who, failed)

    # -- actor `buffers` ---------------------------------------------------------------------

    def _want_staging(self, _staged: int, kind: int) -> None:
        self._waiting.append(kind)
        self._admit()

    def _withdraw_staging(self, _staged: int, kind: int) -> None:
        if kind in self._waiting:
            self._waiting.remove(kind)
            self._admit()

    def _pin(self, staged: int, who: Subscriber) -> None:
        if staged in self._staged:
            self._staged[staged] = self._staged.pop(staged)
        self._sources.feed(staged, sources.PinWanted(who))

    def _source_event(self, staged: int, event: Event) -> None:
        self._sources.feed(staged, event)
        self._admit()

    def _admit(self) -> None:
        """Give room in order; while the head does not fit, evict what nobody reads, oldest first."""
        while self._waiting:
            used = {entry.slot for entry in self._staged.values()}
            free = [slot for slot in range(self._setup.staging_slots) if slot not in used]
            if free:
                self._reserve(self._waiting.pop(0), free[0])
            elif not self._evict_one():
                return

    def _evict_one(self) -> bool:
        states = ((LeaseId(staged), self._sources.state(staged)) for staged in self._staged)
        unread = sources.first_unread(states)
        if unread is not None:
            self._sources.feed(unread, sources.EvictWanted())
        return unread is not None

    def _reserve(self, kind: int, slot: int) -> None:
        staged = LeaseId(self._fresh_staged())
        self._staged[staged] = Staged(staged, kind, slot)
        seal, following = Seal(self._fresh_seals.pop(0)), Seal(self._fresh_seals.pop(0))
        self._sources.feed(staged, sources.Reserved(staged, seal, following))
        self._tell("dedup", "feed_job", staged, kind, jobs.StagingReserved(staged))

    def _fresh_staged(self) -> int:
        """A number that nothing in this node names any more: as good as one that was never used."""
        named = {*self._staged, *self._queue.values(), *self._sources.states}
        named |= {words[1] for _, words in self._mail}
        named |= {getattr(state, "staged", 0) for state in self._jobs.states.values()}
        if self._running is not None:
            named.add(self._running.staged)
        for state in self._parts.states.values():
            for item in state.items:
                named |= {getattr(item, "staged", 0), getattr(item, "renewed", None) or 0}
        return next(number for number in range(1, 99) if number not in named)

    def _perform_source(self, staged: int, effects: tuple[Effect, ...]) -> None:
        entry = self._staged.get(staged)
        for effect in effects:
            match effect:
                case sources.TellGone():
                    gone = encoder.SourceGone(effect.subscriber.attempt, effect.subscriber.item)
                    self._tell("encode", "subscriber_event", 0, effect.subscriber, gone)
                case _ if entry is not None:
                    self._perform_on(entry, effect)

    def _perform_on(self, entry: Staged, effect: Effect) -> None:
        staged = LeaseId(entry.staged)
        match effect:
            case sources.WriteSeal():
                self._memory[entry.slot][self._setup.rows[entry.kind]] = SEAL + effect.seal
            case sources.FreeExtent():
                del self._staged[staged]
            case sources.TellPinned():
                who = effect.subscriber
                nbytes = spec_of(self._setup, entry.kind).nbytes
                source = m.Source(RegionId(0), entry.slot, nbytes, effect.seal)
                pinned = encoder.SourcePinned(who.attempt, who.item, staged, source)
                self._tell("encode", "subscriber_event", staged, who, pinned)
            case sources.TellEvicted():
                self._tell("dedup", "feed_job", staged, entry.kind, jobs.Evicted(staged))
