"""Metrics from the steps of the machines: what they did is what is counted.

Each method watches the machines of one kind (`MachineTable.observers`). All run in the node's loop;
`samples` may be called from another thread, and takes no lock.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

import msgspec

from epd.observe.families import Histogram, Sample, known_code, samples
from epd.protocol import encoder, jobs, session, slots, sources
from epd.protocol import prefill_types as t
from epd.protocol.ids import ReadId

_STATES: Final = ("requested", "metadata", "buffer-registered", "forward-done", "rdma-written", "consumed")
_REQUESTED, _METADATA, _BUFFER_REGISTERED, _FORWARD_DONE, _RDMA_WRITTEN, _CONSUMED = range(6)
_REACHED: Final[dict[type, int]] = {
    t.Negotiating: _REQUESTED,
    t.AwaitingRoom: _METADATA,
    t.Filling: _BUFFER_REGISTERED,
    t.Delivered: _RDMA_WRITTEN,
    t.Consumed: _CONSUMED,
}
"""What a request has reached when it enters a state; the others are reached by an event or an effect.
Asking `state_name` at every step would be the largest part of what metrics cost."""
_POOL_STATES: Final = {"prefill": ("leased", "quarantined"), "encoder": ("writing", "pinned", "retained")}
_JOB_STATES: Final[dict[type, str]] = {
    jobs.Unstarted: "unstarted",
    jobs.Fetching: "fetching",
    jobs.AwaitingStaging: "awaiting-staging",
    jobs.Queued: "queued",
    jobs.Running: "running",
    jobs.Done: "done",
}
_CHECKS: Final = {"seal_mismatch": "seal", "digest_mismatch": "checksum"}
_KNOWN_SESSIONS: Final = 1024


class _Open(msgspec.Struct, gc=False):
    """A transfer or part: which of `_STATES` it has reached, since when, and when it began."""

    reached: int
    entered_s: float
    started_s: float


class StepMetrics:
    """`nbytes_of` gives the pool bytes of a lease (prefill) or a staged result (encoder); the node
    sets it. It is asked when such a lease begins, before the effects of that step are performed."""

    def __init__(self, role: str) -> None:
        self.nbytes_of: Callable[[Any], int] = lambda key: 0
        self.observers: dict[str, Callable[..., None]] = {
            "prefill": self.saw_prefill,
            "slots": self.saw_slots,
            "encoder": self.saw_encoder,
            "jobs": self.saw_jobs,
            "sources": self.saw_sources,
            "session": self.saw_session,
        }
        self._transfers: dict[Hashable, _Open] = {}
        self._open_by_state = [0] * len(_STATES)
        self._outcomes: Counter[str] = Counter()
        self._phases = [Histogram() for _ in _STATES]
        self._durations = Histogram()
        self._retries = 0
        self._pool = Counter(dict.fromkeys(_POOL_STATES[role], 0))
        self._nbytes: dict[Hashable, int] = {}
        self._aborts = 0
        self._aborted_s: dict[ReadId, float] = {}
        self._to_terminal = Histogram()
        self._mismatches: Counter[tuple[str, str]] = Counter()
        self._addresses: dict[Hashable, str] = {}
        self._jobs: Counter[str] = Counter()
        self._shared = 0
        self._forwards: Counter[str] = Counter()
        self._forward_started_s: dict[Hashable, float] = {}
        self._forward_durations = Histogram()
        self._opened = 0
        self._ended: Counter[str] = Counter()

    # -- transfers ---------------------------------------------------------------------------

    def saw_prefill(
        self, key: Hashable, before: Any, after: Any, event: Any, now_s: float, effects: tuple[Any, ...]
    ) -> None:
        state = type(after)
        if not effects and state is type(before) and type(event) is not t.MetadataReceived:
            return
        entry = self._transfers.get(key)
        if state is not type(before):
            if state is t.Ended or state is t.New:
                self._end(key, entry, now_s)
            else:
                self._reach(key, entry, _REACHED[state], now_s)
        elif type(event) is t.MetadataReceived and after is not before:
            self._reach(key, entry, _METADATA, now_s)
        for effect in effects:
            kind = type(effect)
            if kind is t.SendEncodeRequest:
                self._retries += effect.attempt > 1
            elif kind is t.StartRead:
                self._reach(key, entry, _FORWARD_DONE, now_s)
            elif kind is t.Deliver:
                self._outcomes["delivered"] += 1
                if entry is not None:
                    self._durations.observe(now_s - entry.started_s)
            elif kind is t.FailRequest:
                self._outcomes[known_code(effect.error.code)] += 1

    def saw_encoder(
        self, key: Hashable, before: Any, after: Any, event: Any, now_s: float, effects: tuple[Any, ...]
    ) -> None:
        entry = self._transfers.get(key)
        for effect in effects:
            kind = type(effect)
            if kind is encoder.SendForwardDone:
                self._reach(key, entry, _FORWARD_DONE, now_s)
            elif kind is encoder.AttemptEnded:
                outcome = effect.outcome
                self._outcomes[known_code(outcome)] += 1
                if outcome == "received" and entry is not None:
                    self._durations.observe(now_s - entry.started_s)
                self._end(key, entry, now_s)
                entry = None
        if type(after) is encoder.Open:
            if type(event) is encoder.RequestReceived and entry is None:
                self._reach(key, None, _METADATA, now_s)
            elif type(event) is encoder.GrantReceived and after is not before:
                self._reach(key, entry, _BUFFER_REGISTERED, now_s)

    def _reach(self, key: Hashable, entry: _Open | None, reached: int, now_s: float) -> None:
        """The furthest state counts: items are read one by one, another attempt starts from the first."""
        if entry is None:
            self._transfers[key] = _Open(reached, now_s, now_s)
        else:
            left = entry.reached
            if left >= reached:
                return
            self._open_by_state[left] -= 1
            self._phases[left].observe(now_s - entry.entered_s)
            entry.reached = reached
            entry.entered_s = now_s
        self._open_by_state[reached] += 1

    def _end(self, key: Hashable, entry: _Open | None, now_s: float) -> None:
        if entry is not None:
            self._open_by_state[entry.reached] -= 1
            self._phases[entry.reached].observe(now_s - entry.entered_s)
            del self._transfers[key]

    # -- memory and reads --------------------------------------------------------------------

    def saw_slots(
        self, key: Hashable, before: Any, after: Any, event: Any, now_s: float, effects: tuple[Any, ...]
    ) -> None:
        if type(after) is not type(before):
            self._move(key, _slot_state(before), _slot_state(after))
        for effect in effects:
            if type(effect) is slots.AbortRead:
                self._aborts += 1
                self._aborted_s[effect.read] = now_s
        if type(event) is slots.ReadTerminal:
            aborted_s = self._aborted_s.pop(event.read, None)
            if aborted_s is not None:
                self._to_terminal.observe(now_s - aborted_s)
            if event.outcome in _CHECKS:
                self._note_mismatch(before, event)

    def _note_mismatch(self, before: Any, event: slots.ReadTerminal) -> None:
        for running in getattr(before, "reads", ()):
            if running.wanted.read == event.read:
                peer = self._addresses.get(running.wanted.session, "unknown")
                self._mismatches[peer, _CHECKS[event.outcome]] += 1

    def saw_sources(
        self, key: Hashable, before: Any, after: Any, event: Any, now_s: float, effects: tuple[Any, ...]
    ) -> None:
        if after is not before:
            was, now = _source_state(before), _source_state(after)
            if was != now:
                self._move(key, was, now)

    def _move(self, key: Hashable, was: str, now: str) -> None:
        if was:
            nbytes = self._nbytes[key]
            self._pool[was] -= nbytes
        else:
            nbytes = self._nbytes[key] = self.nbytes_of(key)
        if now:
            self._pool[now] += nbytes
        else:
            del self._nbytes[key]

    # -- jobs --------------------------------------------------------------------------------

    def saw_jobs(
        self, key: Hashable, before: Any, after: Any, event: Any, now_s: float, effects: tuple[Any, ...]
    ) -> None:
        was, now = type(before), type(after)
        if was is not now:
            if was is not jobs.Absent:
                self._jobs[_JOB_STATES[was]] -= 1
            if now is not jobs.Absent:
                self._jobs[_JOB_STATES[now]] += 1
        kind = type(event)
        if kind is jobs.Subscribed:
            self._shared += was is not jobs.Absent and after is not before
        elif kind is jobs.ForwardStarted:
            self._forward_started_s[key] = now_s
        elif kind is jobs.ForwardEnded:
            error = event.error
            self._forwards["ok" if error is None else known_code(error.code)] += 1
            started_s = self._forward_started_s.pop(key, None)
            if started_s is not None:
                self._forward_durations.observe(now_s - started_s)

    # -- sessions ----------------------------------------------------------------------------

    def saw_session(
        self, key: Hashable, before: Any, after: Any, event: Any, now_s: float, effects: tuple[Any, ...]
    ) -> None:
        if type(event) is session.Dialled:
            # Kept after the session's end: its reads end later. Bounded, as a dead peer is dialled for ever.
            self._addresses[key] = event.address
            if len(self._addresses) > _KNOWN_SESSIONS:
                del self._addresses[next(iter(self._addresses))]
        if not effects:  # one step for each frame, both ways
            return
        for effect in effects:
            if type(effect) is session.TellOpened:
                self._opened += 1
            elif type(effect) is session.TellEnded:
                self._ended[known_code(effect.code)] += 1

    # -- for whoever shows them --------------------------------------------------------------

    def samples(self) -> Iterator[Sample]:
        """All of them, as they are now."""
        for state, count, histogram in zip(_STATES, self._open_by_state, self._phases, strict=True):
            yield Sample("epd_transfers_open", (state,), count)
            yield Sample("epd_transfer_phase_seconds", (state,), histogram)
        yield from samples("epd_transfers", self._outcomes)
        yield Sample("epd_transfer_duration_seconds", (), self._durations)
        yield Sample("epd_retries", (), self._retries)
        yield from samples("epd_pool_bytes", self._pool)
        yield Sample("epd_read_aborts", (), self._aborts)
        yield Sample("epd_read_abort_to_terminal_seconds", (), self._to_terminal)
        for labels, mismatches in list(self._mismatches.items()):
            yield Sample("epd_read_mismatches", labels, mismatches)
        yield from samples("epd_jobs", self._jobs)
        yield Sample("epd_shared_jobs", (), self._shared)
        yield from samples("epd_forwards", self._forwards)
        yield Sample("epd_forward_duration_seconds", (), self._forward_durations)
        yield Sample("epd_sessions_opened", (), self._opened)
        yield from samples("epd_sessions_ended", self._ended)


def _slot_state(state: Any) -> str:
    if type(state) is slots.Leased:
        return "leased"
    return "quarantined" if type(state) is slots.Quarantined else ""


def _source_state(state: Any) -> str:
    if type(state) is sources.Writing:
        return "writing"
    if type(state) is sources.Stable:
        return "pinned" if state.pins else "retained"
    return ""
