"""Mailboxes: bounded queues with an address, read in batches by one task.

A tell from the same loop is a direct hand-over: no task, no socket and no future per message.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from epd.protocol.errors import Busy, EpdError, TimedOut
from epd.runtime.timers import Timers

T = TypeVar("T")
R = TypeVar("R")
M_contra = TypeVar("M_contra", contravariant=True)


class MailboxClosed(EpdError):
    """Its reader has stopped, so nobody will answer; `address` names it."""

    code = "mailbox_closed"
    retryable = True


class Ref(Protocol[M_contra]):
    """Somewhere to tell messages of these types: another actor's mailbox, seen from outside."""

    def tell(self, message: M_contra) -> None: ...


class Mailbox(Generic[T]):
    """A queue of at most `bound` messages at `NODE/ACTOR`.

    All but `tell_threadsafe` is for the reader's loop only; that loop is known from the first
    `receive`. `dropped` counts messages told after `close`, `late_replies` replies that nobody
    waited for any more.
    """

    def __init__(self, address: str, bound: int) -> None:
        self.address = address
        self.bound = bound
        self.dropped = 0
        self.late_replies = 0
        self._inbox: list[T] = []
        self._reading = False
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._asks: dict[int, asyncio.Future[object]] = {}
        self._next_ask = 0
        # What other threads told; with the two below it guards, until the loop takes it over.
        self._lock = threading.Lock()
        self._foreign: list[T] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_scheduled = False

    def __len__(self) -> int:
        """Messages that wait to be received."""
        return len(self._inbox) + len(self._foreign)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def open_asks(self) -> int:
        """Asks that wait for their reply."""
        return len(self._asks)

    def tell(self, message: T) -> None:
        """Queue a message, from the reader's own loop. Raises `Busy` when the mailbox is full.

        A message to a closed mailbox is counted and dropped: its reader has ended, and a node that
        stops must not fail for it.
        """
        if self._closed:
            self.dropped += 1
            return
        if len(self._inbox) + len(self._foreign) >= self.bound:
            raise self._busy()
        self._inbox.append(message)
        self._wake()

    def tell_threadsafe(self, message: T) -> None:
        """Queue a message from another thread; messages of one thread stay in their order.

        Wakes the loop once for all that comes before it looks. Raises `Busy` when the mailbox is
        full (a tell at the same moment may take it one message over).
        """
        with self._lock:
            if self._closed:
                self.dropped += 1
                return
            if len(self._inbox) + len(self._foreign) >= self.bound:
                raise self._busy()
            self._foreign.append(message)
            if self._loop is None or self._wake_scheduled:
                return
            try:
                self._loop.call_soon_threadsafe(self._take_foreign)
                self._wake_scheduled = True
            except RuntimeError:  # the loop is closed, and the reader with it
                self.dropped += len(self._foreign)
                self._foreign.clear()

    async def receive(self) -> list[T]:
        """All messages there are, at least one; an empty list once it is closed and empty.

        Loses nothing when cancelled. Gives other tasks a turn even if messages are there already.
        Raises `RuntimeError` if another task is receiving.
        """
        if self._reading:
            raise RuntimeError(f"{self.address} has a reader already")
        self._reading = True
        try:
            with self._lock:
                self._loop = asyncio.get_running_loop()
                self._take_foreign_locked()
            if self._inbox:
                await asyncio.sleep(0)
            while not self._inbox:
                if self._closed:
                    return []
                self._waiter = self._loop.create_future()
                await self._waiter
        finally:
            self._waiter = None
            self._reading = False
        batch, self._inbox = self._inbox, []
        return batch

    def close(self) -> None:
        """Take no more; what is there can still be received. Open asks fail with `MailboxClosed`."""
        with self._lock:
            self._closed = True
        self._wake()
        for future in self._asks.values():
            if not future.done():
                future.set_exception(self._closed_error())

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take_foreign(self) -> None:
        with self._lock:
            self._wake_scheduled = False
            self._take_foreign_locked()
        if self._inbox:
            self._wake()

    def _take_foreign_locked(self) -> None:
        if self._foreign:
            self._inbox.extend(self._foreign)
            self._foreign.clear()

    def _settle(self, number: int, set_on: Callable[[asyncio.Future[object]], None]) -> None:
        future = self._asks.get(number)
        if future is None or future.done():
            self.late_replies += 1
        else:
            set_on(future)

    def _busy(self) -> Busy:
        return Busy(
            f"{self.address} holds {self.bound} messages, its bound",
            address=self.address,
            bound=self.bound,
        )

    def _closed_error(self) -> MailboxClosed:
        return MailboxClosed(f"{self.address} is closed", address=self.address)


class Reply(Generic[R]):
    """Travels inside the message of an ask; the asked actor answers through it, once."""

    __slots__ = ("_mailbox", "_number")

    def __init__(self, mailbox: "Mailbox[T]", number: int) -> None:
        self._mailbox: Mailbox[T] = mailbox
        self._number = number

    def send(self, value: R) -> None:
        """Answer; counted, nothing more, if nobody waits any longer."""
        self._mailbox._settle(self._number, lambda future: future.set_result(value))

    def fail(self, error: Exception) -> None:
        """Answer with an error, which the asker's `ask` raises."""
        self._mailbox._settle(self._number, lambda future: future.set_exception(error))


async def ask(
    mailbox: Mailbox[T], make_message: Callable[[Reply[R]], T], timeout_s: float, timers: Timers
) -> R:
    """Tell `make_message(reply)` and wait for what the asked actor sends through `reply`.

    From the mailbox's own loop. Nothing of the ask stays behind on any path. Raises `TimedOut`
    (`phase` is `ask`) after `timeout_s`, `Busy` if the mailbox is full, `MailboxClosed` if it is or
    becomes closed, and what `reply.fail` was given.
    """
    if mailbox.closed:
        raise mailbox._closed_error()
    number = mailbox._next_ask
    mailbox._next_ask += 1
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def time_out() -> None:
        if not future.done():
            message = f"no reply from {mailbox.address} within {timeout_s} s"
            future.set_exception(TimedOut(message, phase="ask", address=mailbox.address))

    mailbox._asks[number] = future
    timer = timers.after(timeout_s, time_out)
    try:
        mailbox.tell(make_message(Reply(mailbox, number)))
        return await future  # type: ignore[return-value]  # only this ask's Reply[R] settles it
    finally:
        timer.cancel()
        del mailbox._asks[number]
