"""All machines by kind: what a trace needs to be read and replayed.

A trace names the logic version of the machines that wrote it. What changes the effects of a machine for
events that a trace may hold gets the next `LOGIC_VERSION`; the machine as it was stays as a module and is
entered in `FORMER`, and traces of that version and older ones are replayed by it for ever.
"""

from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from epd.protocol import encoder, group, jobs, prefill, push, rank, reads, session, slots, sources
from epd.protocol.machine import Effect, Event, State, Step


class MachineModule(Protocol):
    """What a module of the protocol exports to be a machine."""

    @property
    def INITIAL(self) -> Any: ...  # noqa: N802 - the names of the module

    @property
    def AnyState(self) -> Any: ...  # noqa: N802 - as above

    @property
    def AnyEvent(self) -> Any: ...  # noqa: N802

    @property
    def AnyEffect(self) -> Any: ...  # noqa: N802

    @property
    def Limits(self) -> type[msgspec.Struct]: ...  # noqa: N802

    @property
    def step(self) -> Callable[[Any, Any, float, Any], Step]: ...


class MachineSpec:
    """One machine module and the types of what it takes and gives.

    The decoders raise `msgspec.MsgspecError`.
    """

    def __init__(self, module: MachineModule) -> None:
        self.module = module
        self.state_type: Any = module.AnyState
        self.event_type: Any = module.AnyEvent
        self.effect_type: Any = module.AnyEffect
        self.limits_type: type[msgspec.Struct] = module.Limits
        self._states: msgspec.msgpack.Decoder[State] = msgspec.msgpack.Decoder(self.state_type)
        self._events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(self.event_type)
        effects_type: Any = GenericAlias(tuple, (self.effect_type, ...))
        self._effects: msgspec.msgpack.Decoder[tuple[Effect, ...]] = msgspec.msgpack.Decoder(effects_type)
        self._limits = msgspec.msgpack.Decoder(self.limits_type)

    def decode_state(self, raw: bytes | msgspec.Raw) -> State:
        return self._states.decode(raw)

    def decode_event(self, raw: bytes | msgspec.Raw) -> Event:
        return self._events.decode(raw)

    def decode_effects(self, raw: bytes | msgspec.Raw) -> tuple[Effect, ...]:
        return self._effects.decode(raw)

    def decode_limits(self, raw: bytes | msgspec.Raw) -> msgspec.Struct:
        return self._limits.decode(raw)


MACHINES: Final[Mapping[str, MachineSpec]] = {
    "encoder": MachineSpec(encoder),
    "group": MachineSpec(group),
    "jobs": MachineSpec(jobs),
    "prefill": MachineSpec(prefill),
    "push": MachineSpec(push),
    "rank": MachineSpec(rank),
    "reads": MachineSpec(reads),
    "session": MachineSpec(session),
    "slots": MachineSpec(slots),
    "sources": MachineSpec(sources),
}
"""By the kind under which the runtime hosts and records them."""


class Former(NamedTuple):
    """How the machine `kind` was, up to the logic version `until`."""

    kind: str
    until: int
    spec: MachineSpec


FORMER: Final[Sequence[Former]] = ()
"""None was changed so far."""


def machines_of(logic_version: int, former: Sequence[Former] = FORMER) -> Mapping[str, MachineSpec]:
    """The machines by which a trace of this version is replayed."""
    machines = dict(MACHINES)
    for was in sorted(former, key=lambda was: was.until, reverse=True):
        if logic_version <= was.until:
            machines[was.kind] = was.spec
    return machines
