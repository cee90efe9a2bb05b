"""An encoder that costs nothing, for measuring the transfer alone; and a process that runs it.

    python -m epd.bench.synthetic DATA_PLANE REGIONS REGION_NBYTES

An item's probe says how many float32 rows of one column it becomes (`width`); the forward does
nothing. Repeating an item within the retention makes even that a cache hit, so that what is measured
is request, metadata, grant, `ForwardDone`, read and receipt. Prints its address; ends with its
standard input.
"""

import asyncio
import hashlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import uvloop

from epd.config import load_config
from epd.encoders.base import MediaItem
from epd.forward.base import ForwardItem, ItemResult, WorkerEvents
from epd.memory.region import Region
from epd.node import EncoderNode
from epd.observe.log import configure_logging
from epd.protocol.messages import DType, EmbeddingSpec, Probe
from epd.request import ImageItem


class SyntheticEncoder:
    """`width` rows of one float32."""

    name = "synthetic"
    fingerprint = "synthetic:1"
    default_dtype: DType = "float32"

    def plan(self, probe: Probe, dtype: DType) -> EmbeddingSpec:
        return EmbeddingSpec(probe.width, 1, dtype)

    def load(self, num_threads: int) -> None:
        """No model."""

    def preprocess(self, item: MediaItem) -> Any:
        return item

    def forward(self, batch: list[Any]) -> list[Any]:
        return []


class InstantWorker:
    """Ends every batch at once, in the node's own loop; what lies in the pool is the result."""

    pid = None

    def start(self, regions: Sequence[Region], events: WorkerEvents) -> None:
        self._events = events
        asyncio.get_running_loop().call_soon(events.worker_ready)

    def submit(self, batch: int, items: Sequence[ForwardItem], *, digest: bool) -> None:
        results = [ItemResult(None, None)] * len(items)
        asyncio.get_running_loop().call_soon(self._events.batch_ended, batch, results)

    def kill(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""


def synthetic_item(nbytes: int) -> ImageItem:
    """An item that becomes `nbytes` (a multiple of 4)."""
    media = b"synthetic" + nbytes.to_bytes(8, "little")
    return ImageItem(f"{nbytes} B", media, Probe("image", nbytes // 4, 1), hashlib.sha256(media).digest())


async def serve(data_plane: str, regions: int, region_nbytes: int) -> None:
    overrides = {
        "role": "encoder",
        "data_plane": data_plane,
        "staging.regions": regions,
        "staging.region_nbytes": region_nbytes,
        "timeouts.dedup_retention_s": 600.0,
    }
    config = load_config(None, overrides)
    async with EncoderNode(config, encoder=SyntheticEncoder(), worker=InstantWorker()) as node:
        ready = {"listen": node.listen, "data_plane": node.data_plane, "pid": os.getpid()}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    data_plane, regions, region_nbytes = sys.argv[1:]
    configure_logging(level=logging.WARNING)
    uvloop.run(serve(data_plane, int(regions), int(region_nbytes)))


if __name__ == "__main__":
    main()
