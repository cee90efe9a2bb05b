"""Reads trace files into the steps of nodes, with the states before and after each.

Files of one recording (`FILE`, `FILE.1`, ...) become one node. What is damaged is read up to the damage.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from epd.protocol.machine import Effect, Event
from epd.protocol.registry import MachineSpec, machines_of
from epd.protocol.trace import (
    Key,
    LimitsRecord,
    Record,
    StateRecord,
    TraceHeader,
    TraceReader,
    UnreadableTrace,
)


class TracedStep(NamedTuple):
    """One step; `now_s` is the node's own clock. `effects` are the recorded ones."""

    kind: str
    key: Key
    now_s: float
    event: Event
    effects: tuple[Effect, ...]
    before: Any
    after: Any


class NodeTrace:
    """The steps of one incarnation. `whole`: from its first step on, not only from a later file on."""

    def __init__(self, header: TraceHeader) -> None:
        self.header = header
        self.steps: list[TracedStep] = []
        self.files: list[Path] = []
        self.torn = False
        self.whole = header.file == 0

    @property
    def name(self) -> str:
        return str(self.header.node)


class Damage(NamedTuple):
    """What could not be read, and why, in one line."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Loaded(NamedTuple):
    nodes: list[NodeTrace]
    damages: list[Damage]


def load(paths: Sequence[Path]) -> Loaded:
    """All steps of these files, as far as they can be read."""
    damages: list[Damage] = []
    read: list[tuple[TraceHeader, Path]] = []
    for path in dict.fromkeys(paths):
        try:
            with path.open("rb") as file:
                read.append((TraceReader(file.read).header, path))
        except OSError as error:
            damages.append(Damage(path, error.strerror or str(error)))
        except UnreadableTrace as error:
            damages.append(Damage(path, error.message))
    read.sort(key=lambda one: one[0].file)
    nodes: dict[int, _Reading] = {}
    for header, path in read:
        reading = nodes.setdefault(header.incarnation, _Reading(header))
        damage = reading.add(header, path)
        if damage is not None:
            damages.append(damage)
    return Loaded([reading.node for reading in nodes.values()], damages)


class _Reading:
    """Steps the machines of one node, only to know their states."""

    def __init__(self, header: TraceHeader) -> None:
        self.node = NodeTrace(header)
        self._machines = machines_of(header.logic_version)
        self._limits: dict[str, Any] = {}
        self._states: dict[tuple[str, Key], Any] = {}
        self._next_file = header.file

    def add(self, header: TraceHeader, path: Path) -> Damage | None:
        if header.file != self._next_file:
            self._states.clear()
            self.node.whole = False
        self._next_file = header.file + 1
        self.node.files.append(path)
        with path.open("rb") as file:
            reader = TraceReader(file.read)
            try:
                for record in reader:
                    self._take(record)
            except UnreadableTrace as error:
                return Damage(path, error.message)
            except msgspec.MsgspecError as error:
                return Damage(path, f"step {len(self.node.steps)} is damaged: {error}")
        self.node.torn = reader.torn
        return None

    def _take(self, record: Record) -> None:
        spec = self._spec(record.kind)
        if isinstance(record, LimitsRecord):
            self._limits[record.kind] = spec.decode_limits(record.limits)
        elif isinstance(record, StateRecord):
            self._states[record.kind, record.key] = spec.decode_state(record.state)
        else:
            event, effects = spec.decode_event(record.event), spec.decode_effects(record.effects)
            before = self._states.get((record.kind, record.key), spec.module.INITIAL)
            after = self._after(spec, record.kind, before, event, record.now_s)
            self._states[record.kind, record.key] = spec.module.INITIAL if after.final else after
            step = TracedStep(record.kind, record.key, record.now_s, event, effects, before, after)
            self.node.steps.append(step)

    def _after(self, spec: MachineSpec, kind: str, before: Any, event: Event, now_s: float) -> Any:
        limits = self._limits.get(kind)
        if limits is None:
            raise UnreadableTrace(f"no limits of {kind!r} before its steps", reason="limits")
        try:
            return spec.module.step(before, event, now_s, limits).state
        except Exception:  # whatever a machine with a bug raises: `epd replay` says where
            return before

    def _spec(self, kind: str) -> MachineSpec:
        spec = self._machines.get(kind)
        if spec is None:
            raise UnreadableTrace(f"steps of an unknown machine {kind!r}", reason="kind")
        return spec
