import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from epd.runtime.actor import SLOW_HANDLER_S, Actor
from epd.runtime.mailbox import Mailbox
from epd.runtime.supervisor import IncarnationEnded, RestartPolicy, Supervisor, WorkerFailed
from epd.runtime.timers import Timers
from epd.testing.virtual_clock import VirtualClock

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


class Counter(Actor[int]):
    """Divides 10 by what it is told; so zero is its bug."""

    def __init__(self, name: str = "counter", clock: VirtualClock | None = None) -> None:
        super().__init__(name, Mailbox(f"node/{name}", 100), clock)
        self.clock = clock
        self.results: list[float] = []

    def handle(self, message: int) -> None:
        if self.clock is not None:
            self.clock.advance(message / 1000)
        self.results.append(10 / message)


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_an_actor_handles_what_it_has_and_returns_when_its_mailbox_closes(run: Run) -> None:
    async def main() -> None:
        actor = Counter()
        ended = Supervisor([actor]).start()
        actor.mailbox.tell(1)
        actor.mailbox.tell(2)
        actor.mailbox.close()
        await ended
        assert actor.results == [10, 5]

    run(main())


def test_an_actor_that_raises_ends_all_others_with_one_typed_error(run: Run) -> None:
    async def main() -> None:
        actors = [Counter(name) for name in ("first", "second", "third")]
        ended = Supervisor(actors).start()
        actors[1].mailbox.tell(0)
        with capture_logs() as logs, pytest.raises(IncarnationEnded, match="second: Zero") as caught:
            await ended
        assert caught.value.facts["actor"] == "second"
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert all(actor.mailbox.closed for actor in actors)
        assert [log["event"] for log in logs] == ["incarnation ended"]
        assert len(asyncio.all_tasks()) == 1

    run(main())


def test_a_cancellation_nobody_asked_for_is_a_failure_too(run: Run) -> None:
    """Otherwise an actor that awaits something cancelled just disappears."""

    class Awaits(Counter):
        async def run(self) -> None:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    async def main() -> None:
        with pytest.raises(IncarnationEnded, match="awaits: CancelledError"):
            await Supervisor([Awaits("awaits"), Counter()]).start()

    run(main())


def test_an_error_in_a_timer_ends_the_incarnation(run: Run) -> None:
    async def main() -> None:
        clock = VirtualClock()
        timers = Timers(clock, clock.call_at)
        actor = Counter()
        supervisor = Supervisor([actor])
        timers.on_error = supervisor.fail
        ended = supervisor.start()
        await turns()

        def fail() -> None:
            raise OSError("in a timer")

        timers.after(1.0, fail)
        clock.advance(1.0)
        with pytest.raises(IncarnationEnded, match="in a timer"):
            await ended
        with capture_logs() as logs:
            supervisor.fail(OSError("too late"))
        assert [log["event"] for log in logs] == ["another error"]
        assert actor.mailbox.closed

    run(main())


def test_an_error_before_the_start_is_not_lost(run: Run) -> None:
    async def main() -> None:
        supervisor = Supervisor([Counter()])
        supervisor.fail(OSError("early"))
        with pytest.raises(IncarnationEnded, match="early"):
            await supervisor.start()

    run(main())


def test_an_error_after_an_actor_has_failed_changes_nothing(run: Run) -> None:
    async def main() -> None:
        actors = [Counter("first"), Counter("second")]
        supervisor = Supervisor(actors)
        ended = supervisor.start()
        await turns()
        actors[0].mailbox.tell(0)
        while not ended.done():
            await asyncio.sleep(0)
            if actors[0].mailbox.closed:
                supervisor.fail(OSError("another"))
        assert "first" in str(ended.exception())

    run(main())


def test_stop_ends_everything_and_does_not_raise(run: Run) -> None:
    async def main() -> None:
        actors = [Counter(name) for name in ("first", "second")]
        supervisor = Supervisor(actors)
        await supervisor.stop()
        ended = supervisor.start()
        await turns()
        await supervisor.stop()
        assert ended.done()
        assert ended.exception() is None
        assert all(actor.mailbox.closed for actor in actors)
        assert len(asyncio.all_tasks()) == 1

    run(main())


def test_stop_before_the_actors_have_run_leaves_no_coroutine(run: Run) -> None:
    async def main() -> None:
        supervisor = Supervisor([Counter()])
        supervisor.start()
        await supervisor.stop()
        supervisor = Supervisor([Counter()])
        supervisor.start()
        await asyncio.sleep(0)
        await supervisor.stop()

    run(main())


def test_a_slow_handler_is_warned_about_by_name_of_the_message_only(run: Run) -> None:
    async def main() -> None:
        actor = Counter(clock=VirtualClock())
        slow_ms = int(SLOW_HANDLER_S * 1000) + 7
        for message in (1, slow_ms, 2):
            actor.mailbox.tell(message)
        actor.mailbox.close()
        with capture_logs() as logs:
            await actor.run()
        assert logs == [
            {
                "event": "slow handler",
                "log_level": "warning",
                "actor": "counter",
                "message": "int",
                "took_s": 0.057,
            }
        ]
        assert actor.slow_messages == 1

    run(main())


def test_restart_delays_double_up_to_their_maximum_and_then_escalate() -> None:
    policy = RestartPolicy(first_delay_s=0.1, max_delay_s=0.5, max_failures=4, window_s=60.0)
    assert [policy.failed(now_s) for now_s in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.1, 0.2, 0.4, 0.5, None]


def test_failures_outside_the_window_are_forgotten() -> None:
    policy = RestartPolicy(first_delay_s=0.1, max_failures=1, window_s=10.0)
    assert [policy.failed(now_s) for now_s in (0.0, 10.1, 20.2, 25.0)] == [0.1, 0.1, 0.1, None]


def test_a_worker_restarts_after_its_delay_and_escalates_after_too_many(run: Run) -> None:
    async def main() -> None:
        clock = VirtualClock()
        timers = Timers(clock, clock.call_at)
        starts: list[float] = []

        async def worker() -> None:
            starts.append(clock.now_s() - 1000.0)
            raise ValueError(f"start {len(starts)}")

        actor = Counter()
        supervisor = Supervisor([actor])
        supervisor.add_worker("fetch", worker, RestartPolicy(1.0, 5.0, 2), clock, timers)
        ended = supervisor.start()
        await turns()
        for delay_s in (1.0, 2.0):
            before = len(starts)
            clock.advance(delay_s - 0.1)
            await turns()
            assert len(starts) == before
            clock.advance(0.2)
            await turns()
        with pytest.raises(IncarnationEnded, match=r"fetch failed 3 times within 60\.0 s: start 3") as caught:
            await ended
        assert isinstance(caught.value.__cause__, WorkerFailed)
        assert starts == pytest.approx([0.0, 1.1, 3.2])
        assert len(timers) == 0

    run(main())


def test_stopping_during_a_pause_leaves_no_timer(run: Run) -> None:
    async def main() -> None:
        clock = VirtualClock()
        timers = Timers(clock, clock.call_at)

        async def worker() -> None:
            raise ValueError

        supervisor = Supervisor([])
        supervisor.add_worker("fetch", worker, RestartPolicy(), clock, timers)
        supervisor.start()
        await turns()
        assert len(timers) == 1
        await supervisor.stop()
        assert len(timers) == 0

    run(main())


def test_a_worker_that_returns_has_ended(run: Run) -> None:
    async def main() -> None:
        clock = VirtualClock()

        async def worker() -> None:
            return

        supervisor = Supervisor([])
        supervisor.add_worker("once", worker, RestartPolicy(), clock, Timers(clock, clock.call_at))
        await supervisor.start()

    run(main())
