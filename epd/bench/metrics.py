"""What metrics cost: transfers of zero bytes by a pair that counts, beside one that does not.

The rounds of both take turns, so that a busy machine slows both alike.
"""

from typing import Final

from epd.bench.pair import pair
from epd.bench.report import Row
from epd.bench.throughput import cost_rows
from epd.dataplane.select import Choice

_REGION_NBYTES: Final = 1024 * 1024


async def run(data_planes: list[Choice], *, quick: bool) -> list[Row]:
    rounds, transfers = (7, 3_000) if quick else (15, 10_000)
    rows: list[Row] = []
    for plane in data_planes:
        async with (
            pair(plane, 1, _REGION_NBYTES, metrics=True) as counting,
            pair(plane, 1, _REGION_NBYTES) as silent,
        ):
            rows += await cost_rows(f"{plane} zero bytes with metrics", counting, silent, rounds, transfers)
    return rows
