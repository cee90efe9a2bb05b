"""Which encoder gets which items (pure).

Rendezvous hashing of the media's hash gives every item a home encoder, so that equal pictures meet
their cached result; an encoder that has clearly more to do than the least loaded one is passed over.
"""

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from epd.protocol.ids import Incarnation, SessionId
from epd.protocol.messages import Item
from epd.protocol.prefill_types import PartPlan

SLACK_ITEMS: Final = 4
"""How many more open items than the least loaded encoder an item's home may have."""


class EncoderLoad(NamedTuple):
    """An encoder that may get work: its session is open, not suspect, not draining."""

    session: SessionId
    incarnation: Incarnation
    open_items: int
    """Items that this node asked of it and that have not ended."""
    max_items_per_part: int


def plan_parts(
    items: Sequence[Item], encoders: Sequence[EncoderLoad], max_items: int
) -> tuple[PartPlan, ...]:
    """Partition the items over the encoders; without any, parts without a session."""
    encoders = [e for e in encoders if e.max_items_per_part > 0]
    if not encoders:
        every = tuple(range(len(items)))
        return tuple(
            PartPlan(every[first : first + max_items], None) for first in range(0, len(items), max_items)
        )
    open_items = {encoder.session: encoder.open_items for encoder in encoders}
    chosen: dict[SessionId, list[int]] = {}
    for index, item in enumerate(items):
        session = _home(item.sha256, encoders, open_items)
        open_items[session] += 1
        chosen.setdefault(session, []).append(index)
    limits = {encoder.session: min(max_items, encoder.max_items_per_part) for encoder in encoders}
    return tuple(
        PartPlan(tuple(indices[first : first + limits[session]]), session)
        for session, indices in chosen.items()
        for first in range(0, len(indices), limits[session])
    )


def choose_encoder(
    items: Sequence[Item], encoders: Sequence[EncoderLoad], avoid: Sequence[SessionId]
) -> SessionId | None:
    """An encoder for one part of a retry: another than `avoid` if there is one."""
    able = [e for e in encoders if e.max_items_per_part >= len(items)]
    others = [e for e in able if e.session not in avoid] or able
    if not others:
        return None
    return _home(items[0].sha256, others, {e.session: e.open_items for e in others})


def _home(sha256: bytes, encoders: Sequence[EncoderLoad], open_items: dict[SessionId, int]) -> SessionId:
    if len(encoders) == 1:
        return encoders[0].session
    least = min(open_items.values())
    light = [e for e in encoders if open_items[e.session] <= least + SLACK_ITEMS]
    return max(light, key=lambda e: _weight(sha256, e.incarnation)).session


def _weight(sha256: bytes, incarnation: Incarnation) -> bytes:
    number = (incarnation & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")  # a peer may name any integer
    return hashlib.blake2b(sha256 + number, digest_size=8).digest()
