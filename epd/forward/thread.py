"""The forward worker as a thread of its node's process: for a GPU.

Memory of a GPU cannot be handed to another process by a descriptor, and a forward there takes little
of the interpreter. The price: a thread cannot be killed. A forward that takes too long is waited for
a little longer, and then, as after an error that leaves the GPU's context unusable, the worker says
that it is lost, at which its node must end.

Everything of a batch is queued on one stream of the worker's own, and a batch has ended when the
event behind it has: then its results are whole for every reader.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import structlog

from epd.encoders.media import DEFAULT_RULES, PictureRules
from epd.encoders.registry import load_encoder
from epd.forward.base import ForwardItem, ItemResult, WorkerEvents
from epd.forward.batches import BatchRunner, describe, failed
from epd.forward.process import backoff_s
from epd.memory.region import HOST, Region
from epd.memory.tensors import as_tensor, device_digest, new_event, new_stream
from epd.protocol.errors import ForwardFailed

_log = structlog.get_logger()

END_WAIT_S: Final = 10.0
"""How long a forward that was told to end may go on before the worker counts as lost."""
STOP_WAIT_S: Final = 5.0


class Stream:
    """What one worker queues its work on: a CUDA stream, or nothing on the CPU, which queues nothing."""

    def __init__(self, device: str) -> None:
        self._stream: Any = None
        if device != HOST:
            import torch

            torch.cuda.set_device(device)  # of this thread only
            self._stream = new_stream(device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        import torch

        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Until all that was queued has been done. Raises what went wrong there."""
        if self._stream is not None:
            # Blocking, not spinning: the interpreter and the core are the node's meanwhile.
            event = new_event(blocking=True)
            event.record(self._stream)
            event.synchronize()


class TensorStore:
    """Stores results in regions of any one device, queued on the current stream."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = {int(region.region): region for region in regions}

    def __call__(self, result: Any, item: ForwardItem, digest: bool) -> bytes | None:
        import torch

        region, nbytes = self._regions.get(item.region), item.spec.nbytes
        if region is None or item.offset + nbytes > region.nbytes:
            raise ForwardFailed(f"region {item.region} has no {nbytes} B at {item.offset}")
        place = as_tensor(region.part(item.offset, nbytes))
        rows = torch.as_tensor(result).detach()
        if nbytes:
            place.view(rows.dtype).view(rows.shape).copy_(rows, non_blocking=True)
        if not digest:
            return None
        if region.device != HOST:
            return device_digest(place)
        import xxhash

        return xxhash.xxh3_128_digest(place.numpy().data)


class ThreadWorker:
    """A `ForwardWorker` in a thread; see `ForwardWorker` for what each method promises.

    `device` is where the model runs: `cpu` or `cuda:N`.
    """

    pid = None

    def __init__(
        self,
        encoder_spec: str,
        device: str,
        num_threads: int,
        batch_items: int = 1,
        pictures: PictureRules = DEFAULT_RULES,
    ) -> None:
        self._pictures = pictures
        self._encoder_spec = encoder_spec
        self._device = device
        self._num_threads = num_threads
        self._batch_items = batch_items
        self._batches: queue.SimpleQueue[tuple[int, Sequence[ForwardItem], bool] | None]
        self._thread: threading.Thread | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._lost: asyncio.TimerHandle | None = None
        self._ready = self._was_ready = False
        self._batch: int | None = None
        self._failures = 0
        self._stopped = False

    def start(self, regions: Sequence[Region], events: WorkerEvents) -> None:
        self._loop = asyncio.get_running_loop()
        self._events = events
        self._regions = tuple(regions)
        self._spawn()

    def submit(self, batch: int, items: Sequence[ForwardItem], *, digest: bool) -> None:
        if self._batch is not None:
            raise RuntimeError(f"batch {batch} submitted while {self._batch} runs")
        if not self._ready:
            return  # its death, which the caller has yet to read, answers it
        self._batch = batch
        self._batches.put((batch, items, digest))

    def kill(self) -> None:
        """Nothing ends a thread: what it makes is no longer wanted, and it gets `END_WAIT_S` to end."""
        if self._batch is not None and self._lost is None:
            reason = f"a forward did not end within {END_WAIT_S:g} s of being told to"
            self._lost = self._loop.call_later(END_WAIT_S, self._lose, reason)

    def stop(self) -> None:
        """See `ForwardWorker`. Raises `ForwardFailed` if a forward still runs: it may still write."""
        self._stopped = True
        for timer in (self._restart, self._lost):
            if timer is not None:
                self._loop.call_soon_threadsafe(timer.cancel)
        if self._thread is None:
            return
        self._batches.put(None)
        self._thread.join(STOP_WAIT_S)
        if self._thread.is_alive():
            raise ForwardFailed(f"a forward runs {STOP_WAIT_S:g} s after the worker's end")

    # -- the loop's side ---------------------------------------------------------------------

    def _spawn(self) -> None:
        self._restart = None
        self._batches = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="epd-forward", daemon=True)
        self._thread.start()

    def _tell(self, method: str, *arguments: object) -> None:
        """From the thread: call our own `method` on the loop, unless it is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._hear, method, arguments)

    def _hear(self, method: str, arguments: tuple[object, ...]) -> None:
        if not self._stopped:
            getattr(self, method)(*arguments)

    def _loaded(self) -> None:
        self._ready = self._was_ready = True
        self._events.worker_ready()

    def _load_failed(self, reason: str) -> None:
        self._failures += 1
        if not self._was_ready:
            self._lose(reason)
            return
        self._events.worker_died(reason)
        self._restart = self._loop.call_later(backoff_s(self._failures), self._spawn)

    def _ended(self, batch: int, results: Sequence[ItemResult]) -> None:
        self._batch = None
        self._failures = 0
        if self._lost is None:
            self._events.batch_ended(batch, results)
            return
        self._lost.cancel()
        self._lost = None
        self._events.worker_died("its forward took too long")
        self._events.worker_ready()

    def _lose(self, reason: str) -> None:
        self._events.worker_lost(reason)

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            encoder = load_encoder(self._encoder_spec)
            stream = Stream(self._device)
            with stream.current():
                encoder.load(self._num_threads, self._device)
                stream.wait()
        except Exception as error:
            _log.exception("the encoder cannot be loaded", encoder=self._encoder_spec)
            self._tell("_load_failed", f"{self._encoder_spec} cannot be loaded: {describe(error)}")
            return
        runner = BatchRunner(encoder, TensorStore(self._regions), self._batch_items, self._pictures)
        self._tell("_loaded")
        while (batch := self._batches.get()) is not None:
            number, items, digest = batch
            results = self._run_batch(runner, stream, items, digest)
            del batch, items  # nothing of the media stays while the next batch is waited for
            self._tell("_ended", number, results)

    def _run_batch(
        self, runner: BatchRunner, stream: Stream, items: Sequence[ForwardItem], digest: bool
    ) -> list[ItemResult]:
        try:
            with stream.current():
                results = runner.run(items, digest=digest)
                stream.wait()
        except Exception as error:  # queued work has failed, and with it everything after it
            _log.exception("the worker's stream failed")
            self._tell("_lose", f"its stream failed: {describe(error)}")
            return [failed(error)] * len(items)
        return results
