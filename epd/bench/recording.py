"""What recording costs: transfers of zero bytes by a pair whose nodes record, beside one that does not.

The rounds of both take turns, many short ones, so that a busy machine slows both alike. The bytes in a
row's name are those of both trace files per transfer, compressed.
"""

import tempfile
from pathlib import Path
from typing import Final

from epd.bench.pair import pair
from epd.bench.report import Row
from epd.bench.throughput import cost_rows
from epd.dataplane.select import Choice

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
                costs = await cost_rows("", recording, silent, rounds, transfers)
            written = _nbytes(folder) / (rounds * transfers)
        name = f"{plane} zero bytes recorded in {written:.0f} B"
        rows += [row._replace(name=f"{name}, {row.unit}") for row in costs]
    return rows


def _nbytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).iterdir())
