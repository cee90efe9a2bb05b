"""What a node with nothing to do should not hold (I4), by its own word."""

import asyncio
from collections.abc import Mapping
from typing import Final

from epd.client import NodeClient

_NOT_HELD: Final = (
    "_free_nbytes",
    "registrations",
    "sessions",
    "sockets",
    "timers",
    "segments",
    "encoders",
    "machines.push",
    "readers",
)
"""Counts of an idle node that are not zero: free memory, and what its connected peers cost."""


def held(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts of an `Inventory` that are residue."""
    return {
        name: count
        for name, count in counts.items()
        if count and not name.endswith(_NOT_HELD) and not name.startswith("rejected_frames")
    }


async def empty(address: str, limit_s: float = 30.0) -> dict[str, int]:
    """Ask a node again and again until it holds nothing; all its counts then.

    Raises `AssertionError`, naming what it holds, after `limit_s`.
    """
    async with NodeClient(address) as client:
        counts: dict[str, int] = {}
        try:
            async with asyncio.timeout(limit_s):
                while held(counts := (await client.inventory()).counts):
                    pass
        except TimeoutError:
            raise AssertionError(f"{address} still holds {held(counts)}") from None
        return counts
