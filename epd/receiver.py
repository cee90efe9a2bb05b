"""`EmbeddingReceiver`: the prefill side for a synchronous scheduler loop.

The node runs in a thread of its own; `submit`, `poll`, `cancel` and the deliveries' `release` may be
called from one other thread (the scheduler's). `poll` never blocks: it empties a deque.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Self

import uvloop

from epd.config import Config
from epd.node import PrefillNode
from epd.protocol.errors import Cancelled, SessionLost
from epd.request import Delivery, EmbeddingRequest


class EmbeddingReceiver:
    """Start with `EmbeddingReceiver.start(config)`, end with `close()`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._done: deque[Delivery] = deque()
        self._open: set[str] = set()
        self._cancelled: set[str] = set()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Future[None]
        self.node: PrefillNode
        self._thread = threading.Thread(target=self._run, name="epd-receiver", daemon=True)

    @classmethod
    def start(cls, config: Config) -> Self:
        """Build the node; returns when it is ready. Raises what kept it from starting."""
        receiver = cls(config)
        receiver._thread.start()
        receiver._started.wait()
        if receiver._failure is not None:
            receiver._thread.join()
            raise receiver._failure
        return receiver

    def submit(self, request: EmbeddingRequest) -> None:
        """Hand over a request; its one delivery, or error, comes out of `poll`.

        Raises what ended the node, if it has ended.
        """
        if self._failure is not None:
            raise self._failure
        self._open.add(request.request_id)
        self._loop.call_soon_threadsafe(self.node.submit, request, self._sink)

    def poll(self) -> list[Delivery]:
        """What has ended since the last call: deliveries to release, or errors. Never blocks."""
        if not self._done and self._failure is None:
            return []
        ended: list[Delivery] = []
        while self._done:
            delivery = self._done.popleft()
            self._open.discard(delivery.request_id)
            if delivery.request_id in self._cancelled:
                self._cancelled.discard(delivery.request_id)
                if delivery.error is None:  # delivered before the cancel arrived: nobody wants it
                    delivery.release()
                    delivery = Delivery(delivery.request_id, error=Cancelled("cancelled by the caller"))
            delivery.take()
            ended.append(delivery)
        if self._failure is not None:  # the node is gone: nothing else will come
            lost = SessionLost(f"the node ended: {self._failure}")
            ended += [Delivery(request_id, error=lost) for request_id in self._open]
            self._open.clear()
        return ended

    def cancel(self, request_id: str) -> None:
        """End a request that was submitted and not yet polled; it comes out of `poll` as `Cancelled`."""
        if request_id not in self._open:
            return
        self._cancelled.add(request_id)
        self._loop.call_soon_threadsafe(self.node.cancel, request_id)

    def close(self) -> None:
        """Stop the node: open requests are dropped, views become invalid. Idempotent."""
        if self._thread.is_alive():
            self._hop(self._say_stop)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sink(self, delivery: Delivery) -> None:
        """In the node's thread. `notify` hops back to it from the scheduler's."""
        delivery.call_from(self._hop)
        self._done.append(delivery)

    def _hop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # closed: the pool is gone with the node
            return

    def _say_stop(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)

    def _run(self) -> None:
        try:
            uvloop.run(self._main())
        except BaseException as error:  # handed to the caller's thread: by `start`, `submit` and `poll`
            self._failure = error
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = self._loop.create_future()
        async with PrefillNode(self._config) as node:
            self.node = node
            self._started.set()
            ended = (self._stop, node.failure)
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            if node.failure.done():
                node.failure.result()
