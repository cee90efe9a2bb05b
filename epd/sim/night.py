"""Many hours, in several processes: each is a run of its own, so any of them can be run again alone."""

import logging
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, Final

import xxhash

from epd.observe.log import configure_logging
from epd.protocol.errors import EpdError
from epd.sim.hour import HOUR_S, Hour, simulate_hour

_TOLD: Final = 20
"""Violations in the report; all of them are told when they happen."""


class NightCutShort(EpdError):
    """A process of the night was killed; `hours` says how many had ended."""

    code = "night_cut_short"


class Night:
    """What came of the hours so far. `last` is the one that ended last."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.last: Hour
        self.violations: list[str] = []
        self._digest = xxhash.xxh3_128()
        self._sums: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._provoked: Counter[str] = Counter()
        self._virtual_s = 0.0

    @property
    def ok(self) -> bool:
        return not (self._sums["lost"] or self._sums["corrupted_nbytes"] or self._sums["bad_hours"])

    def add(self, hour: Hour) -> None:
        self.last = hour
        self._virtual_s += hour.virtual_s
        self._digest.update(hour.digest.encode())
        self._failed.update(hour.failed)
        self._provoked.update(hour.provoked)
        self._sums.update(
            transfers=hour.transfers,
            delivered=hour.delivered,
            delivered_nbytes=hour.delivered_nbytes,
            lost=hour.lost,
            corrupted_nbytes=hour.corrupted_nbytes,
            residue=sum(hour.residue.values()),
            bad_hours=not hour.ok,
            hours=1,
        )
        self.violations += [f"hour {hour.hour}: {what}" for what in hour.violations]

    def report(self) -> dict[str, Any]:
        """See `epd simulate --json`. `digest` is of every step of every node of every hour."""
        sums = self._sums
        return {
            "ok": self.ok,
            "seed": self.seed,
            "hours": sums["hours"],
            "virtual_hours": round(self._virtual_s / 3600, 3),
            "transfers": sums["transfers"],
            "delivered": sums["delivered"],
            "delivered_nbytes": sums["delivered_nbytes"],
            "failed": dict(sorted(self._failed.items())),
            "lost": sums["lost"],
            "corrupted_nbytes": sums["corrupted_nbytes"],
            "residue": sums["residue"],
            "violations": self.violations[:_TOLD],
            "provoked": dict(sorted(self._provoked.items())),
            "digest": self._digest.hexdigest(),
        }


def simulate(
    seed: int, hours: float, first: int, jobs: int, traces: Path | None, tell: Callable[[Night], None]
) -> Night:
    """Run `hours` from number `first` on; `tell` is called after each, in their order.

    Raises `NightCutShort` if one of the processes is killed.
    """
    night = Night(seed)
    lengths = list(_lengths(hours, first))
    try:
        for hour in _hours(seed, lengths, jobs, traces):
            night.add(hour)
            tell(night)
    except BrokenProcessPool as error:
        done = night.report()["hours"]
        raise NightCutShort(
            f"a process was killed (is there memory for {jobs}?) after {done} whole hours, "
            f"{'all' if night.ok else 'not all'} right; go on with --first {first + done}",
            hours=done,
        ) from error
    return night


def _lengths(hours: float, first: int) -> Iterator[tuple[int, float]]:
    """The number of each hour, and its virtual seconds: the last one may be a part of an hour."""
    left_s = hours * HOUR_S
    while left_s > 0:
        yield first, min(left_s, HOUR_S)
        first, left_s = first + 1, left_s - HOUR_S


def _hours(seed: int, lengths: list[tuple[int, float]], jobs: int, traces: Path | None) -> Iterable[Hour]:
    work = partial(_hour, seed, traces)
    if jobs == 1 or len(lengths) == 1:
        yield from map(work, lengths)
        return
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(lengths)), fresh, _begin) as processes:
        yield from processes.map(work, lengths)


def _hour(seed: int, traces: Path | None, length: tuple[int, float]) -> Hour:
    number, seconds = length
    folder = None if traces is None else traces / f"hour-{number}"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return simulate_hour(seed, number, seconds, folder)


def _begin() -> None:
    """In a process of the night: it ends with the one that started it, whatever becomes of that."""
    be_quiet()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def be_quiet() -> None:
    """Nodes that are killed and stopped have much to say."""
    configure_logging(level=logging.CRITICAL)
