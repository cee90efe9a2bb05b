"""Transfers of zero bytes: what the control plane costs, beside the bare exchange of its messages.

`us per transfer` is wall time, `CPU us per transfer` of both processes together.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from epd.bench.bare_exchange import exchange
from epd.bench.pair import Pair, pair
from epd.bench.report import Row, cpu_s
from epd.dataplane.select import Choice
from epd.testing.synthetic import synthetic_item

_MANY: Final = 64
CONCURRENCY: Final = (1, _MANY)


class Cost(NamedTuple):
    """Of one transfer, both processes."""

    wall_us: float
    cpu_us: float


async def run(data_planes: list[Choice], *, quick: bool) -> list[Row]:
    rounds, many = (3, 3_000) if quick else (5, 20_000)
    rows: list[Row] = []
    for data_plane in data_planes:
        async with pair(data_plane, 1, 1024 * 1024) as connected:
            with _bare() as (address, pid):
                for concurrency in CONCURRENCY:
                    transfers = many if concurrency > 1 else many // 10
                    ours: list[Cost] = []
                    theirs: dict[str, list[Cost]] = {}
                    for _ in range(rounds):
                        ours.append(await measure(connected, transfers, concurrency))
                        for name, batched in (("bare exchange", False), ("bare exchange, batched", True)):
                            cost = await asyncio.to_thread(
                                _theirs, address, pid, transfers, concurrency, batched
                            )
                            theirs.setdefault(name, []).append(cost)
                    rows += _rows(data_plane, concurrency, ours, theirs)
    return rows


async def measure(connected: Pair, transfers: int, concurrency: int) -> Cost:
    """Transfers of zero bytes, `concurrency` at a time."""
    item = synthetic_item(0)
    await connected.run_many(item, concurrency, concurrency)
    pids = (os.getpid(), connected.encoder.pid)
    before_s = sum(map(cpu_s, pids))
    wall_s = await connected.run_many(item, transfers, concurrency)
    return Cost(wall_s / transfers * 1e6, (sum(map(cpu_s, pids)) - before_s) / transfers * 1e6)


def _theirs(address: str, pid: int, transfers: int, concurrency: int, batched: bool) -> Cost:
    pids = (os.getpid(), pid)
    before_s = sum(map(cpu_s, pids))
    exchanged = exchange(address, transfers, concurrency, batched=batched)
    used_s = sum(map(cpu_s, pids)) - before_s
    return Cost(exchanged.wall_s / transfers * 1e6, max(used_s, 0.01) / transfers * 1e6)


def _rows(data_plane: str, concurrency: int, ours: list[Cost], theirs: dict[str, list[Cost]]) -> list[Row]:
    rows = []
    for name, costs in theirs.items():
        for unit, field in (("us per transfer", "wall_us"), ("CPU us per transfer", "cpu_us")):
            rows.append(
                Row(
                    f"{data_plane} zero bytes, {unit}",
                    0,
                    concurrency,
                    unit,
                    name,
                    [getattr(cost, field) for cost in ours],
                    [getattr(cost, field) for cost in costs],
                )
            )
    return rows


@contextmanager
def _bare() -> Iterator[tuple[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "epd.bench.bare_exchange"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


async def cost_rows(name: str, ours: Pair, without: Pair, rounds: int, transfers: int) -> list[Row]:
    """Wall and CPU time of zero-byte transfers by a pair with something, beside one without, in turns."""
    costs = [
        (await measure(ours, transfers, _MANY), await measure(without, transfers, _MANY))
        for _ in range(rounds)
    ]
    rows: list[Row] = []
    for unit, field in (("us per transfer", "wall_us"), ("CPU us per transfer", "cpu_us")):
        values, beside = zip(*((getattr(a, field), getattr(b, field)) for a, b in costs), strict=True)
        rows.append(Row(f"{name}, {unit}", 0, _MANY, unit, "without", [*values], [*beside]))
    return rows
