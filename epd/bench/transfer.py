"""Latency from submit to delivered with a zero-cost encoder, beside the raw read of the same bytes.

Rounds are interleaved: in each, every size is measured `repetitions` times our way and the
reference's, alternating, and gives one median each. Ratios are taken within a round.
"""

from collections.abc import Callable
from statistics import median
from typing import Any, Final

from epd.bench.pair import Pair, pair
from epd.bench.raw import RawCopy, RawMooncake
from epd.bench.report import Row
from epd.dataplane.select import Choice
from epd.testing.synthetic import synthetic_item

SIZES: Final = {65_536: 60, 1_048_576: 40, 19_300_000: 10, 154_300_000: 4}
"""Bytes, and how often each is measured in a round."""
QUICK_SIZES: Final = {65_536: 20, 1_048_576: 10, 19_300_000: 3}
REGION_NBYTES: Final = 192 * 1024 * 1024


async def run(data_planes: list[Choice], *, quick: bool) -> list[Row]:
    rows: list[Row] = []
    for data_plane in data_planes:
        async with pair(data_plane, 2, REGION_NBYTES) as connected:
            raw: Any = RawMooncake(connected) if data_plane == "mooncake" else RawCopy(REGION_NBYTES)
            try:
                rows += await _rows(connected, data_plane, raw, quick)
            finally:
                raw.close()
    return rows


async def _rows(connected: Pair, data_plane: str, raw: Any, quick: bool) -> list[Row]:
    sizes, rounds = (QUICK_SIZES, 3) if quick else (SIZES, 7)
    ours: dict[int, list[float]] = {size: [] for size in sizes}
    theirs: dict[tuple[int, str], list[float]] = {}
    for size in sizes:  # first touch of everything on both sides
        await connected.latency_s(synthetic_item(size))
        for read in raw.references(size).values():
            read()
    for _ in range(rounds):
        for size, repetitions in sizes.items():
            item = synthetic_item(size)
            references: dict[str, Callable[[], float]] = raw.references(size)
            latencies: list[float] = []
            raw_latencies: dict[str, list[float]] = {name: [] for name in references}
            for _ in range(repetitions):
                latencies.append(await connected.latency_s(item))
                for name, read in references.items():
                    raw_latencies[name].append(read())
            ours[size].append(median(latencies) * 1000)
            for name, values in raw_latencies.items():
                theirs.setdefault((size, name), []).append(median(values) * 1000)
    return [
        Row(f"{data_plane} latency {size} B", size, 1, "ms", name, ours[size], values)
        for (size, name), values in theirs.items()
    ]
