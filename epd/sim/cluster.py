"""Encoder and prefill nodes on hosts of their own: started, killed, stopped, drained, started again."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from epd.chaos.oracle import Oracle
from epd.config import Config, load_config
from epd.dataplane.base import DataPlane
from epd.dataplane.faulty import FaultyPlane, Rates
from epd.node import EncoderNode, PrefillNode
from epd.node.host import Host
from epd.protocol.trace import TraceHeader
from epd.runtime.addresses import Address
from epd.sim.consumer import Consumer
from epd.sim.lanes import open_transport
from epd.sim.network import Network
from epd.sim.plane import Engines
from epd.sim.poller import SimPoller
from epd.sim.process import Process, Time
from epd.sim.recording import DigestWriter, FileWriter, trace_path
from epd.sim.watch import PoolWatch, Writes
from epd.sim.worker import SimWorker, Troubles
from epd.testing.residue import held
from epd.testing.synthetic import SyntheticEncoder

_PORT: Final = 7000
_OPENING_S: Final = 1e-3
_DRAIN_S: Final = 30.0
_TRACE: Final = "where the simulator wants it"


class Shape(NamedTuple):
    """What a cluster is like; `settings` are of all nodes, in the words of the configuration."""

    encoders: int
    prefills: int
    settings: Mapping[str, Any]
    max_nbytes: int
    rates: Rates
    one_sided: bool


class Place:
    """A host and the node on it, one incarnation after the other."""

    def __init__(self, cluster: "Cluster", role: str, number: int, config: Config) -> None:
        self.name = f"{role}-{number}"
        self.host = host_of(role, number)
        self.incarnations = 0
        self.consumer: Consumer | None = None
        self.process: Process | None = None
        self.node: EncoderNode | PrefillNode | None = None
        """None until it has started."""
        self._cluster = cluster
        self._config = config
        self._plane: FaultyPlane | None = None
        self._writes: Writes

    @property
    def running(self) -> Process | None:
        """Its process, if there is one that is not stopped."""
        return self.process if self.process is not None and self.process.runs else None

    def start(self) -> None:
        if self.process is not None and self.process.alive:
            return
        self.incarnations += 1
        cluster, name = self._cluster, f"{self.name}#{self.incarnations}"
        rng = cluster.rng(name)
        process = self.process = Process(cluster.time, name, rng, cluster.raised)
        node = self.node_of(process, rng)
        process.spawn(self._run(process, node))

    def kill(self) -> None:
        if self.process is not None and self.process.alive:
            self._cluster.note(self.node)
            self.process.kill()
        self.node = self.consumer = None

    def drain(self, then: Callable[[], None]) -> None:
        """As SIGTERM; `then` when it has left."""
        process, node = self.running, self.node
        if process is not None and node is not None:
            process.spawn(self._leave(process, node, then))

    def heal(self) -> None:
        if self._plane is not None:
            self._plane.rates = Rates()
        if self.process is not None:
            self.process.slowness = 1.0
            self.process.go_on()

    def node_of(self, process: Process, rng: random.Random) -> EncoderNode | PrefillNode:
        cluster = self._cluster
        inner = cluster.engines.open(process, self.host)
        host = Host(
            process,
            lambda: 0.0,
            rng.getrandbits,
            partial(open_transport, cluster.network, process, self.host),
            partial(SimPoller, now_s=process.now_s, opening_s=lambda: rng.expovariate(1.0) * _OPENING_S),
            partial(self._writer, process),
        )
        if self._config.role == "encoder":
            worker = SimWorker(rng, cluster.troubles, cluster.provoked)
            self._writes = worker.writes
            return EncoderNode(
                self._config,
                open_plane_with=lambda: inner,
                encoder=SyntheticEncoder(),
                worker=worker,
                host=host,
            )
        self._writes = inner.writes
        plane = FaultyPlane(inner, seed=rng.getrandbits(64), rates=cluster.rates)
        self._plane = plane
        plane_of: DataPlane = plane
        return PrefillNode(self._config, open_plane_with=lambda: plane_of, host=host)

    def _writer(self, process: Process, path: Path, header: TraceHeader, *_: int) -> DigestWriter:
        folder, digest = self._cluster.traces, self._cluster.digest
        if folder is None:
            writer = DigestWriter(digest, header)
        else:
            writer = FileWriter(digest, header, trace_path(folder, self.name, self.incarnations))
        process.when_killed.append(writer.close)
        return writer

    async def _run(self, process: Process, node: EncoderNode | PrefillNode) -> None:
        cluster = self._cluster
        try:
            await node.__aenter__()
        except Exception as error:
            cluster.violated(f"{process.name} cannot start: {type(error).__name__}: {error}")
            return
        self.node = node
        PoolWatch(node.pool, self._writes, cluster.violated, process.name)
        node.failure.add_done_callback(partial(cluster.ended, process.name))
        if isinstance(node, PrefillNode):
            self.consumer = Consumer(cluster.seed, process, node, cluster.oracle, cluster.violated)

    async def _leave(
        self, process: Process, node: EncoderNode | PrefillNode, then: Callable[[], None]
    ) -> None:
        drained = await node.drain(_DRAIN_S)
        self._cluster.provoked("drained" if drained else "drain_timed_out")
        self._cluster.note(node)
        await node.__aexit__(None, None, None)
        self._cluster.time.after(0.0, self._left, process, then)

    def _left(self, process: Process, then: Callable[[], None]) -> None:
        """Nothing of the node runs on; what is killed is a process that would end by itself."""
        if process.alive:
            for task in process.loop.tasks():
                self._cluster.violated(f"{process.name} has left, and {task} runs on")
            process.kill()
        self.node = self.consumer = None
        then()


class Cluster:
    def __init__(self, seed: int, name: str, shape: Shape, traces: Path | None = None) -> None:
        self.seed = seed
        self.shape = shape
        self.traces = traces
        self.digest = xxhash.xxh3_128()
        self.time = Time()
        self.oracle = Oracle()
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.at_peace = False
        self.rates = shape.rates
        self.troubles = Troubles()
        self._name = name
        self.network = Network(self.time, self.rng("network"), self.provoked)
        self.engines = Engines(
            self.network, self.rng("engines"), self._written, self.violated, one_sided=shape.one_sided
        )
        encoders = [f"tcp://{host_of('encoder', n)}:{_PORT}" for n in range(shape.encoders)]
        common = {
            **shape.settings,
            "data_plane": "shm",
            "trace": "as the simulator says",
            "log_format": "json",
        }
        self.encoders = [self._place("encoder", n, common) for n in range(shape.encoders)]
        self.prefills = [
            self._place("prefill", n, {**common, "encoders": encoders}) for n in range(shape.prefills)
        ]
        self.places = [*self.encoders, *self.prefills]

    def _place(self, role: str, number: int, settings: Mapping[str, Any]) -> Place:
        host = host_of(role, number)
        own = {
            "role": role,
            "node": f"{role}-{number}",
            "listen": f"tcp://{host}:{_PORT}",
            "media_listen": f"tcp://{host}:0",
        }
        return Place(self, role, number, load_config(None, {**settings, **own}))

    def rng(self, of: str) -> random.Random:
        """A source of chance of its own, so that one more draw here changes nothing there."""
        return random.Random(f"{self.seed} {self._name} {of}")

    def heal(self) -> None:
        """Nothing goes wrong from now on; who is gone comes back."""
        self.at_peace = True
        self.rates = Rates()
        self.troubles.heal()
        self.network.heal()
        self.engines.heal()
        for place in self.places:
            place.heal()
            place.start()

    # -- what is noticed ---------------------------------------------------------------------

    def provoked(self, what: str) -> None:
        self.counts[what] += 1

    def violated(self, what: str) -> None:
        self.violations.append(f"{self.time.now_s:.6f} s: {what}")

    def raised(self, process: str, context: dict[str, Any]) -> None:
        """A callback of a loop raised."""
        self.violated(f"{process}: {context.get('message')}: {context.get('exception')!r}")

    def ended(self, process: str, failure: Any) -> None:
        """An incarnation is over; by an error only if something is wrong with us."""
        if not failure.cancelled() and failure.exception() is not None:
            self.violated(f"{process} ended: {failure.exception()}")

    def note(self, node: EncoderNode | PrefillNode | None) -> None:
        """Count what a node leaves behind."""
        if isinstance(node, PrefillNode):
            self.counts.update({f"read_{outcome}": n for outcome, n in node.transfer.outcomes.items()})
        elif node is not None:
            self.counts.update({f"part_{outcome}": n for outcome, n in node.encode.outcomes.items()})
        if node is not None:
            self.counts.update({f"rejected_{r}": n for r, n in node.endpoint.rejected_frames.items()})

    def _written(self, process: Process, address: int, nbytes: int) -> None:
        for place in self.prefills:
            if place.process is process and place.consumer is not None:
                place.consumer.check_write(address, nbytes)

    def residue(self) -> dict[str, int]:
        """What nodes still hold, and what their engines still read."""
        left: dict[str, int] = {}
        for place in self.places:
            if place.node is None:
                left[f"{place.name} is not there"] = 1
                continue
            left |= {f"{place.name} {name}": n for name, n in held(place.node.counts()).items()}
            if place.consumer is not None:
                open_requests = len(place.consumer.open) + place.consumer.holding
                left |= {f"{place.name} open requests": open_requests} if open_requests else {}
        return left


def host_of(role: str, number: int) -> str:
    """A loopback address of its own."""
    return Address(f"127.0.{1 if role == 'encoder' else 2}.{number + 1}", _PORT).host
