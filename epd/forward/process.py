"""The forward worker as a process of its own: its node's side.

No thread and no child watcher in the node: the loop reads the worker's socket and its pidfd. The
worker is gone when its pidfd is readable and it has been waited for; only then may the memory it
wrote to be used again, and only then `worker_died` is reported.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from epd.encoders.media import DEFAULT_RULES, PictureRules
from epd.forward import messages as m
from epd.forward.base import ForwardItem, ForwardWorker, ItemResult, WorkerEvents
from epd.memory.region import Region
from epd.protocol.errors import ConfigError, ForwardFailed
from epd.protocol.wire import MAX_ITEMS_PER_PART

FIRST_BACKOFF_S: Final = 0.1
LAST_BACKOFF_S: Final = 5.0
CLOSE_WAIT_S: Final = 1.0
"""How long an idle worker may take to end by itself at `stop`."""
KILL_WAIT_S: Final = 5.0
"""How long the kernel may take to tear a killed worker's memory down."""


def backoff_s(failures: int) -> float:
    """Seconds until the next start after this many deaths (from 1) without a batch between them."""
    return float(min(FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 10), LAST_BACKOFF_S))


class _Running(NamedTuple):
    """One worker process and what the node holds of it."""

    process: subprocess.Popen[bytes]
    pidfd: int
    channel: socket.socket


class ProcessWorker:
    """A `ForwardWorker` in a process; see `ForwardWorker` for what each method promises.

    `num_threads` is set in the worker, whatever the node's own setting. `batch_items` is how many
    items one forward takes: 1 keeps rows bit-equal to those of an item encoded alone.
    """

    def __init__(
        self,
        encoder_spec: str,
        num_threads: int,
        batch_items: int = 1,
        pictures: PictureRules = DEFAULT_RULES,
    ) -> None:
        if num_threads < 1 or batch_items < 1:
            raise ConfigError(f"num_threads {num_threads}, batch_items {batch_items}: at least 1 is needed")
        self._encoder_spec = encoder_spec
        self._num_threads = num_threads
        self._batch_items = batch_items
        self._pictures = pictures
        self._regions: tuple[m.RegionFd, ...] = ()
        self._events: WorkerEvents
        self._loop: asyncio.AbstractEventLoop
        self._running: _Running | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._ready = self._was_ready = self._cannot_load = False
        self._batch: int | None = None
        self._load_error = ""
        self._failures = 0
        self._stopped = False

    @property
    def pid(self) -> int | None:
        return self._running.process.pid if self._running else None

    def start(self, regions: Sequence[Region], events: WorkerEvents) -> None:
        """See `ForwardWorker`. Raises `ConfigError` if a region has no memfd for the worker to map."""
        self._loop = asyncio.get_running_loop()
        self._events = events
        self._regions = tuple(_region_fd(region) for region in regions)
        self._spawn()

    def submit(self, batch: int, items: Sequence[ForwardItem], *, digest: bool) -> None:
        """See `ForwardWorker`. A worker that died a moment ago takes the batch along: its death,
        which the caller has yet to read, answers it."""
        if self._batch is not None:
            raise RuntimeError(f"batch {batch} submitted while {self._batch} runs")
        if len(items) > MAX_ITEMS_PER_PART:
            raise ValueError(f"{len(items)} items, a batch has {MAX_ITEMS_PER_PART} at most")
        if self._running is None or not self._ready:
            return
        self._batch = batch
        message = m.encode(m.Batch(batch, _tasks(items), digest))
        try:
            media_fd = _media_memfd([item.media for item in items])
        except OSError as error:  # no memory or no descriptor is left: a matter of this batch only
            failed = ItemResult(ForwardFailed(f"no memfd for the media: {error}").as_value(), None)
            self._loop.call_soon(self._end_unsent, batch, [failed] * len(items))
            return
        try:
            socket.send_fds(self._running.channel, [message], [media_fd])
        except OSError:
            # Dead (EPIPE, ECONNRESET), or it no longer reads, though it has at most this one message
            # to read: either way its death is the answer.
            self.kill()
        finally:
            os.close(media_fd)

    def kill(self) -> None:
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):  # dead already, not yet waited for
                signal.pidfd_send_signal(self._running.pidfd, signal.SIGKILL)

    def stop(self) -> None:
        """See `ForwardWorker`. An idle worker is told by its closed socket, a busy one is killed.

        Raises `ForwardFailed` if it is still there after `KILL_WAIT_S`: it may still write.
        """
        self._stopped = True
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        running = self._running
        if running is None:
            return
        if not self._ready or self._batch is not None:
            self.kill()
        self._release(running)
        try:
            running.process.wait(CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            running.process.kill()
            try:
                running.process.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:
                raise ForwardFailed(
                    f"worker {running.process.pid} is alive {KILL_WAIT_S} s after SIGKILL"
                ) from None

    # -- life --------------------------------------------------------------------------------

    def _spawn(self) -> None:
        self._restart = None
        self._load_error = ""
        try:
            self._running = self._start_process()
        except OSError as error:
            self._end(f"cannot be started: {error}")
            return
        running = self._running
        start = m.Start(
            self._encoder_spec, self._num_threads, self._batch_items, self._regions, self._pictures
        )
        with contextlib.suppress(ConnectionError):  # dead already: its pidfd says so
            running.channel.send(m.encode(start))
        self._loop.add_reader(running.channel.fileno(), self._read)
        self._loop.add_reader(running.pidfd, self._on_death)

    def _start_process(self) -> _Running:
        with contextlib.ExitStack() as always, contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            always.callback(theirs.close)
            # Our own pidfd is opened here, not by number in the worker: no start-up race, no reused pid.
            node_pidfd = os.pidfd_open(os.getpid())
            always.callback(os.close, node_pidfd)
            process = subprocess.Popen(
                # -P: the working directory is no import path of its own
                [sys.executable, "-P", "-m", "epd.forward.worker", str(theirs.fileno()), str(node_pidfd)],
                pass_fds=(theirs.fileno(), node_pidfd, *(region.fd for region in self._regions)),
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout is the command's: a model's chatter goes to stderr
                cwd=_working_directory(),
                env=self._environment(),
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            pidfd = os.pidfd_open(process.pid)
            undo.pop_all()
        ours.setblocking(False)
        return _Running(process, pidfd, ours)

    def _environment(self) -> dict[str, str]:
        """Of the node, with the node's import path and the worker's own number of threads."""
        threads = str(self._num_threads)
        here = _working_directory() or os.getcwd()
        path = os.pathsep.join(entry or here for entry in sys.path)
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def _on_death(self) -> None:
        running = self._running
        assert running is not None, "its descriptors are read only while it runs"
        self._read()  # what it said before it died is true: a finished batch has ended
        if self._running is not running:  # a callback has stopped us
            return
        status = running.process.wait()  # returns at once: the pidfd is readable
        self._release(running)
        self._end(self._load_error or _describe_status(status))

    def _release(self, running: _Running) -> None:
        """Close what the node holds of a worker; it is dead, or no event of it is wanted any more."""
        self._running = None
        self._ready = False
        self._batch = None
        self._loop.remove_reader(running.channel.fileno())
        self._loop.remove_reader(running.pidfd)
        running.channel.close()
        os.close(running.pidfd)

    def _end(self, reason: str) -> None:
        self._failures += 1
        if self._cannot_load and not self._was_ready:
            self._events.worker_lost(reason)  # at start; later ones may fail for want of memory, for a while
            return
        self._events.worker_died(reason)
        if not self._stopped:
            self._restart = self._loop.call_later(backoff_s(self._failures), self._spawn)

    def _end_unsent(self, batch: int, results: Sequence[ItemResult]) -> None:
        if self._batch == batch:  # no death or stop has come first
            self._batch = None
            self._events.batch_ended(batch, results)

    # -- messages ----------------------------------------------------------------------------

    def _read(self) -> None:
        running = self._running
        while running is not None and self._running is running:
            try:
                data = running.channel.recv(m.MESSAGE_NBYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                # Its end is closed and would be readable for ever; the pidfd tells the rest.
                self._loop.remove_reader(running.channel.fileno())
                self.kill()
                return
            try:
                self._receive(m.decode_from_worker(data))
            except msgspec.MsgspecError as error:  # a model has written over its own process
                self._load_error = f"unreadable message: {error}"
                self.kill()
                return

    def _receive(self, message: m.Ready | m.LoadFailed | m.BatchEnded) -> None:
        match message:
            case m.Ready():
                self._ready = self._was_ready = True
                self._events.worker_ready()
            case m.LoadFailed():
                self._cannot_load = True
                self._load_error = f"{self._encoder_spec} cannot be loaded: {message.reason}"
            case m.BatchEnded():
                if message.batch != self._batch:
                    self._load_error = f"answered batch {message.batch}, not {self._batch}"
                    self.kill()
                    return
                self._batch = None
                self._failures = 0
                results = [ItemResult(answer.error, answer.digest) for answer in message.answers]
                self._events.batch_ended(message.batch, results)


def _working_directory() -> str | None:
    """The node's own (None), or the root where that was removed: no interpreter starts in what is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def _region_fd(region: Region) -> m.RegionFd:
    if region.fd is None:
        raise ConfigError(f"staging region {region.region} has no memfd for the forward worker to map")
    return m.RegionFd(region.region, region.fd, region.nbytes)


def _tasks(items: Sequence[ForwardItem]) -> tuple[m.ItemTask, ...]:
    tasks = []
    media_offset = 0
    for item in items:
        nbytes = len(item.media)
        tasks.append(
            m.ItemTask(item.probe, item.dtype, item.spec, media_offset, nbytes, int(item.region), item.offset)
        )
        media_offset += nbytes
    return tuple(tasks)


def _media_memfd(media: Sequence[memoryview | bytes]) -> int:
    """A memfd that holds all media, one after another; the caller closes it."""
    fd = os.memfd_create("epd-media", os.MFD_CLOEXEC)
    try:
        for data in media:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
    except OSError:
        os.close(fd)
        raise
    return fd


def _describe_status(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "an unknown signal"
    return f"killed by {name} ({-status})"


_checked: Callable[[str, int, int], ForwardWorker] = ProcessWorker

__all__ = ["ForwardItem", "ForwardWorker", "ItemResult", "ProcessWorker", "WorkerEvents", "backoff_s"]
