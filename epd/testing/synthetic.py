"""An encoder that costs nothing, for measuring and testing the transfer alone.

An item's probe says how many float32 rows of one column it becomes (`width`); the forward does
nothing: what lies in the staging pool is the result.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import xxhash

from epd.encoders.base import MediaItem
from epd.forward.base import ForwardItem, ItemResult, WorkerEvents
from epd.memory.region import Region
from epd.protocol.messages import DType, EmbeddingSpec, Probe
from epd.request import ImageItem


class SyntheticEncoder:
    """`width` rows of one float32."""

    name = "synthetic"
    fingerprint = "synthetic:1"
    default_dtype: DType = "float32"

    def plan(self, probe: Probe, dtype: DType) -> EmbeddingSpec:
        return EmbeddingSpec(probe.width, 1, dtype)

    def load(self, num_threads: int, device: str) -> None:
        """No model."""

    def preprocess(self, item: MediaItem) -> Any:
        return item

    def forward(self, batch: list[Any]) -> list[Any]:
        return []


class InstantWorker:
    """Ends every batch at once, in the node's own loop; what lies in the pool is the result."""

    pid = None

    def start(self, regions: Sequence[Region], events: WorkerEvents) -> None:
        self._regions = regions
        self._events = events
        asyncio.get_running_loop().call_soon(events.worker_ready)

    def submit(self, batch: int, items: Sequence[ForwardItem], *, digest: bool) -> None:
        results = [ItemResult(None, self._digest(item) if digest else None) for item in items]
        asyncio.get_running_loop().call_soon(self._events.batch_ended, batch, results)

    def _digest(self, item: ForwardItem) -> bytes:
        view = self._regions[item.region].view
        return xxhash.xxh3_128_digest(view[item.offset : item.offset + item.spec.nbytes])

    def kill(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Nothing runs."""


def synthetic_item(nbytes: int) -> ImageItem:
    """An item that becomes `nbytes` (a multiple of 4)."""
    media = b"synthetic" + nbytes.to_bytes(8, "little")
    return ImageItem(f"{nbytes} B", media, Probe("image", nbytes // 4, 1), hashlib.sha256(media).digest())


def pattern(media: bytes | memoryview, nbytes: int) -> bytes:
    """What a `PatternWorker` makes of these media: their SHA-256, again and again."""
    digest = hashlib.sha256(media).digest()
    return (digest * (nbytes // len(digest) + 1))[:nbytes]


class PatternWorker(InstantWorker):
    """Writes each item's `pattern`, so that every delivered byte can be checked."""

    def submit(self, batch: int, items: Sequence[ForwardItem], *, digest: bool) -> None:
        for item in items:
            view = self._regions[item.region].view
            nbytes = item.spec.nbytes
            view[item.offset : item.offset + nbytes] = pattern(item.media, nbytes)
        super().submit(batch, items, digest=digest)
