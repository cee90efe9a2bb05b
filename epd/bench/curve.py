"""What CURVE costs: a pair with keys beside one without, in turns.

Transfers of zero bytes, and the latency of 1 MiB. Embeddings go by the data plane, which CURVE does not
touch; the pictures, which it encrypts, are a few bytes here.
"""

from statistics import median
from typing import Final

from epd.bench.pair import Pair, pair
from epd.bench.report import Row
from epd.bench.throughput import cost_rows
from epd.dataplane.select import Choice
from epd.testing.synthetic import synthetic_item

_MIB: Final = 1024 * 1024


async def run(data_planes: list[Choice], *, quick: bool) -> list[Row]:
    rounds, transfers = (5, 3_000) if quick else (9, 10_000)
    rows: list[Row] = []
    for plane in data_planes:
        async with pair(plane, 2, 2 * _MIB, curve=True) as secured, pair(plane, 2, 2 * _MIB) as plain:
            rows += await cost_rows(f"{plane} zero bytes with CURVE", secured, plain, rounds, transfers)
            latencies = [(await _latency_ms(secured), await _latency_ms(plain)) for _ in range(rounds)]
        ours, theirs = zip(*latencies, strict=True)
        rows.append(Row(f"{plane} latency {_MIB} B with CURVE", _MIB, 1, "ms", "without", [*ours], [*theirs]))
    return rows


async def _latency_ms(connected: Pair) -> float:
    item = synthetic_item(_MIB)
    return median([await connected.latency_s(item) for _ in range(40)]) * 1000
