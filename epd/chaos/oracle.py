"""Knows every byte: what each item's embedding is, and what no consumer may ever find in its hands.

An item's embedding is a pattern of its content's hash. A delivery is compared when it comes and again
before it is released, and then filled with poison: a slot that changes while it is held, or that is
delivered without having been written, shows.
"""

import hashlib
from collections import Counter
from typing import Final

from epd.chaos.schedule import Request
from epd.memory.tensors import host_bytes
from epd.protocol.messages import Probe
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.testing.synthetic import pattern

POISON: Final = 0xDB
_ITEM_NBYTES: Final = 4
"""Of one float32: an item's probe says how many."""


def embedding_request(seed: int, request: Request) -> EmbeddingRequest:
    items = [_item(seed, content, nbytes) for content, nbytes in request.items]
    return EmbeddingRequest(f"chaos-{request.number}", items, request.deadline_s)


def _item(seed: int, content: int, nbytes: int) -> ImageItem:
    media = f"chaos {seed} {content} {nbytes}".encode()
    probe = Probe("image", nbytes // _ITEM_NBYTES, 1)
    return ImageItem(f"{content}", media, probe, hashlib.sha256(media).digest())


class Oracle:
    """Counts what came and what was wrong with it."""

    def __init__(self) -> None:
        self.delivered = 0
        self.delivered_nbytes = 0
        self.failed: Counter[str] = Counter()
        self.corrupted_nbytes = 0
        self.lost = 0
        """Requests without an outcome, or with two."""

    def check(self, request: EmbeddingRequest, delivery: Delivery) -> None:
        """Compare every byte. In any thread: the views are the consumer's."""
        if len(delivery.views) != len(request.items):
            self.lost += 1
            return
        for item, view in zip(request.items, delivery.views, strict=True):
            expected = pattern(item.media, item.probe.width * _ITEM_NBYTES)
            if host_bytes(view) != expected:
                self.corrupted_nbytes += _differing(host_bytes(view), expected)

    def poison(self, delivery: Delivery) -> None:
        for view in delivery.views:
            host_bytes(view)[:] = bytes([POISON]) * view.nbytes


def _differing(view: memoryview, expected: bytes) -> int:
    if view.nbytes != len(expected):
        return max(view.nbytes, len(expected))
    import numpy as np

    return int((np.frombuffer(view, np.uint8) != np.frombuffer(expected, np.uint8)).sum())
