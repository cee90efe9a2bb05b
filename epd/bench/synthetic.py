"""A process with a zero-cost encoder node (`epd.testing.synthetic`).

    python -m epd.bench.synthetic DATA_PLANE REGIONS REGION_NBYTES [SETTINGS]

Repeating an item within the retention makes even its forward a cache hit, so that what is measured is
request, metadata, grant, `ForwardDone`, read and receipt. Prints its address; ends with its standard
input.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import uvloop

from epd.config import load_config
from epd.node import EncoderNode
from epd.observe.log import configure_logging
from epd.testing.synthetic import InstantWorker, SyntheticEncoder


async def serve(data_plane: str, regions: int, region_nbytes: int, settings: Mapping[str, Any]) -> None:
    overrides: dict[str, Any] = {
        "role": "encoder",
        "data_plane": data_plane,
        "staging.regions": regions,
        "staging.region_nbytes": region_nbytes,
        "timeouts.dedup_retention_s": 600.0,
    }
    config = load_config(None, overrides | dict(settings))
    async with EncoderNode(config, encoder=SyntheticEncoder(), worker=InstantWorker()) as node:
        ready = {"listen": node.listen, "data_plane": node.data_plane, "pid": os.getpid()}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    data_plane, regions, region_nbytes, *settings = sys.argv[1:]
    configure_logging(level=logging.WARNING)
    uvloop.run(
        serve(data_plane, int(regions), int(region_nbytes), json.loads(settings[0]) if settings else {})
    )


if __name__ == "__main__":
    main()
