"""What the coupled nodes are made of: a table of machines, a session's two queues, pictures, faults."""

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from machines import spec

from epd.protocol.ids import SessionId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import EmbeddingSpec, Item, Probe
from epd.protocol.registry import MACHINES
from epd.protocol.unhandled import UNHANDLED
from epd.runtime.machines import Machine

if TYPE_CHECKING:
    from coupled_encoder import EncoderNode
    from coupled_world import World

DEADLINE_S = 10_000.0
"""Far away: a request that meets it has hung."""
STAGING_SLOTS = 3
POOL_SLOTS = 5
KINDS = 4
"""Different pictures; few, so that forwards are shared."""


class Faults(NamedTuple):
    """What goes wrong: how many times in a run, and with what probability at each chance."""

    session_ends: int = 0
    crashes: int = 0
    evictions: int = 0
    cancels: int = 0
    drains: int = 0
    read_fails: float = 0.0
    read_hangs: float = 0.0
    forward_fails: float = 0.0
    forward_hangs: float = 0.0
    media_fail: float = 0.0
    early_timers: bool = False


def picture(kind: int) -> Item:
    return Item(Probe("image", 28 * (kind + 1), 28), bytes([kind]) * 32, 100)


def size_of(item: Item) -> EmbeddingSpec:
    return spec(1 + item.sha256[0])


class Table:
    """Machines of one kind; like the runtime's, an event fed by an effect waits for the other effects."""

    def __init__(
        self, world: "World", machine: Machine, limits: Any, perform: Callable[[Any, Effect], None]
    ) -> None:
        self._world, self._machine, self._limits, self._perform = world, machine, limits, perform
        kind = next(kind for kind, spec in MACHINES.items() if spec.module is machine)
        self._unhandled = UNHANDLED[kind, "TRANSITIONS"]
        self.states: dict[Any, Any] = {}
        self._waiting: deque[tuple[Hashable, Event]] = deque()
        self._busy = False

    def state(self, key: Hashable) -> Any:
        return self.states.get(key, self._machine.INITIAL)

    def feed(self, key: Hashable, event: Event) -> None:
        self._waiting.append((key, event))
        if self._busy:
            return
        self._busy = True
        while self._waiting:
            key, event = self._waiting.popleft()
            state = self.state(key)
            reason = self._unhandled.get((type(state), type(event)))
            assert reason is None or reason.kind == "ignored", f"{state!r}, {event!r}: {reason}"
            step = self._machine.step(state, event, self._world.now_s, self._limits)
            hash(step.state)
            self.states.pop(key, None)
            if not step.state.final and step.state != self._machine.INITIAL:
                self.states[key] = step.state
            for effect in step.effects:
                self._perform(key, effect)
        self._busy = False


class Session:
    def __init__(self, world: "World", number: SessionId, node: "EncoderNode") -> None:
        self.world, self.id, self.node = world, number, node
        self.queue_up, self.queue_down = ("up", number), ("down", number)
        self.ended = self.greeted = False

    def up(self, handler: Callable[..., None], *args: Any) -> None:
        if not self.ended:
            self.world.tell(self.queue_up, handler, *args)

    def down(self, handler: Callable[..., None], *args: Any) -> None:
        if not self.ended:
            self.world.tell(self.queue_down, handler, *args)
