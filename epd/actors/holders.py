"""Who holds a pool that has no room: for the error of who waited in vain, and for the log."""

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from epd.memory.pool import Extent, Pool, aligned
from epd.protocol.errors import MAX_MESSAGE_CHARS
from epd.protocol.messages import ErrorValue

_log = structlog.get_logger()

_NAMED: Final = 5
"""Of the largest holders, in the log."""


class Holder(NamedTuple):
    """A request with a lease, by the state it is in."""

    request_id: str
    state: str
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        return sum(aligned(extent.nbytes) for extent in self.extents)


def say_who_holds(pool: Pool, holders: Sequence[Holder], waited: str, error: ErrorValue) -> ErrorValue:
    """The error with bytes by state; names only in the log: other clients' are not the waiter's business."""
    by_state: Counter[str] = Counter()
    for holder in holders:
        by_state[holder.state] += holder.nbytes
    ended_nbytes = pool.total_nbytes - pool.free_nbytes - by_state.total()
    if ended_nbytes > 0:  # of requests that have ended: their reads are not terminal yet
        by_state["quarantined"] = ended_nbytes
    largest = sorted(holders, key=lambda holder: holder.nbytes, reverse=True)[:_NAMED]
    _log.warning(
        "pool exhausted",
        request=waited,
        pool_nbytes=pool.total_nbytes,
        largest_free_nbytes=pool.largest_free_nbytes,
        held_nbytes=dict(by_state),
        largest_holders=[(one.request_id, one.state, one.nbytes) for one in largest],
    )
    held = ", ".join(f"{nbytes} B {state}" for state, nbytes in by_state.items()) or "nothing"
    message = (
        f"{error.message}: {held}, of {pool.total_nbytes} B;"
        f" the largest free piece has {pool.largest_free_nbytes} B"
    )
    return replace(error, message=message[:MAX_MESSAGE_CHARS])
