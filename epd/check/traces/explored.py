"""Recorded runs against what was explored: did the nodes do anything that the checker has never seen?"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from epd.check.relation import MACHINES, Transition, transitions_of
from epd.check.unexplored import UNEXPLORED, reason_of
from epd.observe.timeline.load import Loaded, NodeTrace
from epd.protocol.registry import MACHINES as REGISTERED


class Recorded(NamedTuple):
    """One transition of recorded runs: how often, and where first. `step` counts the node's from 0."""

    transition: Transition
    times: int
    trace: Path
    node: str
    step: int

    def __str__(self) -> str:
        return (
            f"{self.transition}  ({self.times} times, first: step {self.step} of {self.node}, {self.trace})"
        )


class Comparison(NamedTuple):
    """`listed` with the reason why they are not explored; `unknown` are neither explored nor listed."""

    nodes: int
    steps: int
    transitions: int
    listed: tuple[tuple[Recorded, str], ...]
    unknown: tuple[Recorded, ...]


def compare(loaded: Loaded, relation: Collection[Transition]) -> Comparison:
    """Every step of these traces, abstracted as the explored ones were."""
    recorded: dict[Transition, Recorded] = {}
    for node in loaded.nodes:
        _add(recorded, node)
    beyond = [recorded[transition] for transition in sorted(recorded.keys() - set(relation))]
    reasons = [(one, reason_of(one.transition)) for one in beyond]
    return Comparison(
        len(loaded.nodes),
        sum(len(node.steps) for node in loaded.nodes),
        len(recorded),
        tuple((one, reason) for one, reason in reasons if reason is not None),
        tuple(one for one, reason in reasons if reason is None),
    )


def _add(recorded: dict[Transition, Recorded], node: NodeTrace) -> None:
    for at, step in enumerate(node.steps):
        machine = MACHINES[step.kind]
        for transition in transitions_of(machine, step.before, step.event, step.after, step.effects):
            known = recorded.get(transition) or Recorded(transition, 0, node.files[0], node.name, at)
            recorded[transition] = known._replace(times=known.times + 1)


def wrongly_listed(
    relation: Collection[Transition], listed: Mapping[Transition, str] = UNEXPLORED
) -> tuple[Transition, ...]:
    """Those that are called unexplored and were explored, or that no machine could make."""
    return tuple(sorted(one for one in listed if one in relation or not _exists(one)))


def _exists(transition: Transition) -> bool:
    kinds = [kind for kind, name in MACHINES.items() if name == transition.machine]
    if not kinds:
        return False
    spec = REGISTERED[kinds[0]]
    named = (
        (spec.state_type, (transition.state, transition.after)),
        (spec.event_type, (transition.event,)),
        (spec.effect_type, transition.effects),
    )
    return all(
        words.partition("(")[0] in {known.__name__ for known in union.__args__}
        for union, all_words in named
        for words in all_words
    )


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """These files, and of a folder all that are named `NAME.trace` or, further files, `NAME.trace.N`."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*.trace*") if _is_trace(file))
        else:
            found.append(path)
    return found


def _is_trace(path: Path) -> bool:
    return path.suffix == ".trace" or (path.suffix[1:].isdigit() and Path(path.stem).suffix == ".trace")
