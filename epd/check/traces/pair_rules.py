"""What must hold between nodes, by their traces together.

A side that was killed, or whose trace begins later, tells too little to blame the other: a session is
judged only where the sender's trace has it from its beginning to its end.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from epd.check.traces.findings import Finding
from epd.observe.timeline.load import NodeTrace
from epd.observe.timeline.merge import Merged
from epd.observe.timeline.messages import Name, received_by, sent_by
from epd.protocol import encoder as e
from epd.protocol import prefill_types as p
from epd.protocol.messages import Source

_Told = dict[tuple[Any, ...], list[Name]]
"""By session, transfer, part: the messages one side sent about it, in order."""


def check_pairs(merged: Merged) -> Iterator[Finding]:
    """Messages against their sends; reads and grants against what was announced."""
    known = [_whole_sessions(node) for node in merged.nodes]
    for node in merged.nodes:
        others = [n for n, other in enumerate(merged.nodes) if other.header.role != node.header.role]
        sent: _Told = {}
        sessions: set[int] = set()
        for other in others:
            sessions |= known[other]
            for about, names in _sent(merged.nodes[other]).items():
                sent[about] = names
        yield from _check_channel(node, sent, sessions)
        if node.header.role == "prefill":
            yield from _check_reads(node, [merged.nodes[other] for other in others], sessions)


def _whole_sessions(node: NodeTrace) -> set[int]:
    """Those that the trace has from their first step to their end."""
    begun: set[int] = set()
    over: set[int] = set()
    for step in node.steps:
        if step.kind == "session" and isinstance(step.key, int):
            if type(step.before).__name__ == "Absent":
                begun.add(step.key)
            if step.after.final and not step.before.final:
                over.add(step.key)
    return begun & over


def _about(name: Name) -> tuple[Any, ...]:
    return name[1:4]


def _sent(node: NodeTrace) -> _Told:
    told: _Told = defaultdict(list)
    for step in node.steps:
        for name in sent_by(node, step):
            told[_about(name)].append(name)
    return told


def _check_channel(node: NodeTrace, sent: _Told, sessions: set[int]) -> Iterator[Finding]:
    """In order and once: what came is the beginning of what was sent."""
    heard: dict[tuple[Any, ...], int] = defaultdict(int)
    for at, step in enumerate(node.steps):
        name = received_by(step)
        if name is None or int(name[1]) not in sessions:
            continue
        place = heard[_about(name)]
        heard[_about(name)] += 1
        names = sent.get(_about(name), [])
        if place < len(names) and names[place] == name:
            continue
        due = names[place] if place < len(names) else "nothing more"
        what = "was never sent" if name not in names else f"came where {due} was due"
        yield Finding("channel", node.name, at, step.kind, str(step.key), f"{name} {what}")


def _check_reads(node: NodeTrace, encoders: list[NodeTrace], sessions: set[int]) -> Iterator[Finding]:
    """I2: every source that is read was announced so; I7: for the grant that was given."""
    announced: dict[tuple[Any, ...], list[Source]] = defaultdict(list)
    granted: dict[tuple[Any, ...], int] = {}
    for encoder in encoders:
        for step in encoder.steps:
            if step.kind != "encoder" or not isinstance(step.key, tuple):
                continue
            for effect in step.effects:
                if isinstance(effect, e.SendForwardDone):
                    sources = [ready.source for ready in effect.ready]
                    announced[(*step.key, effect.attempt)] += sources
    for at, step in enumerate(node.steps):
        if step.kind != "prefill":
            continue
        for sent in step.effects:
            where = (step.kind, str(step.key))
            match sent:
                case p.SendGrant():
                    granted[sent.session, step.key, sent.part, sent.attempt] = sent.lease
                case p.StartRead() if sent.session in sessions:
                    attempt = (sent.session, step.key, sent.part, sent.attempt)
                    if sent.source not in announced[attempt]:
                        yield Finding("I2", node.name, at, *where, f"{sent.source} was not announced")
                    if granted.get(attempt) != sent.lease:
                        yield Finding("I7", node.name, at, *where, f"lease {sent.lease} was not granted")
