"""A forward worker in virtual time: slow, wrong, dead or stuck as chance has it."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from epd.forward.base import ForwardItem, ItemResult, WorkerEvents
from epd.memory.region import Region
from epd.protocol.errors import ForwardFailed
from epd.sim.watch import overlap
from epd.testing.synthetic import pattern

_LOAD_S: Final = 0.5
_FORWARD_S: Final = 2e-3
_KILL_S: Final = 0.01


class Troubles:
    """What may go wrong with a forward, as chances; none of it from `heal` on."""

    def __init__(self, *, fails: float = 0.004, dies: float = 0.004, sticks: float = 0.001) -> None:
        self.fails = fails
        self.dies = dies
        self.sticks = sticks

    def heal(self) -> None:
        self.fails = self.dies = self.sticks = 0.0


class SimWorker:
    """See `ForwardWorker`. Writes each item's `pattern`: its first half some time before the rest."""

    pid = None

    def __init__(self, rng: random.Random, troubles: Troubles, provoked: Callable[[str], None]) -> None:
        self._rng = rng
        self._troubles = troubles
        self._provoked = provoked
        self._running: list[asyncio.TimerHandle] = []
        self._items: Sequence[ForwardItem] = ()
        """Of the forward that runs."""
        self._is_ready = False
        self._regions: Sequence[Region]
        self._events: WorkerEvents
        self._loop: asyncio.AbstractEventLoop

    def start(self, regions: Sequence[Region], events: WorkerEvents) -> None:
        self._regions = regions
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._load()

    def submit(self, batch: int, items: Sequence[ForwardItem], *, digest: bool) -> None:
        if not self._is_ready:
            return  # its death, which the caller has yet to read, answers
        self._items = items
        seconds = self._rng.expovariate(1.0) * _FORWARD_S * len(items)
        luck, troubles = self._rng.random(), self._troubles
        if luck < troubles.sticks:
            self._provoked("forward_stuck")
            self._later(seconds, self._write, items, 2)
        elif luck < troubles.sticks + troubles.dies:
            self._provoked("worker_died")
            self._later(seconds / 2, self._write, items, 2)
            self._later(seconds, self._die)
        else:
            self._later(seconds / 2, self._write, items, 2)
            self._later(seconds, self._end, batch, items, digest)

    def writes(self, address: int, nbytes: int) -> bool:
        """Whether the forward that runs may write there."""
        places = [(self._regions[i.region].address + i.offset, i.spec.nbytes) for i in self._items]
        return any(overlap(address, nbytes, *place) for place in places)

    def kill(self) -> None:
        if self._is_ready:
            self._cancel()
            self._later(_KILL_S, self._die)

    def stop(self) -> None:
        self._cancel()
        self._is_ready = False

    def _load(self) -> None:
        self._later(self._rng.expovariate(1.0) * _LOAD_S, self._be_ready)

    def _be_ready(self) -> None:
        self._running.clear()
        self._is_ready = True
        self._events.worker_ready()

    def _die(self) -> None:
        self._cancel()
        self._items = ()
        self._is_ready = False
        self._events.worker_died("killed")
        self._load()

    def _end(self, batch: int, items: Sequence[ForwardItem], digest: bool) -> None:
        self._running.clear()
        self._write(items, 1)
        self._items = ()
        self._events.batch_ended(batch, [self._result(item, digest) for item in items])

    def _result(self, item: ForwardItem, digest: bool) -> ItemResult:
        if self._rng.random() < self._troubles.fails:
            self._provoked("forward_failed")
            return ItemResult(ForwardFailed("out of luck").as_value(), None)
        if not digest:
            return ItemResult(None, None)
        view = self._regions[item.region].view
        return ItemResult(None, xxhash.xxh3_128_digest(view[item.offset : item.offset + item.spec.nbytes]))

    def _write(self, items: Sequence[ForwardItem], part: int) -> None:
        """The whole, or the first half of it."""
        for item in items:
            nbytes = item.spec.nbytes // part
            view = self._regions[item.region].view
            view[item.offset : item.offset + nbytes] = pattern(item.media, nbytes)

    def _later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        self._running.append(self._loop.call_later(seconds, call, *arguments))

    def _cancel(self) -> None:
        for timer in self._running:
            timer.cancel()
        self._running.clear()
