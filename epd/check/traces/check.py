"""Replays recorded runs and checks them: identical, within the tables, within the invariants."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from epd.check.traces.findings import Finding
from epd.check.traces.node_rules import check_node
from epd.check.traces.pair_rules import check_pairs
from epd.observe.timeline.load import Damage, load
from epd.observe.timeline.merge import merge
from epd.protocol.registry import machines_of
from epd.protocol.replay import Divergence, replay
from epd.protocol.trace import Record, StepRecord, TraceReader, UnreadableTrace


class Replayed(NamedTuple):
    """One file. `steps` came out as recorded before the `divergence` or the `damage`, if there is one."""

    path: Path
    node: str
    steps: int
    torn: bool
    divergence: Divergence | None
    damage: Damage | None


class Checked(NamedTuple):
    """`findings` are of all traces together: of what could be read of them."""

    replayed: list[Replayed]
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        """Everything was read, came out as recorded, and kept the rules."""
        bad = any(one.divergence is not None or one.damage is not None for one in self.replayed)
        return not bad and not self.findings


def check_traces(paths: Sequence[Path]) -> Checked:
    """Replay each file for itself, and check the rules of the nodes and between them."""
    replayed = [replay_file(path) for path in paths]
    merged = merge(load(paths).nodes)
    findings = [finding for node in merged.nodes for finding in check_node(node)]
    return Checked(replayed, [*findings, *check_pairs(merged)])


def replay_file(path: Path) -> Replayed:
    """Feed one file to the machines of its logic version."""
    steps = 0
    node, torn = "", False
    divergence: Divergence | None = None
    damage: Damage | None = None
    try:
        with path.open("rb") as file:
            reader = TraceReader(file.read)
            node = reader.header.node

            def counted() -> Iterator[Record]:
                nonlocal steps
                for record in reader:
                    yield record
                    steps += isinstance(record, StepRecord)

            divergence = replay(counted(), machines_of(reader.header.logic_version))
            torn = reader.torn
    except OSError as error:
        damage = Damage(path, error.strerror or str(error))
    except UnreadableTrace as error:
        damage = Damage(path, error.message)
    return Replayed(path, node, steps, torn, divergence, damage)
