"""What a run does, from its seed alone: the requests, and which fault comes after which of them.

Faults are tied to the number of a request, not to a clock, so that one seed always gives one schedule.
"""

import itertools
import random
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Final, Literal, NamedTuple

KIB: Final = 1024
MIN_REQUEST_NBYTES: Final = 4 * KIB
MAX_REQUEST_NBYTES: Final = 32 * KIB * KIB
MAX_ITEMS: Final = 4
ENCODERS: Final = 2

CANCELLED: Final = 0.05
HURRIED: Final = 0.01
"""Requests with a deadline that many will miss."""
REPEATED: Final = 0.1
"""Items that were asked for shortly before, and are shared or still there."""

Kind = Literal["sigkill", "sigstop", "cut", "delay", "drop", "duplicate", "early_reuse"]
EVERY: Final[dict[Kind, int]] = {
    "sigkill": 450,
    "sigstop": 450,
    "cut": 400,
    "delay": 300,
    "drop": 300,
    "duplicate": 300,
    "early_reuse": 60,
}
"""One fault of a kind for so many requests; at least one of each."""
NEIGHBOUR: Final = 0.25
"""Of the kills and stops so many hit the other prefill node, the rest an encoder."""


class Fault(NamedTuple):
    """`after` requests have been submitted. `victim` is an encoder's number, or `ENCODERS` for the other
    prefill node. `seconds` of a stop beyond the time after which a peer is dead, or of a delay."""

    after: int
    kind: Kind
    victim: int
    seconds: float


class Request(NamedTuple):
    """`items` are (content, bytes); `cancel_s` after submit, if at all; `hold_s` before release."""

    number: int
    items: tuple[tuple[int, int], ...]
    deadline_s: float
    cancel_s: float | None
    hold_s: float


def requests(seed: int, count: int) -> list[Request]:
    return list(islice(request_stream(seed), count))


def request_stream(seed: int, max_nbytes: int = MAX_REQUEST_NBYTES) -> Iterator[Request]:
    """Without an end."""
    rng = random.Random(f"requests {seed}")
    recent: list[tuple[int, int]] = []
    contents = 0
    for number in itertools.count():
        nbytes = _log_uniform(rng, MIN_REQUEST_NBYTES, max_nbytes)
        items: list[tuple[int, int]] = []
        for share in _split(rng, nbytes, rng.randint(1, MAX_ITEMS)):
            fits = [item for item in recent if item[1] <= share]
            if fits and rng.random() < REPEATED:
                items.append(rng.choice(fits))
                continue
            contents += 1
            items.append((contents, share))
        recent = (recent + items)[-8:]
        cancel_s = rng.uniform(0, 0.05) if rng.random() < CANCELLED else None
        deadline_s = rng.uniform(0.02, 0.5) if rng.random() < HURRIED else 60.0
        yield Request(number, tuple(items), deadline_s, cancel_s, rng.uniform(0, 0.05))


def faults(seed: int, count: int) -> list[Fault]:
    """In the order in which they come; none in the first and last twentieth of the requests."""
    rng = random.Random(f"faults {seed}")
    made: list[Fault] = []
    for kind, every in EVERY.items():
        for _ in range(max(1, -(-count // every))):
            after = rng.randrange(count // 20, max(count // 20 + 1, count - count // 20))
            on_neighbour = kind in ("sigkill", "sigstop") and rng.random() < NEIGHBOUR
            victim = ENCODERS if on_neighbour else rng.randrange(ENCODERS)
            made.append(Fault(after, kind, victim, rng.uniform(0.1, 1.0)))
    return sorted(made)


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return int(low * (high / low) ** rng.random())


def _split(rng: random.Random, nbytes: int, parts: int) -> list[int]:
    """Sizes, multiples of 4 and at least 4, that sum to about `nbytes`."""
    cuts = sorted(rng.random() for _ in range(parts - 1))
    edges = [0.0, *cuts, 1.0]
    return [max(4, int((end - start) * nbytes) & ~3) for start, end in pairwise(edges)]
