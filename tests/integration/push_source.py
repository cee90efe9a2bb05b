"""An encoder node that pushes, as a process of its own: `push_source.py REGIONS REGION_NBYTES`.

Its results are patterns of the media, made at once. It never gives a write up, whatever it hears of its
reader: what is under way when it is stopped goes on when it is continued. Prints its address; ends with
its standard input.
"""

import asyncio
import json
import sys

import uvloop

from epd.config import load_config
from epd.dataplane.push import PushPlane
from epd.node import EncoderNode
from epd.protocol.ids import SessionId
from epd.testing.synthetic import PatternWorker, SyntheticEncoder


class StubbornPlane(PushPlane):
    pieces = 1  # the engine makes an encoder that was refused three times in a row wait for a second

    def abort(self, session: SessionId) -> None:
        """Goes on writing."""


async def serve(regions: int, region_nbytes: int) -> None:
    overrides = {
        "role": "encoder",
        "data_plane": "mooncake",
        "direction": "push",
        "staging.regions": regions,
        "staging.region_nbytes": region_nbytes,
        "timeouts.dedup_retention_s": 0.05,
    }
    node = EncoderNode(
        load_config(None, overrides),
        encoder=SyntheticEncoder(),
        worker=PatternWorker(),
        open_plane_with=lambda: StubbornPlane("127.0.0.1"),
    )
    async with node:
        sys.stdout.write(json.dumps({"listen": node.listen}) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
