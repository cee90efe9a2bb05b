"""What every actor of one node shares: time, timers, the recorder, and the hosting of machines."""

import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from epd.protocol.machine import Effect, State
from epd.runtime.clock import Clock
from epd.runtime.machines import MachineTable, Observe
from epd.runtime.recorder import Recorder
from epd.runtime.timers import Timers

Perform = Callable[[Any, tuple[Effect, ...]], None]


class Runtime:
    def __init__(
        self,
        clock: Clock,
        timers: Timers,
        recorder: Recorder | None,
        randbits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self.clock = clock
        self.timers = timers
        self.recorder = recorder
        self.randbits = randbits
        self.observers: Mapping[str, tuple[Observe, ...]] = {}
        """By kind of machine; for tables made from now on."""
        self._tables: list[MachineTable] = []
        self._counted: list[MachineTable] = []

    def machines(
        self, kind: str, machine: Any, limits: Any, perform: Perform, *, counted: bool = True
    ) -> MachineTable:
        """A table of machines of one kind; recorded and timed like all others. Not `counted`: they live as
        long as the node, and are no residue."""
        table = MachineTable(kind, machine, limits, self.clock, self.timers, self.recorder, perform)
        table.observers = self.observers.get(kind, ())
        self._tables.append(table)
        if counted:
            self._counted.append(table)
        return table

    def live(self) -> Iterator[tuple[str, Hashable, State]]:
        """Kind, key and state of every machine of these tables that has one."""
        for table in self._tables:
            yield from table.live()

    def counts(self) -> dict[str, int]:
        """Live machines by kind, and live timers."""
        counts = {f"machines.{table.kind}": len(table) for table in self._counted}
        counts["timers"] = len(self.timers)
        return counts
