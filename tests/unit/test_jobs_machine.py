"""The job machine: one forward for everyone, only when there is room, and nobody pays for another."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import FAR, FIRST, NEAR, ONE, START_S, Bench, failure

from epd.protocol import jobs
from epd.protocol.ids import LeaseId, SessionId, TransferId
from epd.protocol.jobs import (
    Absent,
    AskStaging,
    AwaitingStaging,
    Done,
    DropMedia,
    Evicted,
    Fetching,
    FetchMedia,
    ForwardEnded,
    ForwardStarted,
    ForwardUnqueued,
    Granted,
    KillWorker,
    Left,
    Limits,
    MarkWriteEnded,
    MarkWritten,
    MediaArrived,
    MediaFailed,
    MediaProgress,
    Queued,
    QueueForward,
    ReleaseStaged,
    Running,
    StagingRefused,
    StagingReserved,
    Subscribed,
    TellEvicted,
    TellFailed,
    TellReady,
    UnqueueForward,
    Unstarted,
    Wish,
    WithdrawStaging,
)
from epd.protocol.machine import Effect, Event, TimerExpired
from epd.protocol.sources import Subscriber

LIMITS = Limits()
STAGED, OTHER = LeaseId(100), LeaseId(101)


def subscriber(number: int = 1, session: SessionId = NEAR) -> Subscriber:
    return Subscriber(session, TransferId(number), FIRST, ONE, 0)


A, B, C = subscriber(1, NEAR), subscriber(2, FAR), subscriber(3, NEAR)

STEPS: list[tuple[str, Event]] = [
    ("unstarted", Subscribed(A)),
    ("fetching", Granted(A)),
    ("awaiting-staging", MediaArrived()),
    ("queued", StagingReserved(STAGED)),
    ("running", ForwardStarted()),
    ("done", ForwardEnded(None)),
]
STATES = [name for name, _ in STEPS]


def at(state: str) -> Bench:
    bench = Bench(jobs, LIMITS)
    for name, event in STEPS:
        bench.feed(event)
        if name == state:
            break
    return bench


@pytest.fixture
def job() -> Bench:
    return Bench(jobs, LIMITS)


def test_a_job_asks_for_media_then_room_then_the_worker(job: Bench) -> None:
    for _, event in STEPS:
        job.feed(event)
    assert job.effects == [
        FetchMedia(NEAR),
        AskStaging(),
        QueueForward(STAGED),
        MarkWritten(STAGED),
        DropMedia(),
        TellReady(A, STAGED),
    ]


def test_nothing_is_fetched_before_a_subscriber_holds_a_grant(job: Bench) -> None:
    assert job.feed(Subscribed(A), Subscribed(B)) == []
    assert job.feed(Granted(B)) == [FetchMedia(FAR)]
    assert job.feed(Granted(A)) == [], "of one subscriber at a time"


def test_a_grant_of_somebody_who_does_not_want_it_starts_nothing(job: Bench) -> None:
    job.feed(Subscribed(A))
    assert job.ignores(Granted(B), Subscribed(A), Left(B))


@pytest.mark.parametrize("state", [name for name in STATES if name != "done"])
def test_everyone_who_joins_before_the_end_shares_the_one_forward(state: str) -> None:
    bench = at(state)
    bench.feed(Subscribed(B))
    for name, event in STEPS:
        if STATES.index(name) > STATES.index(state):
            bench.feed(event)
    assert bench.all(TellReady) == [TellReady(A, STAGED), TellReady(B, STAGED)]
    assert bench.count(QueueForward) == bench.count(FetchMedia) == 1


def test_who_joins_later_gets_the_staged_result_at_once() -> None:
    assert at("done").feed(Subscribed(B)) == [TellReady(B, STAGED)]


# -- who leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("unstarted", []),
        ("fetching", [DropMedia()]),
        ("awaiting-staging", [WithdrawStaging(), DropMedia()]),
    ],
)
def test_work_nobody_wants_any_more_is_dropped(state: str, expected: list[Effect]) -> None:
    bench = at(state)
    assert bench.feed(Left(A)) == expected
    assert bench.state == Absent()


def test_a_queued_forward_nobody_wants_keeps_its_slot_until_the_worker_s_owner_has_answered() -> None:
    bench = at("queued")
    assert bench.feed(Left(A)) == [UnqueueForward()]
    assert bench.state == Queued((), STAGED, withdrawn=True)
    assert bench.feed(ForwardUnqueued()) == [MarkWriteEnded(STAGED), DropMedia()]
    assert bench.state == Absent()


def test_a_forward_that_started_before_it_was_withdrawn_keeps_its_slot_until_its_end() -> None:
    bench = at("queued")
    bench.feed(Left(A))
    assert bench.feed(ForwardStarted()) == []
    assert bench.feed(ForwardEnded(None)) == [MarkWritten(STAGED), DropMedia()]
    assert isinstance(bench.state, Done)


def test_a_withdrawn_forward_that_is_wanted_again_is_queued_again_in_its_slot() -> None:
    bench = at("queued")
    bench.feed(Left(A), Subscribed(B), Granted(B))
    assert bench.feed(ForwardUnqueued()) == [QueueForward(STAGED)]
    assert bench.ignores(ForwardUnqueued())


def test_a_withdrawn_forward_whose_subscribers_have_no_grant_lets_its_room_go() -> None:
    bench = at("queued")
    bench.feed(Subscribed(B), Left(A))
    assert bench.feed(ForwardUnqueued()) == [MarkWriteEnded(STAGED), DropMedia()]
    assert bench.state == Unstarted((Wish(B),))


def test_a_running_forward_goes_on_without_subscribers_and_its_result_is_kept() -> None:
    bench = at("running")
    assert bench.feed(Left(A)) == []
    bench.feed(ForwardEnded(None))
    assert bench.feed(Subscribed(B)) == [TellReady(B, STAGED)]


@pytest.mark.parametrize("state", ["fetching", "awaiting-staging", "queued"])
def test_the_next_granted_subscriber_goes_on_where_the_first_left(state: str) -> None:
    bench = at(state)
    bench.feed(Subscribed(B), Granted(B))
    effects = bench.feed(Left(A))
    assert effects == ([DropMedia(), FetchMedia(FAR)] if state == "fetching" else [])


def test_another_subscriber_of_the_same_session_keeps_its_media_coming() -> None:
    bench = at("fetching")
    bench.feed(Subscribed(C), Granted(C))
    assert bench.feed(Left(A)) == []


# -- media -------------------------------------------------------------------------------------


def test_a_media_failure_blames_only_the_sender() -> None:
    bench = at("fetching")
    bench.feed(Subscribed(B), Granted(B), Subscribed(C))
    error = failure("media_mismatch", retryable=False)
    effects = bench.feed(MediaFailed(NEAR, error))
    assert effects == [DropMedia(), TellFailed(A, error), TellFailed(C, error), FetchMedia(FAR)]
    assert bench.state == Fetching((Wish(B, True),), FAR)


def test_a_media_failure_of_a_former_sender_is_ignored() -> None:
    assert at("fetching").ignores(MediaFailed(FAR, failure()))


def test_media_without_progress_fail_only_their_sender() -> None:
    bench = at("fetching")
    assert bench.state.deadline_s is None, "not asked for yet: the media budget decides when"
    bench.feed(MediaProgress(), Subscribed(B))
    bench.advance(20.0)
    bench.feed(MediaProgress())
    effects = bench.jump_to_deadline()
    assert bench.now_s == START_S + 20.0 + LIMITS.media_s
    assert [type(effect) for effect in effects] == [DropMedia, TellFailed]
    assert bench.all(TellFailed)[0].error.code == "media_unavailable"
    assert bench.state == Unstarted((Wish(B),))


# -- staging -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["absent", *(name for name in STATES if name != "awaiting-staging")])
def test_a_stray_reservation_is_given_back(state: str) -> None:
    bench = Bench(jobs, LIMITS) if state == "absent" else at(state)
    before = bench.state
    assert bench.feed(StagingReserved(OTHER)) == [MarkWriteEnded(OTHER)]
    assert bench.state == before


def test_an_item_larger_than_a_staging_region_fails_everyone() -> None:
    bench = at("awaiting-staging")
    bench.feed(Subscribed(B))
    error = failure("request_too_large", retryable=False)
    assert bench.feed(StagingRefused(error)) == [DropMedia(), TellFailed(A, error), TellFailed(B, error)]
    assert bench.state == Absent()


# -- forward -----------------------------------------------------------------------------------


def test_a_failed_forward_fails_everyone_and_frees_its_slot() -> None:
    bench = at("running")
    bench.feed(Subscribed(B))
    error = failure()
    assert bench.feed(ForwardEnded(error)) == [
        MarkWriteEnded(STAGED),
        DropMedia(),
        TellFailed(A, error),
        TellFailed(B, error),
    ]
    assert bench.state == Absent()


def test_a_forward_that_is_too_slow_keeps_its_slot_until_the_worker_s_death() -> None:
    bench = at("running")
    effects = bench.jump_to_deadline()
    assert bench.now_s == START_S + LIMITS.forward_s
    assert [type(effect) for effect in effects] == [KillWorker, TellFailed]
    assert bench.count(MarkWriteEnded) == 0
    assert bench.state.deadline_s is None
    assert bench.feed(ForwardEnded(failure())) == [MarkWriteEnded(STAGED), DropMedia()]


def test_who_joins_a_forward_that_is_being_killed_gets_a_new_one() -> None:
    bench = at("running")
    bench.jump_to_deadline()
    bench.feed(Left(A), Subscribed(B), Granted(B))
    assert bench.feed(ForwardEnded(failure())) == [MarkWriteEnded(STAGED), DropMedia(), FetchMedia(FAR)]


def test_a_forward_that_ends_well_while_it_is_being_killed_counts() -> None:
    bench = at("running")
    bench.jump_to_deadline()
    bench.feed(Subscribed(B))
    effects = bench.feed(ForwardEnded(None))
    assert effects == [MarkWritten(STAGED), DropMedia(), TellReady(B, STAGED)]


# -- retention and eviction --------------------------------------------------------------------


def test_a_result_is_kept_for_the_retention_after_the_last_subscriber_has_left() -> None:
    bench = at("done")
    assert bench.state.deadline_s is None
    bench.feed(Left(A))
    bench.advance(5.0)
    bench.feed(Subscribed(B))
    assert bench.state.deadline_s is None, "wanted again"
    bench.feed(Left(B))
    assert bench.jump_to_deadline() == [ReleaseStaged(STAGED)]
    assert bench.now_s == START_S + 5.0 + LIMITS.dedup_retention_s
    assert bench.state == Absent()


def test_a_result_without_subscribers_from_the_start_is_retained_too() -> None:
    bench = at("running")
    bench.feed(Left(A), ForwardEnded(None))
    assert bench.jump_to_deadline() == [ReleaseStaged(STAGED)]


def test_an_evicted_result_runs_again_for_a_granted_subscriber() -> None:
    bench = at("done")
    assert bench.feed(Evicted(STAGED)) == [TellEvicted(A), FetchMedia(NEAR)]


def test_an_evicted_result_waits_for_a_grant_otherwise() -> None:
    bench = at("done")
    bench.feed(Left(A), Subscribed(B))
    assert bench.feed(Evicted(STAGED)) == [TellEvicted(B)]
    assert bench.state == Unstarted((Wish(B),))


@pytest.mark.parametrize("state", STATES)
def test_an_eviction_of_another_result_is_ignored(state: str) -> None:
    assert at(state).ignores(Evicted(OTHER))


# -- random sequences --------------------------------------------------------------------------

PEOPLE = st.sampled_from([A, B, C, subscriber(4, FAR)])
ACTIONS = st.one_of(
    st.builds(Subscribed, PEOPLE),
    st.builds(Granted, PEOPLE),
    st.builds(Left, PEOPLE),
    st.builds(MediaFailed, st.sampled_from([NEAR, FAR]), st.just(failure())),
    st.sampled_from(["media", "media", "staging", "staging", "worker", "worker", "worker", "worker-fails"]),
    st.sampled_from(["timer", "evict", "refuse", MediaProgress()]),
)


class World:
    """Media store, staging pool and worker of one job; checks what they are asked."""

    def __init__(self) -> None:
        self.bench = Bench(jobs, LIMITS)
        self.fetching: SessionId | None = None
        self.media = False
        self.asks = 0
        self.staged = 0
        self.writing: set[LeaseId] = set()
        self.stable: set[LeaseId] = set()
        self.queued: LeaseId | None = None
        self.running: LeaseId | None = None
        self.unqueue = False
        self.told: dict[Subscriber, str] = {}

    def feed(self, event: Event) -> None:
        if isinstance(event, Left):
            self.told.pop(event.subscriber, None)
        for effect in self.bench.feed(event):
            self.note(effect)

    def note(self, effect: Effect) -> None:
        match effect:
            case FetchMedia():
                assert self.fetching is None and not self.media
                self.fetching = effect.sender
            case DropMedia():
                self.fetching, self.media = None, False
            case AskStaging():
                assert self.media
                self.asks += 1
            case QueueForward():
                assert self.queued is None and self.running is None
                assert self.media and effect.staged in self.writing
                self.queued = effect.staged
            case UnqueueForward():
                self.unqueue = True
            case MarkWritten() | MarkWriteEnded():
                assert effect.staged not in (self.queued, self.running), "freed under the worker"
                self.writing.remove(effect.staged)
                if isinstance(effect, MarkWritten):
                    self.stable.add(effect.staged)
            case ReleaseStaged():
                self.stable.remove(effect.staged)
            case TellReady():
                assert effect.staged in self.stable
                assert self.told.get(effect.subscriber) in (None, "evicted")
                self.told[effect.subscriber] = "ready"
            case TellEvicted():
                assert self.told[effect.subscriber] == "ready"
                self.told[effect.subscriber] = "evicted"
            case TellFailed():
                self.told.pop(effect.subscriber, None)
            case _:
                pass

    def act(self, action: Any) -> None:
        match action:
            case Event():
                self.feed(action)
            case "media" if self.fetching is not None:
                self.fetching, self.media = None, True
                self.feed(MediaArrived())
            case "staging" if self.asks:
                self.asks -= 1
                self.staged += 1
                self.writing.add(LeaseId(self.staged))
                self.feed(StagingReserved(LeaseId(self.staged)))
            case "refuse" if self.asks:
                self.asks -= 1
                self.feed(StagingRefused(failure()))
            case "worker" | "worker-fails":
                self.work(failure() if action == "worker-fails" else None)
            case "timer" if self.bench.state.deadline_s is not None:
                self.bench.now_s = self.bench.state.deadline_s
                self.feed(TimerExpired())
            case "evict" if self.stable:
                staged = min(self.stable)
                self.stable.remove(staged)
                self.feed(Evicted(staged))

    def work(self, error: Any) -> None:
        if self.running is not None:
            self.running = None
            self.feed(ForwardEnded(error))
        elif self.queued is not None and self.unqueue and error is None:
            self.queued, self.unqueue = None, False
            self.feed(ForwardUnqueued())
        elif self.queued is not None:
            self.queued, self.running, self.unqueue = None, self.queued, False
            self.feed(ForwardStarted())


@given(st.lists(ACTIONS, max_size=60))
def test_whatever_happens_a_job_ends_and_holds_nothing(script: list[Any]) -> None:
    world = World()
    for action in script:
        world.act(action)
    for person in [A, B, C, subscriber(4, FAR)]:
        world.act(Left(person))
    for _ in range(3):
        for action in ("staging", "staging", "worker", "worker", "staging", "timer"):
            world.act(action)
    assert world.bench.state == Absent()
    assert not world.writing and not world.stable and not world.media
    assert world.fetching is None and world.running is None and world.queued is None


def test_the_table_knows_every_state() -> None:
    states = {state for state, _ in jobs.TRANSITIONS}
    assert states == {Absent, Unstarted, Fetching, AwaitingStaging, Queued, Running, Done}
