"""A bare machine on a virtual clock, and small values to feed it.

Every step is checked: the state can be hashed, its deadline is a finite time or None, a final state
waits for nothing, a deadline that has passed moves when it is told so.
"""

import math
from collections.abc import Iterable
from typing import Any, TypeVar

from epd.protocol.ids import Attempt, LeaseId, Part, RegionId, Seal, SessionId
from epd.protocol.machine import Effect, Event, Ignored, TimerExpired
from epd.protocol.messages import AuxTensor, EmbeddingSpec, ErrorValue, Item, Probe, ReadyItem, Source
from epd.runtime.machines import Machine

START_S = 100.0
LEASE = LeaseId(7)
NEAR, FAR = SessionId(11), SessionId(22)
"""Two sessions, of two encoders (or, for an encoder, of two prefill nodes)."""
FIRST, SECOND = Part(0), Part(1)
ONE, TWO = Attempt(1), Attempt(2)

E = TypeVar("E")


class Bench:
    """Feeds one machine; `effects` are all so far."""

    def __init__(self, machine: Machine, limits: Any) -> None:
        self.machine = machine
        self.limits = limits
        self.now_s = START_S
        self.state = machine.INITIAL
        self.effects: list[Effect] = []

    def feed(self, *events: Event) -> list[Effect]:
        """The effects of these events, in order."""
        before = len(self.effects)
        for event in events:
            step = self.machine.step(self.state, event, self.now_s, self.limits)
            self.state = step.state
            self.effects.extend(step.effects)
            self.check()
        return self.effects[before:]

    def advance(self, seconds: float) -> None:
        """Virtual time goes on; no timer is fed."""
        self.now_s += seconds

    def jump_to_deadline(self) -> list[Effect]:
        """What the machine does when the deadline of its state has passed."""
        assert self.state.deadline_s is not None, f"{self.state!r} waits for nothing"
        self.now_s = max(self.now_s, self.state.deadline_s)
        before = self.state
        effects = self.feed(TimerExpired())
        assert self.state != before, "its own TimerExpired left the deadline where it was"
        return effects

    def ignores(self, *events: Event) -> bool:
        """Whether these events change nothing and have no effects but being counted."""
        before = self.state
        effects = self.feed(*events)
        return self.state == before and all(isinstance(effect, Ignored) for effect in effects)

    def count(self, kind: type[Effect]) -> int:
        return len(self.all(kind))

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def check(self) -> None:
        hash(self.state)
        deadline_s = self.state.deadline_s
        assert deadline_s is None or math.isfinite(deadline_s)
        assert not (self.state.final and deadline_s is not None)


def spec(rows: int = 4, dim: int = 8) -> EmbeddingSpec:
    grid = AuxTensor("grid_thw", "int64", (3,), rows.to_bytes(24, "little", signed=True))
    return EmbeddingSpec(rows, dim, "float32", (grid,))


def item(number: int = 0) -> Item:
    return Item(Probe("image", 28 * (number + 1), 28), bytes([number % 256]) * 32, 1000 + number)


def items(count: int) -> tuple[Item, ...]:
    return tuple(map(item, range(count)))


def specs(numbers: Iterable[int]) -> tuple[EmbeddingSpec, ...]:
    """The sizes of these items, each different."""
    return tuple(spec(4 + number) for number in numbers)


def source(number: int = 0, seal: int = 1) -> Source:
    return Source(RegionId(0), 4096 * number, specs([number])[0].nbytes, Seal(seal))


def ready(number: int = 0, seal: int = 1) -> ReadyItem:
    """Item `number` of the request, staged."""
    return ReadyItem(source(number, seal), specs([number])[0])


def failure(code: str = "forward_failed", *, retryable: bool = True, item: int | None = None) -> ErrorValue:
    return ErrorValue(code, retryable, "on purpose", item)
