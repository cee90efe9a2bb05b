import asyncio
from collections.abc import Callable
from functools import partial

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from epd.runtime.clock import MonotonicClock
from epd.runtime.timers import TimerHandle, Timers
from epd.testing.virtual_clock import VirtualCall, VirtualClock


def _fail() -> None:
    raise ValueError("on purpose")


class CountingClock(VirtualClock):
    """Counts how often the loop is asked for a callback."""

    armed = 0

    def call_at(self, when_s: float, callback: Callable[[], None]) -> VirtualCall:
        self.armed += 1
        return super().call_at(when_s, callback)


@pytest.fixture
def clock() -> CountingClock:
    return CountingClock()


@pytest.fixture
def timers(clock: CountingClock) -> Timers:
    return Timers(clock, clock.call_at)


def test_timers_fire_in_the_order_of_their_deadlines_at_their_time(
    clock: CountingClock, timers: Timers
) -> None:
    fired: list[tuple[str, float]] = []

    def note(name: str) -> None:
        fired.append((name, clock.now_s()))

    for name, delay_s in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("b2", 2.0)):
        timers.at(1000.0 + delay_s, partial(note, name))
    clock.advance(2.5)
    assert fired == [("a", 1001.0), ("b", 1002.0), ("b2", 1002.0)]
    assert len(timers) == 1
    clock.advance(1.0)
    assert fired[-1] == ("c", 1003.0)
    assert len(timers) == 0
    assert clock.next_call_s() is None


def test_a_cancelled_timer_never_fires_and_is_no_longer_counted(clock: CountingClock, timers: Timers) -> None:
    fired: list[str] = []
    first = timers.at(1001.0, lambda: fired.append("first"))
    timers.at(1002.0, lambda: fired.append("second"))
    first.cancel()
    first.cancel()
    assert len(timers) == 1
    clock.advance(5.0)
    assert fired == ["second"]
    first.cancel()
    assert len(timers) == 0


def test_a_timer_may_cancel_another_that_is_due_at_the_same_time(
    clock: CountingClock, timers: Timers
) -> None:
    fired: list[str] = []
    handles: list[TimerHandle] = []

    def cancel_the_other() -> None:
        handles[0].cancel()

    timers.at(1001.0, cancel_the_other)
    handles.append(timers.at(1001.0, lambda: fired.append("cancelled")))
    clock.advance(2.0)
    assert fired == []
    assert len(timers) == 0


def test_a_deadline_in_the_past_fires_in_the_next_turn_not_inside_at(
    clock: CountingClock, timers: Timers
) -> None:
    fired: list[str] = []
    timers.at(1.0, lambda: fired.append("late"))
    assert fired == []
    clock.advance(0.0)
    assert fired == ["late"]


def test_a_timer_that_arms_itself_in_the_past_leaves_the_loop_its_turn(
    clock: CountingClock, timers: Timers
) -> None:
    """Otherwise one machine with a passed deadline starves every socket."""
    turns: list[int] = []

    def again() -> None:
        turns.append(clock.armed)
        if len(turns) < 3:
            timers.at(1.0, again)

    timers.at(1.0, again)
    clock.advance(0.0)
    assert len(set(turns)) == 3


def test_pushing_a_deadline_back_again_and_again_costs_no_loop_callback(
    clock: CountingClock, timers: Timers
) -> None:
    handle = timers.at(1001.0, lambda: None)
    for n in range(10_000):
        replacement = timers.at(1002.0 + n, lambda: None)
        handle.cancel()
        handle = replacement
    assert clock.armed == 1
    assert len(timers) == 1
    assert len(timers._heap) < 200


def test_the_last_cancel_leaves_nothing_in_the_loop(clock: CountingClock, timers: Timers) -> None:
    timers.at(1001.0, lambda: None).cancel()
    assert clock.next_call_s() is None
    timers.at(1001.0, lambda: None)
    timers.close()
    assert len(timers) == 0
    assert clock.next_call_s() is None


def test_a_timer_that_raises_goes_to_on_error_and_loses_no_other(clock: CountingClock) -> None:
    errors: list[Exception] = []
    timers = Timers(clock, clock.call_at, errors.append)
    fired: list[str] = []
    timers.at(1001.0, _fail)
    timers.at(1001.0, lambda: fired.append("same"))
    timers.at(1002.0, lambda: fired.append("later"))
    clock.advance(5.0)
    assert [type(error) for error in errors] == [ValueError]
    assert fired == ["same", "later"]


def test_without_on_error_a_raise_reaches_the_loop_and_the_rest_still_fires(
    clock: CountingClock, timers: Timers
) -> None:
    fired: list[str] = []
    timers.at(1001.0, _fail)
    timers.at(1001.0, lambda: fired.append("same"))
    with pytest.raises(ValueError):
        clock.advance(1.0)
    clock.advance(0.0)
    assert fired == ["same"]


def test_a_loop_that_calls_a_little_early_does_not_fire_early_nor_spin(clock: CountingClock) -> None:
    """uvloop rounds to milliseconds."""
    timers = Timers(clock, lambda when_s, callback: clock.call_at(when_s - 0.0005, callback))
    fired: list[float] = []
    timers.at(1001.0, lambda: fired.append(clock.now_s()))
    clock.advance(2.0)
    assert len(fired) == 1
    assert 1001.0 <= fired[0] < 1001.002
    assert clock.armed <= 3


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("at"), st.integers(0, 20)),
            st.tuples(st.just("cancel"), st.integers(0, 50)),
            st.tuples(st.just("advance"), st.integers(0, 5)),
        ),
        max_size=60,
    )
)
def test_every_timer_fires_exactly_once_at_its_time_unless_cancelled(actions: list[tuple[str, int]]) -> None:
    clock = VirtualClock(0.0)
    timers = Timers(clock, clock.call_at)
    handles: list[TimerHandle] = []
    due: dict[int, float] = {}
    fired: dict[int, float] = {}

    def note(number: int) -> None:
        assert number not in fired
        fired[number] = clock.now_s()

    for action, value in actions:
        if action == "at":
            number, deadline_s = len(handles), clock.now_s() + value
            due[number] = deadline_s
            handles.append(timers.at(deadline_s, partial(note, number)))
        elif action == "advance":
            clock.advance(value)
        elif value < len(handles):
            handles[value].cancel()
            if value not in fired:
                due.pop(value, None)
        assert len(timers) == len(due) - len(fired)
    clock.advance(100.0)
    assert fired == due
    assert len(timers) == 0


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_timers_run_on_a_real_loop_and_never_early(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    clock = MonotonicClock()

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        timers = Timers(clock, loop.call_at)
        over = loop.create_future()
        early_by_s: list[float] = []

        def note(deadline_s: float) -> None:
            early_by_s.append(deadline_s - clock.now_s())

        start_s = clock.now_s()
        for delay_s in (0.0107, 0.0013, 0.0051):
            timers.at(start_s + delay_s, partial(note, start_s + delay_s))
        timers.at(start_s + 0.012, lambda: over.set_result(None))
        await over
        return early_by_s

    with asyncio.Runner(loop_factory=new_loop) as runner:
        early_by_s = runner.run(main())
    assert len(early_by_s) == 3
    assert max(early_by_s) <= 0.0
