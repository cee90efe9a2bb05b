"""Runs the actors of one incarnation, and ends it when one of them fails.

Protocol actors are never restarted in place: what they held (grants, leases, pins) is known to
peers, and a fresh actor would have forgotten it. Only stateless workers are.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog

from epd.protocol.errors import EpdError
from epd.runtime.actor import Actor
from epd.runtime.clock import Clock
from epd.runtime.timers import Timers

_log = structlog.get_logger()

Worker = Callable[[], Coroutine[Any, Any, None]]


class IncarnationEnded(EpdError):
    """An actor failed, so the node cannot go on; `actor` names it, the cause is attached."""

    code = "incarnation_ended"


class WorkerFailed(EpdError):
    """A stateless worker failed too often; `worker`, `failures` and `window_s` say how often."""

    code = "worker_failed"


class RestartPolicy:
    """When a worker that failed is started again: with backoff, and not too often (pure).

    Delays double from `first_delay_s` to `max_delay_s`; more than `max_failures` within `window_s`
    escalate. Failures older than the window are forgotten.
    """

    def __init__(
        self,
        first_delay_s: float = 0.1,
        max_delay_s: float = 5.0,
        max_failures: int = 5,
        window_s: float = 60.0,
    ) -> None:
        self.first_delay_s = first_delay_s
        self.max_delay_s = max_delay_s
        self.max_failures = max_failures
        self.window_s = window_s
        self._failed_s: deque[float] = deque()

    @property
    def failures(self) -> int:
        """Failures within the window that ended at the last one."""
        return len(self._failed_s)

    def failed(self, now_s: float) -> float | None:
        """Note a failure; the seconds to wait before the next start, or None: escalate."""
        self._failed_s.append(now_s)
        while self._failed_s[0] < now_s - self.window_s:
            self._failed_s.popleft()
        if len(self._failed_s) > self.max_failures:
            return None
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** (len(self._failed_s) - 1))


async def keep_running(
    name: str, worker: Worker, policy: RestartPolicy, clock: Clock, timers: Timers
) -> None:
    """Run a stateless worker, again after each failure as `policy` says, until it returns.

    Raises `WorkerFailed` when the policy escalates.
    """
    while True:
        try:
            await worker()
            return
        except Exception as error:
            delay_s = policy.failed(clock.now_s())
            if delay_s is None:
                message = f"{name} failed {policy.failures} times within {policy.window_s} s: {error}"
                raise WorkerFailed(
                    message, worker=name, failures=policy.failures, window_s=policy.window_s
                ) from error
            _log.warning("worker failed", worker=name, restart_in_s=delay_s, exc_info=True)
        await _pause(delay_s, timers)


async def _pause(seconds: float, timers: Timers) -> None:
    over = asyncio.get_running_loop().create_future()
    timer = timers.after(seconds, lambda: None if over.done() else over.set_result(None))
    try:
        await over
    finally:
        timer.cancel()


class Supervisor:
    """Owns the tasks of one incarnation.

    The first actor that raises ends all others; its error comes out of `start`'s future as one
    `IncarnationEnded`, and is logged.
    """

    def __init__(self, actors: Sequence[Actor[Any]]) -> None:
        self._actors = actors
        self._workers: list[tuple[str, Worker]] = []
        self._task: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._fatal: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def add_worker(
        self, name: str, worker: Worker, policy: RestartPolicy, clock: Clock, timers: Timers
    ) -> None:
        """Also run a stateless worker; before `start`."""
        self._workers.append((name, lambda: keep_running(name, worker, policy, clock, timers)))

    def start(self) -> asyncio.Future[None]:
        """Start everything; the future is done when all has ended, with an error if one failed."""
        loop = asyncio.get_running_loop()
        self._fatal = loop.create_future()
        if self._error is not None:
            self._fatal.set_result(None)
        self._ended = loop.create_future()
        self._task = loop.create_task(self._run(self._ended, self._fatal), name="supervisor")
        return self._ended

    def fail(self, error: Exception) -> None:
        """End the incarnation for an error met outside any actor, e.g. in a timer (`Timers.on_error`).

        Before `start`, the incarnation ends when it starts. Further errors are only logged.
        """
        over = any(future is not None and future.done() for future in (self._fatal, self._ended))
        if self._error is not None or over:
            _log.error("another error", reason=str(error), exc_info=error)
            return
        self._error = error
        if self._fatal is not None:
            self._fatal.set_result(None)

    async def stop(self) -> None:
        """End all actors between two messages, wait for them, close their mailboxes. Never raises."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        for actor in self._actors:
            actor.mailbox.close()

    async def _raise_fatal(self, fatal: asyncio.Future[None]) -> None:
        await fatal
        assert self._error is not None
        raise self._error

    async def _run(self, ended: asyncio.Future[None], fatal: asyncio.Future[None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(
                    _guard("a callback of the loop", lambda: self._raise_fatal(fatal)), name="watch"
                )
                tasks = [
                    group.create_task(_guard(name, run), name=name)
                    for name, run in (*((a.name, a.run) for a in self._actors), *self._workers)
                ]
                if tasks:
                    await asyncio.wait(tasks)
                watch.cancel()
        except BaseExceptionGroup as failures:
            error = failures.exceptions[0]
            _log.error("incarnation ended", reason=str(error), exc_info=error)
            ended.set_exception(error)
            ended.exception()  # read: it is logged already, should nobody ask for it
        finally:
            if not ended.done():
                ended.set_result(None)


async def _guard(name: str, run: Worker) -> None:
    """Name the actor that failed. A cancellation nobody asked for is a failure as well."""
    try:
        await run()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _ended_by(name, error) from error
    except Exception as error:
        raise _ended_by(name, error) from error


def _ended_by(name: str, error: BaseException) -> IncarnationEnded:
    return IncarnationEnded(f"{name}: {type(error).__name__}: {error}", actor=name)
