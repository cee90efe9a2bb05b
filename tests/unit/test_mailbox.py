import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from typing import Any, NamedTuple, TypeVarTuple, Unpack

import pytest
import uvloop

from epd.protocol.errors import Busy, TimedOut
from epd.runtime.mailbox import Mailbox, MailboxClosed, Reply, ask
from epd.runtime.timers import Timers
from epd.testing.virtual_clock import VirtualClock

Ts = TypeVarTuple("Ts")
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


class Question(NamedTuple):
    text: str
    reply: Reply[int]


async def turns(count: int = 3) -> None:
    """Let whatever is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_messages_come_in_their_order_as_one_batch(run: Run) -> None:
    async def main() -> None:
        box: Mailbox[int] = Mailbox("node/actor", 10)
        for n in range(5):
            box.tell(n)
        assert len(box) == 5
        assert await box.receive() == [0, 1, 2, 3, 4]
        assert len(box) == 0

    run(main())


def test_a_waiting_reader_is_woken(run: Run) -> None:
    async def main() -> None:
        box: Mailbox[int] = Mailbox("node/actor", 10)
        reading = asyncio.create_task(box.receive())
        await turns()
        box.tell(1)
        box.tell(2)
        assert await reading == [1, 2]

    run(main())


def test_a_full_mailbox_refuses_with_busy_and_takes_again_when_read(run: Run) -> None:
    async def main() -> None:
        box: Mailbox[int] = Mailbox("node/actor", 2)
        box.tell(1)
        box.tell_threadsafe(2)
        with pytest.raises(Busy, match="node/actor holds 2 messages") as caught:
            box.tell(3)
        assert caught.value.facts == {"address": "node/actor", "bound": 2}
        with pytest.raises(Busy):
            box.tell_threadsafe(3)
        assert await box.receive() == [1, 2]
        box.tell(3)

    run(main())


def test_an_actor_that_tells_itself_leaves_the_loop_its_turns(run: Run) -> None:
    async def main() -> None:
        box: Mailbox[int] = Mailbox("node/actor", 10)
        others = 0

        async def other() -> None:
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for n in range(100):
            box.tell(n)
            await box.receive()
        task.cancel()
        assert others >= 99

    run(main())


@pytest.mark.parametrize("told_first", [True, False])
def test_a_cancelled_receive_loses_nothing(run: Run, told_first: bool) -> None:
    async def main() -> None:
        box: Mailbox[int] = Mailbox("node/actor", 10)
        if told_first:
            box.tell(1)
        reading = asyncio.create_task(box.receive())
        await asyncio.sleep(0)
        if not told_first:
            box.tell(1)  # the wake-up is on its way when the reader is cancelled
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await box.receive() == [1]

    run(main())


def test_two_readers_are_a_bug(run: Run) -> None:
    async def main() -> None:
        box: Mailbox[int] = Mailbox("node/actor", 10)
        first = asyncio.create_task(box.receive())
        await turns()
        with pytest.raises(RuntimeError, match="node/actor has a reader already"):
            await box.receive()
        box.tell(1)
        assert await first == [1]

    run(main())


def test_a_closed_mailbox_gives_what_it_has_then_nothing_and_counts_what_is_told(run: Run) -> None:
    async def main() -> None:
        box: Mailbox[int] = Mailbox("node/actor", 10)
        box.tell(1)
        box.tell_threadsafe(2)
        box.close()
        box.tell(3)
        box.tell_threadsafe(4)
        assert await box.receive() == [1, 2]
        assert await box.receive() == []
        assert box.dropped == 2

    run(main())


def test_closing_wakes_the_reader(run: Run) -> None:
    async def main() -> None:
        box: Mailbox[int] = Mailbox("node/actor", 10)
        reading = asyncio.create_task(box.receive())
        await turns()
        box.close()
        assert await reading == []

    run(main())


def test_closing_does_not_lose_what_a_thread_told_just_before(run: Run) -> None:
    async def main() -> None:
        box: Mailbox[int] = Mailbox("node/actor", 10)
        reading = asyncio.create_task(box.receive())
        await turns()
        box.tell_threadsafe(1)
        box.close()
        assert await reading == [1]
        assert await box.receive() == []

    run(main())


def test_threads_tell_without_loss_and_in_their_own_order(run: Run) -> None:
    async def main() -> None:
        box: Mailbox[tuple[int, int]] = Mailbox("node/actor", 10_000)

        def tell_all(thread: int) -> None:
            for n in range(500):
                box.tell_threadsafe((thread, n))

        threads = [threading.Thread(target=tell_all, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        got: list[tuple[int, int]] = []
        while len(got) < 2000:
            got += await box.receive()
        for thread in threads:
            thread.join()
        for t in range(4):
            assert [n for thread_number, n in got if thread_number == t] == list(range(500))
        assert len(box) == 0

    run(main())


def test_a_burst_from_a_thread_wakes_the_loop_once() -> None:
    class CountingLoop(asyncio.SelectorEventLoop):
        wakes = 0

        def call_soon_threadsafe(
            self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
        ) -> asyncio.Handle:
            self.wakes += 1
            return super().call_soon_threadsafe(callback, *args, context=context)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        box: Mailbox[int] = Mailbox("node/actor", 1000)
        reading = asyncio.create_task(box.receive())
        await turns()

        def burst() -> None:
            for n in range(100):
                box.tell_threadsafe(n)

        for _ in range(2):
            thread = threading.Thread(target=burst)
            thread.start()
            thread.join()  # the loop is held up meanwhile, as by a long handler
            assert await reading == list(range(100))
            reading = asyncio.create_task(box.receive())
            await turns()
        assert loop.wakes == 2
        box.close()
        await reading

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(main())


def test_what_threads_told_before_the_first_receive_is_not_lost(run: Run) -> None:
    box: Mailbox[int] = Mailbox("node/actor", 10)
    box.tell_threadsafe(1)

    async def main() -> None:
        assert await box.receive() == [1]

    run(main())


def test_a_thread_that_tells_after_the_loop_has_ended_is_counted_not_failed(run: Run) -> None:
    box: Mailbox[int] = Mailbox("node/actor", 10)
    loop = asyncio.new_event_loop()
    box.tell(0)
    loop.run_until_complete(box.receive())
    loop.close()
    box.tell_threadsafe(1)
    assert box.dropped == 1
    assert len(box) == 0


class Asking:
    """A mailbox with timers on a virtual clock, and an ask that runs."""

    def __init__(self, bound: int = 10) -> None:
        self.clock = VirtualClock()
        self.timers = Timers(self.clock, self.clock.call_at)
        self.box: Mailbox[Question] = Mailbox("node/actor", bound)

    def ask(self) -> "asyncio.Task[int]":
        return asyncio.create_task(self._ask())

    async def _ask(self) -> int:
        return await ask(self.box, lambda reply: Question("how many", reply), 5.0, self.timers)

    def assert_nothing_left(self) -> None:
        assert self.box.open_asks == 0
        assert len(self.timers) == 0


def test_an_ask_gets_its_reply_and_leaves_nothing(run: Run) -> None:
    async def main() -> None:
        asking = Asking()
        tasks = [asking.ask(), asking.ask()]
        await turns()
        assert asking.box.open_asks == 2
        for n, question in enumerate(await asking.box.receive()):
            question.reply.send(n)
        assert [await task for task in tasks] == [0, 1]
        asking.assert_nothing_left()

    run(main())


def test_an_ask_without_reply_times_out_and_the_late_reply_is_counted(run: Run) -> None:
    async def main() -> None:
        asking = Asking()
        task = asking.ask()
        await turns()
        [question] = await asking.box.receive()
        asking.clock.advance(4.9)
        await turns()
        assert not task.done()
        asking.clock.advance(0.1)
        with pytest.raises(TimedOut, match=r"no reply from node/actor within 5\.0 s") as caught:
            await task
        assert caught.value.facts["phase"] == "ask"
        asking.assert_nothing_left()
        question.reply.send(1)
        assert asking.box.late_replies == 1

    run(main())


def test_a_second_reply_is_counted_and_changes_nothing(run: Run) -> None:
    async def main() -> None:
        asking = Asking()
        task = asking.ask()
        await turns()
        [question] = await asking.box.receive()
        question.reply.send(1)
        question.reply.send(2)
        assert await task == 1
        assert asking.box.late_replies == 1

    run(main())


def test_an_ask_fails_with_the_error_it_is_answered(run: Run) -> None:
    async def main() -> None:
        asking = Asking()
        task = asking.ask()
        await turns()
        [question] = await asking.box.receive()
        question.reply.fail(ValueError("odd"))
        with pytest.raises(ValueError, match="odd"):
            await task
        asking.assert_nothing_left()

    run(main())


def test_a_cancelled_ask_leaves_nothing(run: Run) -> None:
    async def main() -> None:
        asking = Asking()
        task = asking.ask()
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        asking.assert_nothing_left()

    run(main())


def test_an_ask_of_a_full_or_closed_mailbox_fails_at_once_and_leaves_nothing(run: Run) -> None:
    async def main() -> None:
        asking = Asking(bound=0)
        with pytest.raises(Busy):
            await asking.ask()
        asking.assert_nothing_left()
        asking.box.close()
        with pytest.raises(MailboxClosed):
            await asking.ask()
        asking.assert_nothing_left()

    run(main())


def test_closing_fails_open_asks_at_once(run: Run) -> None:
    async def main() -> None:
        asking = Asking()
        task = asking.ask()
        await turns()
        asking.box.close()
        with pytest.raises(MailboxClosed, match="node/actor is closed"):
            await task
        asking.assert_nothing_left()

    run(main())
