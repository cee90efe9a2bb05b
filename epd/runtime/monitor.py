"""What a node with a metrics port has beside its work: step metrics, health, and the HTTP server.

Nothing of it takes a lock that the node's work takes: the loop writes plain counters, the server's
thread reads them.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version

from epd.memory.pool import Pool
from epd.observe.exposition import CONTENT_TYPE, node_registry, page
from epd.observe.families import Sample
from epd.observe.health import Health, LoopWatch
from epd.observe.http import HttpServer, Page, text_page
from epd.observe.steps import StepMetrics
from epd.protocol.trace import LOGIC_VERSION
from epd.protocol.wire import PROTOCOL_VERSION


class Monitor:
    """`/metrics`, `/healthz` and `/readyz` of one node, from its making to `close`.

    `can_serve` and `read` (samples of what no machine's step tells) are asked from the server's
    thread, once `started`. Raises `ConfigError` if the port cannot be had.
    """

    def __init__(
        self,
        role: str,
        host: str,
        port: int,
        can_serve: Callable[[], bool],
        read: Callable[[], Iterable[Sample]],
    ) -> None:
        self.health = Health(can_serve)
        self.steps = StepMetrics(role)
        self.registry = node_registry(self._samples)
        self._build = (version("epd"), str(PROTOCOL_VERSION), str(LOGIC_VERSION), role)
        self._read = read
        self._pool: Pool | None = None
        self._pool_samples: tuple[Sample, ...] = ()
        self._watch = LoopWatch(self.health, self._look_at_pool)
        pages = {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}
        try:
            self._server = HttpServer(host, port, pages)
        except BaseException:
            self._watch.close()
            raise

    @property
    def url(self) -> str:
        """`http://HOST:PORT`, as bound."""
        return self._server.url

    def started(self, pool: Pool) -> None:
        """Everything is built: the node is ready as soon as it can serve."""
        self._pool = pool
        self._look_at_pool()
        self.health.started = True

    async def close(self) -> None:
        """The last thing of a node to end."""
        self._watch.close()
        await asyncio.to_thread(self._server.close)

    def _look_at_pool(self) -> None:
        """In the loop: free lists cannot be walked from another thread."""
        pool = self._pool
        if pool is not None:
            self._pool_samples = (
                Sample("epd_pool_capacity_bytes", (), pool.total_nbytes),
                Sample("epd_pool_bytes", ("free",), pool.free_nbytes),
                Sample("epd_pool_largest_free_bytes", (), pool.largest_free_nbytes),
                Sample("epd_pool_fragmentation_ratio", (), pool.fragmentation),
            )

    # -- in the server's thread ----------------------------------------------------------------

    def _samples(self) -> Iterator[Sample]:
        yield Sample("epd_build_info", self._build, 1)
        yield Sample("epd_ready", (), int(self.health.word == "ready"))
        yield Sample("epd_event_loop_lag_seconds", (), self._watch.lag)
        yield from self.steps.samples()
        yield from self._pool_samples
        if self.health.started:
            yield from self._read()

    def _metrics(self) -> Page:
        return Page(200, CONTENT_TYPE, page(self.registry))

    def _healthz(self) -> Page:
        word = self.health.word
        return text_page(503 if word == "unhealthy" else 200, word)

    def _readyz(self) -> Page:
        word = self.health.word
        return text_page(200 if word == "ready" else 503, word)
