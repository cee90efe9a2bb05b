"""Push beside pull: the same bytes written by the encoder and read by the prefill node, in turns.

From submit to delivered, with a zero-cost encoder. Push is over Mooncake only; other planes have no rows.
"""

from statistics import median
from typing import Final

from epd.bench.pair import Pair, pair
from epd.bench.report import Row
from epd.dataplane.select import Choice
from epd.testing.synthetic import synthetic_item

SIZES: Final = {65_536: 60, 1_048_576: 40, 19_300_000: 10}
"""Bytes, and how often each is measured in a round."""
REGION_NBYTES: Final = 32 * 1024 * 1024


async def run(data_planes: list[Choice], *, quick: bool) -> list[Row]:
    if "mooncake" not in data_planes:
        return []
    rounds = 3 if quick else 7
    pushed: dict[int, list[float]] = {size: [] for size in SIZES}
    pulled: dict[int, list[float]] = {size: [] for size in SIZES}
    async with (
        pair("mooncake", 2, REGION_NBYTES, push=True) as push,
        pair("mooncake", 2, REGION_NBYTES) as pull,
    ):
        for size in SIZES:  # first touch of everything on both sides
            await _latency_ms(push, size, 3)
            await _latency_ms(pull, size, 3)
        for _ in range(rounds):
            for size, repetitions in SIZES.items():
                pushed[size].append(await _latency_ms(push, size, repetitions))
                pulled[size].append(await _latency_ms(pull, size, repetitions))
    return [
        Row(f"mooncake push latency {size} B", size, 1, "ms", "pull", pushed[size], pulled[size])
        for size in SIZES
    ]


async def _latency_ms(connected: Pair, size: int, repetitions: int) -> float:
    item = synthetic_item(size)
    return median([await connected.latency_s(item) for _ in range(repetitions)]) * 1000
