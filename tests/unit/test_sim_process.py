"""A simulated process: turns of a real loop in virtual time, and what signals do to it."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from epd.sim.process import Process, Time


class Bench:
    def __init__(self) -> None:
        self.time = Time()
        self.failures: list[Any] = []
        self.process = Process(self.time, "one", random.Random(3), self._failed)
        self.said: list[str] = []

    def _failed(self, name: str, context: dict[str, Any]) -> None:
        self.failures.append(context["exception"])

    async def tell(self, what: str, after_s: float) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
            async with asyncio.timeout(after_s):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            self.said.append(what)
        finally:
            self.said.append(f"end of {what}")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.process.kill()


def test_time_passes_without_waiting(bench: Bench) -> None:
    began_s = bench.process.now_s()
    bench.process.spawn(bench.tell("late", 3_600.0))
    bench.process.spawn(bench.tell("early", 60.0))
    bench.time.run(3_599.0)
    assert bench.said == ["early", "end of early"]
    bench.time.run(3_700.0)
    assert bench.said[2:] == ["late", "end of late"]
    assert bench.process.now_s() == began_s + 3_700.0
    assert bench.process.loop.pending() == 0


def test_clocks_of_two_processes_have_nothing_to_do_with_each_other() -> None:
    time = Time()
    one, other = (Process(time, name, random.Random(name), lambda *_: None) for name in ("a", "b"))
    assert abs(one.now_s() - other.now_s()) > 1.0
    one.kill()
    other.kill()


def test_what_is_stopped_does_nothing_until_it_goes_on(bench: Bench) -> None:
    bench.process.spawn(bench.tell("word", 1.0))
    bench.time.run(0.5)
    bench.process.stop()
    bench.time.run(10.0)
    assert bench.said == []
    bench.process.go_on()
    bench.time.run(11.0)
    assert bench.said == ["word", "end of word"]


def test_what_is_killed_says_nothing_more_and_leaves_nothing_behind(bench: Bench) -> None:
    closed: list[str] = []
    bench.process.when_killed.append(lambda: closed.append("socket"))
    bench.process.spawn(bench.tell("word", 1.0))
    bench.time.run(0.5)
    bench.process.kill()
    bench.process.kill()
    assert closed == ["socket"]
    assert bench.said == ["end of word"]  # into the void, now and not whenever garbage is collected
    bench.process.loop.call_soon(bench.said.append, "ghost")
    bench.process.go_on()
    bench.time.run(10.0)
    assert bench.said == ["end of word"]
    assert bench.failures == []


def test_what_a_task_or_a_callback_raises_is_told(bench: Bench) -> None:
    async def fail() -> None:
        raise ValueError("a task")

    def raise_it() -> None:
        raise ValueError("a callback")

    bench.process.spawn(fail())
    bench.process.loop.call_soon(raise_it)
    bench.time.run(1.0)
    assert sorted(map(str, bench.failures)) == ["a callback", "a task"]


def test_a_slow_process_takes_longer(bench: Bench) -> None:
    turns: list[float] = []

    def again() -> None:
        turns.append(bench.time.now_s)
        bench.process.loop.call_soon(again)

    bench.process.loop.call_soon(again)
    bench.time.run(0.1)
    quick = len(turns)
    bench.process.slowness = 100.0
    turns.clear()
    bench.time.run(0.2)
    assert len(turns) * 10 < quick


def test_events_of_one_time_come_as_they_were_asked_for() -> None:
    time = Time()
    order: list[int] = []
    for number in range(5):
        time.at(1.0, order.append, number)
    time.at(0.5, order.append, -1)
    time.run(2.0)
    assert order == [-1, 0, 1, 2, 3, 4]
    assert time.now_s == 2.0
