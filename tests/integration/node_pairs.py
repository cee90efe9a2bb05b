"""What the tests of whole nodes share: settings, inventories, waiting without sleeping."""

from typing import Any

from epd.encoders.base import MediaItem
from epd.encoders.local import encode_locally
from epd.request import ImageItem
from epd.testing.residue import empty, held

__all__ = ["MODEL", "PLANES", "empty", "expected_digests", "held"]

PLANES = ("mooncake", "shm")
MODEL = "builtin:qwen2-vl"


def expected_digests(items: list[ImageItem], dtype: Any = "float32") -> dict[bytes, bytes]:
    """SHA-256 of each picture's embedding as one worker thread makes it, by the picture's own."""
    media = [MediaItem(item.probe, memoryview(item.media), dtype) for item in items]
    return dict(zip((item.sha256 for item in items), encode_locally(MODEL, media, 1), strict=True))
