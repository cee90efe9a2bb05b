"""One run: load, faults, then peace, in which everything must end and nothing may be left."""

import asyncio
import contextlib
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from epd.chaos import schedule
from epd.chaos.cluster import REGIONS, TIMEOUTS, Cluster, running
from epd.chaos.oracle import Oracle, embedding_request
from epd.chaos.schedule import MAX_REQUEST_NBYTES, Fault, Request
from epd.config import load_config
from epd.dataplane.faulty import FaultyPlane, Rates
from epd.dataplane.select import Choice, open_plane
from epd.node import PrefillNode
from epd.protocol.errors import EpdError
from epd.request import Delivery
from epd.testing.processes import Held, held_by
from epd.testing.residue import empty, held

CONCURRENCY: Final = 16
RATES: Final = Rates(delay=0.02, fail=0.005, stale=0.002, hang=0.0005)
_THREADS: Final = 6
_GRACE_S: Final = 15.0
"""A request without an outcome so long after its deadline is lost."""
_IDLE_S: Final = 40.0
_SETTLE_S: Final = 0.5
_AHEAD: Final = 32
"""Requests that may be submitted while a fault that was due before them is still being done."""
_SPARE_DESCRIPTORS: Final = 16
"""Mooncake opens up to four connections to a peer, each when it is first needed."""


class Options(NamedTuple):
    seed: int
    requests: int
    data_plane: Choice
    verify: str


class _Progress:
    """How far the load is, for the faults; and which faults are done, for the load."""

    def __init__(self, faults: list[Fault]) -> None:
        self.submitted = 0
        self._due = deque(faults)
        self._changed = asyncio.Event()

    async def room(self, number: int) -> None:
        """Wait until request `number` may be submitted."""
        while self._due and number > self._due[0].after + _AHEAD:
            await self._wait()

    def submit(self, number: int) -> None:
        self.submitted = max(self.submitted, number)
        self._changed.set()

    async def next_fault(self) -> Fault | None:
        if not self._due:
            return None
        while self.submitted < self._due[0].after:
            await self._wait()
        return self._due[0]

    def fault_done(self) -> None:
        self._due.popleft()
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Run:
    def __init__(self, options: Options, node: PrefillNode, cluster: Cluster) -> None:
        self._options = options
        self._node = node
        self._cluster = cluster
        self.oracle = Oracle()
        self._progress = _Progress(schedule.faults(options.seed, options.requests))
        self._open: set[int] = set()
        self._ended = asyncio.Event()
        self.recoveries_s: dict[str, list[float]] = {"sigkill": [], "sigstop": []}

    async def load(self) -> None:
        turns = iter(schedule.requests(self._options.seed, self._options.requests))
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(self._work(turns)) for _ in range(CONCURRENCY)]
            faulting = tasks.create_task(self._do_faults())
            await asyncio.wait(workers)
            await faulting

    async def _work(self, turns: Iterator[Request]) -> None:
        for request in turns:
            await self._progress.room(request.number)
            await self._request(request)

    async def _request(self, request: Request) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Delivery] = loop.create_future()

        def sink(delivery: Delivery) -> None:
            if ended.done():
                self.oracle.lost += 1  # a second outcome
            else:
                ended.set_result(delivery)

        wanted = embedding_request(self._options.seed, request)
        self._node.submit(wanted, sink)
        self._open.add(request.number)
        self._progress.submit(request.number)
        if request.cancel_s is not None:
            loop.call_later(request.cancel_s, self._node.cancel, wanted.request_id)
        try:
            async with asyncio.timeout(request.deadline_s + _GRACE_S):
                delivery = await ended
        except TimeoutError:
            self.oracle.lost += 1
            return
        finally:
            self._open.discard(request.number)
            self._ended.set()
        if delivery.error is not None:
            self.oracle.failed[delivery.error.code] += 1
            return
        await self.oracle.consume(wanted, delivery, request.hold_s)

    async def _do_faults(self) -> None:
        while (fault := await self._progress.next_fault()) is not None:
            if fault.kind in ("sigkill", "sigstop") and fault.victim < schedule.ENCODERS:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._time_recovery(fault.kind, set(self._open)))
                    await self._cluster.do(fault)
            else:
                await self._cluster.do(fault)
            self._progress.fault_done()

    async def _time_recovery(self, kind: str, open_then: set[int]) -> None:
        """Until every request that was open when an encoder was lost has its outcome."""
        start_s = time.monotonic()
        while open_then & self._open:
            self._ended.clear()
            await self._ended.wait()
        self.recoveries_s[kind].append(time.monotonic() - start_s)


async def run(options: Options, log: IO[bytes]) -> dict[str, Any]:
    """The report: see `epd chaos --json`. `log` takes what the other processes say."""
    shared_before = _shared_files()
    await _start_threads()
    start_s = time.monotonic()
    async with running(options.data_plane, log) as cluster:
        plane = FaultyPlane(open_plane(options.data_plane, "127.0.0.1"), seed=options.seed)
        config = load_config(
            None,
            {
                **TIMEOUTS,
                "role": "prefill",
                "data_plane": options.data_plane,
                "verify": options.verify,
                "encoders": [f"tcp://127.0.0.1:{one.proxy.port}" for one in cluster.encoders],
                "pool.regions": REGIONS,
                "pool.region_nbytes": MAX_REQUEST_NBYTES,
            },
        )
        async with PrefillNode(config, open_plane_with=lambda: plane) as node:
            await _warm(options, node, cluster)
            before = _held_outside(cluster)
            await asyncio.to_thread(cluster.neighbour.start)
            plane.rates = RATES
            this = Run(options, node, cluster)
            await this.load()
            plane.rates = Rates()
            await asyncio.to_thread(cluster.neighbour.kill)
            residue = await _residue(node, cluster)
            outside = await _grown_outside(before, cluster)
            data_plane, stale = node.data_plane, node.transfer.outcomes.get("seal_mismatch", 0)
    shared = _shared_files() - shared_before
    faults = cluster.done | {f"plane_{kind}": count for kind, count in plane.faults.items()}
    return _report(options, this, residue, outside, shared) | {
        "stale_reads": stale,
        "faults": dict(sorted(faults.items())),
        "freed_early": cluster.freed_early,
        "data_plane": data_plane,
        "verify": options.verify,
        "seconds": round(time.monotonic() - start_s, 1),
    }


async def _start_threads() -> None:
    """All threads of the loop's pool, which come one by one otherwise and would look like a leak."""
    executor = ThreadPoolExecutor(_THREADS, "epd-chaos")
    asyncio.get_running_loop().set_default_executor(executor)
    together = threading.Barrier(_THREADS)
    await asyncio.gather(*(asyncio.to_thread(together.wait) for _ in range(_THREADS)))


async def _warm(options: Options, node: PrefillNode, cluster: Cluster) -> None:
    """All connections there are, before anything is counted."""
    for request in schedule.requests(options.seed + 1, 64):
        with contextlib.suppress(EpdError):
            delivery = await node.encode(embedding_request(options.seed + 1, request))
            delivery.release()
    for encoder in cluster.encoders:
        await empty(encoder.address, _IDLE_S)


async def _residue(node: PrefillNode, cluster: Cluster) -> dict[str, int]:
    """What is still held when all has ended, by the nodes' own word."""
    residue: dict[str, int] = {}
    for number, encoder in enumerate(cluster.encoders):
        try:
            await empty(encoder.address, _IDLE_S)
        except AssertionError as error:
            residue[f"encoder {number}: {error}"] = 1
    with contextlib.suppress(AssertionError):
        await empty(node.listen, _IDLE_S)
    return residue | {f"prefill {name}": count for name, count in held(node.counts()).items()}


def _held_outside(cluster: Cluster) -> list[Held]:
    """What this process and the encoders hold, counted from outside."""
    return [held_by(os.getpid()), *(one.process.held() for one in cluster.encoders)]


async def _grown_outside(before: list[Held], cluster: Cluster) -> list[dict[str, int]]:
    """By how much each holds more than before; a peer that is just being opened has a moment to settle."""
    for _ in range(20):
        grown = [_grown(*pair) for pair in zip(before, _held_outside(cluster), strict=True)]
        if not any(any(one.values()) for one in grown):
            break
        await asyncio.sleep(_SETTLE_S)
    return grown


def _grown(before: Held, after: Held) -> dict[str, int]:
    return {
        "descriptors": max(0, after.descriptors - before.descriptors - _SPARE_DESCRIPTORS),
        "threads": max(0, after.threads - before.threads),
        "shared_mappings": max(0, after.shared_mappings - before.shared_mappings),
    }


def _shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}  # tidy: looked at, nothing is made there


def _report(
    options: Options,
    this: Run,
    residue: dict[str, int],
    outside: list[dict[str, int]],
    shared: set[str],
) -> dict[str, Any]:
    oracle = this.oracle
    ended = oracle.delivered + sum(oracle.failed.values())
    lost = oracle.lost + max(0, options.requests - ended - oracle.lost)
    left = sum(residue.values()) + sum(sum(one.values()) for one in outside) + len(shared)
    ok = lost == 0 and oracle.corrupted_nbytes == 0 and left == 0 and oracle.delivered > 0
    return {
        "ok": ok,
        "seed": options.seed,
        "requests": options.requests,
        "delivered": oracle.delivered,
        "delivered_bytes": oracle.delivered_nbytes,
        "failed": dict(sorted(oracle.failed.items())),
        "lost": lost,
        "corrupted_bytes": oracle.corrupted_nbytes,
        "corruptions": oracle.corruptions,
        "residue": left,
        "residue_by": residue
        | {f"outside {number}": one for number, one in enumerate(outside) if any(one.values())}
        | {f"/dev/shm/{name}": 1 for name in sorted(shared)},  # tidy: named, nothing is made there
        "recovery_ms": _percentiles_ms(this.recoveries_s["sigkill"]),
        "recovery_stopped_ms": _percentiles_ms(this.recoveries_s["sigstop"]),
    }


def _percentiles_ms(times_s: list[float]) -> dict[str, float] | None:
    """None of no times: no encoder was the victim."""
    if not times_s:
        return None
    times_ms = [1e3 * one for one in times_s]
    cuts = statistics.quantiles([*times_ms, *times_ms[:1]], n=100, method="inclusive")
    return {"p50": round(statistics.median(times_ms), 1), "p99": round(cuts[98], 1)}
