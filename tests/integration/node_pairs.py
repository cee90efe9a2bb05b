"""What the tests of whole nodes share: settings, inventories, waiting without sleeping."""

import asyncio
from typing import Any

from epd.client import NodeClient
from epd.encoders.base import MediaItem
from epd.encoders.local import encode_locally
from epd.request import ImageItem

PLANES = ("mooncake", "shm")
MODEL = "builtin:qwen2-vl"

_NOT_HELD = ("_free_nbytes", "registrations", "sessions", "sockets", "timers", "segments", "encoders")
"""Counts of an idle node that are not zero: free memory, and what its connected peers cost."""


def held(counts: dict[str, int]) -> dict[str, int]:
    """What a node with nothing to do should not hold."""
    return {
        name: count
        for name, count in counts.items()
        if count and not name.endswith(_NOT_HELD) and not name.startswith("rejected_frames")
    }


async def empty(address: str, limit_s: float = 30.0) -> dict[str, int]:
    """Ask a node again and again until it holds nothing; all its counts then."""
    async with NodeClient(address) as client:
        counts: dict[str, int] = {}
        try:
            async with asyncio.timeout(limit_s):
                while held(counts := (await client.inventory()).counts):
                    pass
        except TimeoutError:
            raise AssertionError(f"{address} still holds {held(counts)}") from None
        return counts


def expected_digests(items: list[ImageItem], dtype: Any = "float32") -> dict[bytes, bytes]:
    """SHA-256 of each picture's embedding as one worker thread makes it, by the picture's own."""
    media = [MediaItem(item.probe, memoryview(item.media), dtype) for item in items]
    return dict(zip((item.sha256 for item in items), encode_locally(MODEL, media, 1), strict=True))
