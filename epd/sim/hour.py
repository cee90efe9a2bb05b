"""One simulated hour: load and faults, then peace, in which everything must end and work again."""

import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from epd.chaos import schedule
from epd.chaos.schedule import Request
from epd.check.traces.check import check_traces
from epd.dataplane.faulty import Rates
from epd.sim import faults
from epd.sim.cluster import Cluster, Place, Shape

HOUR_S: Final = 3600.0
_CHECKED: Final = 10
"""Of each so many hours one has its traces checked too, which takes as long as the hour itself."""
_REQUESTS_PER_BURST: Final = (5, 30)
_QUIET_S: Final = (10.0, 120.0)
"""Between two bursts."""
_PEACE_S: Final = 400.0
"""In which everything must have ended: more than the longest deadline and every time-out behind it."""
_LAST_REQUESTS: Final = 3
_LEAVING_S: Final = 60.0
_PAGE_NBYTES: Final = 4096
_LOOK_S: Final = (0.5, 1.5)
"""Never in step with a heartbeat, which is something held for a moment."""


class Hour(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one hour. `digest` is of every step that every node made."""

    hour: int
    load_s: float
    virtual_s: float
    transfers: int
    delivered: int
    delivered_nbytes: int
    failed: dict[str, int]
    lost: int
    corrupted_nbytes: int
    residue: dict[str, int]
    violations: list[str]
    provoked: dict[str, int]
    landed: int
    digest: str

    @property
    def ok(self) -> bool:
        return not (self.lost or self.corrupted_nbytes or self.residue or self.violations)


def shape_of(rng: random.Random) -> Shape:
    """Another cluster each hour, many of them short of something."""
    heartbeat_s = rng.choice((0.5, 2.0, 5.0, 10.0))
    suspect_s = heartbeat_s * rng.choice((1.5, 3.0))
    max_nbytes = rng.choice((64, 64, 64, 256, 4096)) * 1024
    region_nbytes = max(max_nbytes, 65_536)
    settings = {
        "timeouts.heartbeat_s": heartbeat_s,
        "timeouts.suspect_after_s": suspect_s,
        "timeouts.dead_after_s": suspect_s * rng.choice((1.5, 4.0)),
        "timeouts.connect_s": rng.choice((0.5, 2.0)),
        "timeouts.metadata_s": rng.choice((0.5, 3.0)),
        "timeouts.room_s": rng.choice((0.5, 30.0)),
        "timeouts.consume_warning_s": rng.choice((0.02, 60.0)),
        "timeouts.read_base_s": rng.choice((0.2, 1.0, 5.0)),
        "timeouts.media_s": rng.choice((0.5, 30.0)),
        "timeouts.forward_s": rng.choice((0.05, 2.0, 120.0)),
        "timeouts.dedup_retention_s": rng.choice((0.0, 0.05, 1.0, 10.0)),
        "limits.max_attempts": rng.choice((2, 8, 64)),
        "limits.max_open_requests": rng.choice((8, 64, 4096, 4096)),
        "pool.regions": rng.choice((1, 2, 4)),
        "pool.region_nbytes": region_nbytes,
        "staging.regions": rng.choice((1, 2, 4)),
        "staging.region_nbytes": region_nbytes + _PAGE_NBYTES,
        "worker.batch_items": rng.choice((1, 4)),
        "verify": rng.choice(("seal", "checksum")),
    }
    wrong = rng.choice((0.0, 1.0))
    rates = Rates(
        delay=0.02 * wrong, fail=0.005 * wrong, refuse=0.002 * wrong, stale=0.005 * wrong, hang=0.001 * wrong
    )
    return Shape(rng.randint(1, 3), rng.randint(1, 2), settings, max_nbytes, rates, rng.random() < 0.5)


def simulate_hour(seed: int, hour: int, seconds: float = HOUR_S, traces: Path | None = None) -> Hour:
    """Everything that happens follows from these alone. `seconds` of load and faults; peace comes behind."""
    if traces is None and hour % _CHECKED == 0:
        with tempfile.TemporaryDirectory(prefix="epd-sim-") as folder:
            return simulate_hour(seed, hour, seconds, Path(folder))
    chance = random.Random(f"{seed} {hour}")
    cluster = Cluster(seed, f"hour {hour}", shape_of(chance), traces)
    try:
        residue = _run(cluster, chance, seconds)
        _leave(cluster)
    finally:  # of whatever goes wrong here
        for place in cluster.places:
            place.kill()
    _expect_nothing(cluster)
    if traces is not None:
        _check(cluster, traces)
    return _report(cluster, hour, seconds, residue)


def _run(cluster: Cluster, chance: random.Random, seconds: float) -> dict[str, int]:
    """Load and faults, then peace; what was left then."""
    left = _Left(cluster)
    for place in cluster.places:
        cluster.time.at(chance.uniform(0.0, 2.0), place.start)
    _plan(cluster, chance, seconds)
    cluster.time.run(seconds)
    cluster.heal()
    residue = left.run_to_peace(seconds + _PEACE_S)
    if not residue:
        _works_again(cluster, chance)
        residue = left.run_to_peace(cluster.time.now_s + _PEACE_S)
    return residue


def _plan(cluster: Cluster, chance: random.Random, load_s: float) -> None:
    """Bursts, and faults around them."""
    requests = schedule.request_stream(chance.getrandbits(32), cluster.shape.max_nbytes)
    burst_s = 3.0
    while (burst_s := burst_s + chance.uniform(*_QUIET_S)) < load_s - 1.0:
        gap_s = 10 ** chance.uniform(-4, -1)
        for place in cluster.prefills:
            when_s = burst_s
            for _ in range(chance.randint(*_REQUESTS_PER_BURST)):
                when_s += chance.expovariate(1.0) * gap_s
                cluster.time.at(when_s, _submit, place, next(requests))
        faults.plan(cluster, chance, burst_s)


def _submit(place: Place, request: Request) -> None:
    """What an engine does; one that is not there asks for nothing."""
    process, consumer = place.running, place.consumer
    if process is not None and consumer is not None:
        process.loop.call_soon(consumer.submit, request)


class _Left:
    """What is still held somewhere, asked for now and then."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.rng("looks")
        self._is_empty = False

    def run_to_peace(self, until_s: float) -> dict[str, int]:
        """Until nothing is left; or what is, then."""
        self._is_empty = False
        self._look_later()
        self._cluster.time.run(until_s, lambda: self._is_empty)
        return {} if self._is_empty else self._cluster.residue()

    def _look_later(self) -> None:
        self._cluster.time.after(self._rng.uniform(*_LOOK_S), self._look)

    def _look(self) -> None:
        if self._cluster.residue():
            self._look_later()
        else:
            self._is_empty = True


def _works_again(cluster: Cluster, chance: random.Random) -> None:
    """Peace has come: whatever is asked for now is delivered."""
    numbers = iter(range(1_000_000_000, 2_000_000_000))
    before = cluster.oracle.delivered
    wanted = 0
    for place in cluster.prefills:
        for _ in range(_LAST_REQUESTS):
            number = next(numbers)
            _submit(place, Request(number, ((number, 4 * chance.randint(1, 4096)),), 60.0, None, 0.01))
            wanted += 1
    cluster.time.run(cluster.time.now_s + 70.0, lambda: cluster.oracle.delivered == before + wanted)
    if cluster.oracle.delivered != before + wanted:
        delivered, failed = cluster.oracle.delivered - before, dict(cluster.oracle.failed)
        cluster.violated(f"liveness: {delivered} of {wanted} delivered in peace; failed so far: {failed}")


def _leave(cluster: Cluster) -> None:
    """In order; nothing stays."""
    staying = {place.name for place in cluster.places if place.node is not None}
    for place in cluster.places:
        place.drain(partial(staying.discard, place.name))
    cluster.time.run(cluster.time.now_s + _LEAVING_S, lambda: not staying)
    for name in sorted(staying):
        cluster.violated(f"{name} does not end")


def _expect_nothing(cluster: Cluster) -> None:
    """Every node has ended."""
    network, planes = cluster.network, cluster.engines.planes
    for what, left in (
        ("connections", len(network.connections)),
        ("listeners", len(network.listening)),
        ("planes", len(planes)),
    ):
        if left:
            cluster.violated(f"{left} {what} are left when every node has ended")


def _check(cluster: Cluster, traces: Path) -> None:
    """What each node recorded, by the machines again and by the rules of one node and of two."""
    checked = check_traces(sorted(traces.glob("*.trace")))
    for one in checked.replayed:
        if one.divergence is not None or one.damage is not None or one.torn:
            cluster.violated(f"{one.path.name}: {one.damage or one.divergence or 'torn'}")
    for finding in checked.findings:
        cluster.violated(str(finding))


def _report(cluster: Cluster, hour: int, load_s: float, residue: dict[str, int]) -> Hour:
    oracle = cluster.oracle
    return Hour(
        hour=hour,
        load_s=load_s,
        virtual_s=cluster.time.now_s,
        transfers=oracle.delivered + sum(oracle.failed.values()),
        delivered=oracle.delivered,
        delivered_nbytes=oracle.delivered_nbytes,
        failed=dict(sorted(oracle.failed.items())),
        lost=oracle.lost,
        corrupted_nbytes=oracle.corrupted_nbytes,
        residue=residue,
        violations=cluster.violations + oracle.corruptions,
        provoked=dict(sorted(cluster.counts.items())),
        landed=cluster.engines.landed,
        digest=cluster.digest.hexdigest(),
    )
