"""Knows every byte: what each item's embedding is, and what no consumer may ever find in its hands.

An item's embedding is a pattern of its content's hash. A delivery is compared when it comes and again
before it is released, and then filled with poison: a slot that changes while it is held, or that is
delivered without having been written, shows.
"""

import asyncio
import hashlib
from collections import Counter
from typing import Final

from epd.chaos.schedule import Request
from epd.memory.tensors import host_bytes
from epd.protocol.messages import Probe
from epd.protocol.wire import MEDIA_CHUNK_NBYTES
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.testing.synthetic import pattern

POISON: Final = 0xDB
_CORRUPTIONS_TOLD: Final = 8
_LARGE_EVERY: Final = 32
_LARGE_NBYTES: Final = MEDIA_CHUNK_NBYTES * 3 // 2
"""Of one item's media in so many: they travel in several chunks."""
_ITEM_NBYTES: Final = 4
"""Of one float32: an item's probe says how many."""


def embedding_request(seed: int, request: Request) -> EmbeddingRequest:
    items = [_item(seed, content, nbytes) for content, nbytes in request.items]
    return EmbeddingRequest(f"chaos-{request.number}", items, request.deadline_s)


def _item(seed: int, content: int, nbytes: int) -> ImageItem:
    media = f"chaos {seed} {content} {nbytes}".encode()
    if content % _LARGE_EVERY == 0:
        media += bytes(_LARGE_NBYTES)
    probe = Probe("image", nbytes // _ITEM_NBYTES, 1)
    return ImageItem(f"{content}", media, probe, hashlib.sha256(media).digest())


class Oracle:
    """Counts what came and what was wrong with it."""

    def __init__(self) -> None:
        self.delivered = 0
        self.delivered_nbytes = 0
        self.failed: Counter[str] = Counter()
        self.corrupted_nbytes = 0
        self.corruptions: list[str] = []
        """What the first wrong items looked like."""
        self.lost = 0
        """Requests without an outcome, or with two."""

    def check(self, request: EmbeddingRequest, delivery: Delivery, when: str) -> None:
        """Compare every byte. In any thread: the views are the consumer's."""
        if len(delivery.views) != len(request.items):
            self.lost += 1
            return
        for item, view in zip(request.items, delivery.views, strict=True):
            expected = pattern(item.media, item.probe.width * _ITEM_NBYTES)
            found = host_bytes(view)
            if found == expected:
                continue
            wrong = _differing(found, expected)
            self.corrupted_nbytes += len(wrong)
            if len(self.corruptions) < _CORRUPTIONS_TOLD:
                self.corruptions.append(_told(request, item, when, found, wrong))

    async def consume(self, request: EmbeddingRequest, delivery: Delivery, hold_s: float) -> None:
        """Take it, hold it so long, release it: compared before and after, then poisoned."""
        delivery.take()
        await asyncio.to_thread(self.check, request, delivery, "when it came")
        await asyncio.sleep(hold_s)
        await asyncio.to_thread(self.check, request, delivery, "before its release")
        await asyncio.to_thread(self.poison, delivery)
        self.delivered += 1
        self.delivered_nbytes += sum(view.nbytes for view in delivery.views)
        delivery.release()

    def poison(self, delivery: Delivery) -> None:
        for view in delivery.views:
            host_bytes(view)[:] = bytes([POISON]) * view.nbytes


def _differing(found: memoryview, expected: bytes) -> list[int]:
    """Where they differ."""
    import numpy as np

    if found.nbytes != len(expected):
        return list(range(max(found.nbytes, len(expected))))
    return np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8)).tolist()


def _told(request: EmbeddingRequest, item: ImageItem, when: str, found: memoryview, wrong: list[int]) -> str:
    sample = bytes(found[wrong[0] : wrong[0] + 8]).hex()
    values = len({found[one] for one in wrong[:4096]})
    return (
        f"{request.request_id}, item {item.name}, {found.nbytes} B, {when}: {len(wrong)} wrong, {wrong[0]}"
        f" to {wrong[-1]}, of {values} values, {sample}..."
    )
