"""What goes wrong, and when: around bursts of requests, so that something is under way to be hit."""

import random
from collections.abc import Callable
from typing import Final

from epd.node import EncoderNode
from epd.sim.cluster import Cluster, Place
from epd.sim.network import Connection
from epd.sim.process import between
from epd.testing.held_node import free_early

Fault = Callable[[Cluster, random.Random], bool]
"""Does it; False: there was nothing to do it to."""

_DOWN_S: Final = 3.0


def kill(cluster: Cluster, rng: random.Random) -> bool:
    """SIGKILL, and a new one on the same address after a while."""
    place = rng.choice(cluster.places)
    if place.process is None or not place.process.alive:
        return False
    place.kill()
    cluster.time.after(between(rng, 1e-3, _DOWN_S), place.start)
    return True


def stop(cluster: Cluster, rng: random.Random) -> bool:
    """SIGSTOP, for less or more than it takes to be given up."""
    process = rng.choice(cluster.places).running
    if process is None:
        return False
    process.stop()
    cluster.time.after(between(rng, 1e-3, 3 * _dead_after_s(cluster)), process.go_on)
    return True


def drain(cluster: Cluster, rng: random.Random) -> bool:
    """SIGTERM, and a new one."""
    place = rng.choice(cluster.places)
    if place.running is None or place.node is None:
        return False
    place.drain(place.start)
    return True


def cut(cluster: Cluster, rng: random.Random) -> bool:
    """A connection breaks, with what was under way."""
    connections = list(cluster.network.connections)
    if not connections:
        return False
    cluster.network.break_connection(rng.choice(connections))
    return True


def part(cluster: Cluster, rng: random.Random) -> bool:
    """Two hosts do not reach each other, or one not the other; connections live on if it was short."""
    one, other = _pair(cluster, rng)
    seconds = between(rng, 1e-3, 3 * _dead_after_s(cluster))
    cluster.network.part(one.host, other.host, seconds)
    if rng.random() < 0.7:
        cluster.network.part(other.host, one.host, seconds)
    return True


def stall(cluster: Cluster, rng: random.Random) -> bool:
    """The data plane stands between two hosts, for less or more than a read may take; messages pass."""
    one, other = _pair(cluster, rng)
    read_s = float(cluster.shape.settings["timeouts.read_base_s"])
    cluster.engines.stall(one.host, other.host, between(rng, 0.1 * read_s, 10 * read_s))
    return True


def slow_link(cluster: Cluster, rng: random.Random) -> bool:
    """What took 0.1 ms takes up to a second."""
    one, other = _pair(cluster, rng)
    cluster.network.slow(one.host, other.host, between(rng, 1e-3, 1.0))
    cluster.time.after(between(rng, 0.1, 10.0), cluster.network.slow, one.host, other.host, 0.0)
    return True


def slow_process(cluster: Cluster, rng: random.Random) -> bool:
    """Its turns take a hundred to ten thousand times as long."""
    process = rng.choice(cluster.places).running
    if process is None:
        return False
    process.slowness = between(rng, 1e2, 1e4)
    cluster.time.after(between(rng, 0.01, 2.0), setattr, process, "slowness", 1.0)
    return True


def drop(cluster: Cluster, rng: random.Random) -> bool:
    """A frame is lost by somebody who must not lose one: the session notices the gap."""
    return any(cluster.network.drop_one(c) for c in _shuffled(cluster, rng))


def double(cluster: Cluster, rng: random.Random) -> bool:
    """A frame comes twice."""
    return any(cluster.network.double_one(c) for c in _shuffled(cluster, rng))


def reuse(cluster: Cluster, rng: random.Random) -> bool:
    """An encoder that forgets who reads: every pinned source is freed and overwritten."""
    nodes = _encoder_nodes(cluster)
    return bool(nodes) and free_early(rng.choice(nodes)) > 0


def hurried_worker(cluster: Cluster, rng: random.Random) -> bool:
    """A forward worker is killed from outside."""
    nodes = _encoder_nodes(cluster)
    if nodes:
        rng.choice(nodes).worker.kill()
    return bool(nodes)


KINDS: Final[dict[str, tuple[Fault, float]]] = {
    "kill": (kill, 3.0),
    "stop": (stop, 3.0),
    "drain": (drain, 1.0),
    "cut": (cut, 3.0),
    "part": (part, 3.0),
    "stall": (stall, 3.0),
    "slow_link": (slow_link, 2.0),
    "slow_process": (slow_process, 2.0),
    "drop": (drop, 2.0),
    "double": (double, 2.0),
    "reuse": (reuse, 3.0),
    "worker_killed": (hurried_worker, 1.0),
}
"""Each with how often, compared with the others."""


def plan(cluster: Cluster, rng: random.Random, burst_s: float) -> None:
    """None to four faults, from the burst's begin on until long after it."""
    kinds, weights = list(KINDS), [weight for _, weight in KINDS.values()]
    for kind in rng.choices(kinds, weights, k=rng.choice((0, 1, 1, 2, 4))):
        cluster.time.at(burst_s + between(rng, 1e-4, 3.0), _do, cluster, kind, rng)


def _do(cluster: Cluster, kind: str, rng: random.Random) -> None:
    if not cluster.at_peace and KINDS[kind][0](cluster, rng):
        cluster.provoked(f"fault_{kind}")


def _encoder_nodes(cluster: Cluster) -> list[EncoderNode]:
    """Of the encoders that run."""
    nodes = [place.node for place in cluster.encoders if place.running is not None]
    return [node for node in nodes if isinstance(node, EncoderNode)]


def _pair(cluster: Cluster, rng: random.Random) -> tuple[Place, Place]:
    return rng.choice(cluster.prefills), rng.choice(cluster.encoders)


def _shuffled(cluster: Cluster, rng: random.Random) -> list[Connection]:
    connections = list(cluster.network.connections)
    rng.shuffle(connections)
    return connections


def _dead_after_s(cluster: Cluster) -> float:
    return float(cluster.shape.settings["timeouts.dead_after_s"])
