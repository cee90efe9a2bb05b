"""Feeds a recorded trace to the machines again, and finds the first step that comes out otherwise."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from epd.protocol.machine import Effect, Event
from epd.protocol.registry import MACHINES, MachineSpec
from epd.protocol.trace import Key, LimitsRecord, Record, StateRecord, StepRecord, UnreadableTrace


class Divergence(msgspec.Struct, frozen=True):
    """The first step with other effects than recorded; `index` counts steps from 0.

    `raised` is set instead of `got` if the machine raises now (and did when it was recorded, if
    nothing was `expected`: the node recorded that step and ended).
    """

    index: int
    kind: str
    key: Key
    event: Event
    expected: tuple[Effect, ...]
    got: tuple[Effect, ...]
    raised: str | None = None


class _Replayer:
    def __init__(self, machines: Mapping[str, MachineSpec]) -> None:
        self._machines = machines
        self._limits: dict[str, Any] = {}
        self._states: dict[tuple[str, Key], Any] = {}

    def declare(self, record: LimitsRecord) -> None:
        self._limits[record.kind] = self._spec(record.kind).decode_limits(record.limits)

    def stand(self, record: StateRecord) -> None:
        """The trace goes on from another file: its machine is there already."""
        self._states[record.kind, record.key] = self._spec(record.kind).decode_state(record.state)

    def step(self, index: int, record: StepRecord) -> Divergence | None:
        kind, key, now_s, raw_event, raw_effects = record
        spec = self._spec(kind)
        limits = self._limits.get(kind)
        if limits is None:
            raise UnreadableTrace(f"step {index}: no limits of {kind!r} before it", reason="limits")
        event = spec.decode_event(raw_event)
        expected = spec.decode_effects(raw_effects)
        module = spec.module
        where = (kind, key)
        try:
            state, got = module.step(self._states.get(where, module.INITIAL), event, now_s, limits)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            return Divergence(index, kind, key, event, expected, (), raised)
        if got != expected:
            return Divergence(index, kind, key, event, expected, got)
        if state.final:
            self._states.pop(where, None)
        else:
            self._states[where] = state
        return None

    def _spec(self, kind: str) -> MachineSpec:
        spec = self._machines.get(kind)
        if spec is None:
            raise UnreadableTrace(f"steps of an unknown machine {kind!r}", reason="kind")
        return spec


def replay(records: Iterable[Record], machines: Mapping[str, MachineSpec] = MACHINES) -> Divergence | None:
    """Step every machine through its recorded events; the first difference, or None.

    Stops at the first difference. Raises `UnreadableTrace` for records that fit no machine.
    """
    replayer = _Replayer(machines)
    index = 0
    for record in records:
        try:
            if isinstance(record, LimitsRecord):
                replayer.declare(record)
                continue
            if isinstance(record, StateRecord):
                replayer.stand(record)
                continue
            difference = replayer.step(index, record)
        except msgspec.MsgspecError as error:
            message = f"step {index}, {record.kind!r}: {error}"
            raise UnreadableTrace(message, reason="corrupt") from None
        if difference is not None:
            return difference
        index += 1
    return None
