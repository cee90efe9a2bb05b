"""What recording costs: transfers of zero bytes by a pair whose nodes record, beside one that does not.

The rounds of both take turns, many short ones, so that a busy machine slows both alike. The bytes in a
row's name are those of both trace files per transfer, compressed.
"""

import tempfile
from pathlib import Path
from typing import Final

from epd.bench.pair import pair
from epd.bench.report import Row
from epd.bench.throughput import measure
from epd.dataplane.select import Choice

CONCURRENCY: Final = 64
_REGION_NBYTES: Final = 1024 * 1024


async def run(data_planes: list[Choice], *, quick: bool) -> list[Row]:
    rounds, transfers = (41, 1_000) if quick else (41, 4_000)
    rows: list[Row] = []
    for plane in data_planes:
        with tempfile.TemporaryDirectory() as folder:
            async with (
                pair(plane, 1, _REGION_NBYTES, trace_folder=folder) as recording,
                pair(plane, 1, _REGION_NBYTES) as silent,
            ):
                costs = [
                    (
                        await measure(recording, transfers, CONCURRENCY),
                        await measure(silent, transfers, CONCURRENCY),
                    )
                    for _ in range(rounds)
                ]
            written = _nbytes(folder) / (rounds * transfers)
        for unit, field in (("us per transfer", "wall_us"), ("CPU us per transfer", "cpu_us")):
            with_trace, without = zip(
                *((getattr(a, field), getattr(b, field)) for a, b in costs), strict=True
            )
            name = f"{plane} zero bytes recorded in {written:.0f} B, {unit}"
            rows.append(Row(name, 0, CONCURRENCY, unit, "without", [*with_trace], [*without]))
    return rows


def _nbytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).iterdir())
