"""What proving a read costs: `verify` off, seal and checksum, side by side.

Three pairs on one plane, asked in turns for the same sizes. A checksum is computed by the encoder's worker
once per forward, outside of these latencies, and compared by the reader each time; what it takes alone, and
what a copy of as many bytes takes, is measured beside.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Final

import numpy as np
import xxhash

from epd.bench.pair import pair
from epd.bench.report import Row
from epd.dataplane.select import Choice
from epd.testing.synthetic import synthetic_item

SIZES: Final = {65_536: 40, 19_300_000: 8, 154_300_000: 3}
"""Bytes, and how often each is measured in a round."""
QUICK_SIZES: Final = {65_536: 20, 19_300_000: 3}
REGION_NBYTES: Final = 192 * 1024 * 1024
WAYS: Final = ("off", "seal", "checksum")


async def run(data_planes: list[Choice], *, quick: bool) -> list[Row]:
    sizes, rounds = (QUICK_SIZES, 3) if quick else (SIZES, 7)
    rows: list[Row] = []
    for plane in data_planes:
        rows += await _rows(plane, sizes, rounds)
    for size in sizes:
        digests, copies = zip(*(_alone_ms(size) for _ in range(rounds)), strict=True)
        rows.append(Row(f"digest of {size} B alone", size, 1, "ms", "memcpy", [*digests], [*copies]))
    return rows


async def _rows(plane: Choice, sizes: dict[int, int], rounds: int) -> list[Row]:
    found: dict[tuple[int, str], list[float]] = {}
    async with (
        pair(plane, 2, REGION_NBYTES, verify="off") as off,
        pair(plane, 2, REGION_NBYTES, verify="seal") as seal,
        pair(plane, 2, REGION_NBYTES, verify="checksum") as checksum,
    ):
        pairs = dict(zip(WAYS, (off, seal, checksum), strict=True))
        for size in sizes:  # the forward, and the first touch of everything
            for connected in pairs.values():
                await connected.latency_s(synthetic_item(size))
        for _ in range(rounds):
            for size, repetitions in sizes.items():
                latencies: dict[str, list[float]] = {way: [] for way in WAYS}
                for _ in range(repetitions):
                    for way, connected in pairs.items():
                        latencies[way].append(await connected.latency_s(synthetic_item(size)))
                for way, values in latencies.items():
                    found.setdefault((size, way), []).append(median(values) * 1000)
    return [
        Row(f"{plane} latency {size} B, {way}", size, 1, "ms", "off", found[size, way], found[size, "off"])
        for size in sizes
        for way in WAYS[1:]
    ]


def _alone_ms(size: int) -> tuple[float, float]:
    source = np.ones(size, np.uint8)
    target = np.empty_like(source)
    target[:] = source

    def took_ms(work: Callable[[], object]) -> float:
        start_s = time.perf_counter()
        work()
        return (time.perf_counter() - start_s) * 1000

    digest_ms = median(took_ms(lambda: xxhash.xxh3_128_digest(source.data)) for _ in range(5))
    return digest_ms, median(took_ms(lambda: np.copyto(target, source)) for _ in range(5))
