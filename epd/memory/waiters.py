"""Who waits for room, in order, and who may pass whom.

The first in the queue gets room first. While it does not fit, a smaller one that fits may pass it, or
one large request would idle the whole pool; but only until the first has waited `ageing_s`. Then
nobody passes, memory that comes free stays free, and the first is served after finitely many
releases. Pure: time is an argument.
"""

from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

from epd.memory.pool import Extent, Pool

Key = TypeVar("Key", bound=Hashable)

LOOK_AHEAD: Final = 64
"""How many behind the first are tried: each release costs at most this many tries, however long the
queue is."""


class _Waiter(NamedTuple):
    sizes: tuple[int, ...]
    nbytes: int
    since_s: float


class Waiters(Generic[Key]):
    """A queue of requests for room, each known by its key."""

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._queue: dict[Key, _Waiter] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, key: Key) -> bool:
        return key in self._queue

    def push(self, key: Key, sizes: Sequence[int], now_s: float) -> None:
        """Queue a request for one extent of each of `sizes` (bytes), all or none.

        The caller has asked `Pool.fits_empty`: what can never fit would stop everybody behind it.
        """
        assert key not in self._queue, f"{key} waits already"
        self._queue[key] = _Waiter(tuple(sizes), sum(sizes), now_s)

    def withdraw(self, key: Key) -> bool:
        """Forget a request; whether it was waiting. If so, `admit` next: it may have been in the way."""
        return self._queue.pop(key, None) is not None

    def admit(self, pool: Pool, now_s: float) -> list[tuple[Key, tuple[Extent, ...]]]:
        """Take room from `pool` for all who may have it now, in the order in which they get it."""
        admitted: list[tuple[Key, tuple[Extent, ...]]] = []
        while self._queue:
            key, waiter = next(iter(self._queue.items()))
            extents = pool.take(waiter.sizes)
            if extents is None:
                if now_s - waiter.since_s < self._ageing_s:
                    admitted += self._pass(waiter, pool)
                break
            del self._queue[key]
            admitted.append((key, extents))
        return admitted

    def _pass(self, first: _Waiter, pool: Pool) -> list[tuple[Key, tuple[Extent, ...]]]:
        passed: list[tuple[Key, tuple[Extent, ...]]] = []
        for key, waiter in list(islice(self._queue.items(), 1, 1 + LOOK_AHEAD)):
            if waiter.nbytes < first.nbytes and (extents := pool.take(waiter.sizes)) is not None:
                del self._queue[key]
                passed.append((key, extents))
        return passed
