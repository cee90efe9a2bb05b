"""`epd trace --perfetto`: Chrome trace event JSON, which the Perfetto UI opens.

A process per node, a track per actor with its steps, a flow per message, an asynchronous span per slot
(a lease of the pool, a staged result) and per state of a transfer. Times are microseconds.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from epd.observe.timeline.load import TracedStep
from epd.observe.timeline.merge import Merged
from epd.observe.timeline.messages import Place
from epd.observe.timeline.transfers import Phase, Transfer
from epd.protocol import slots, sources

_ACTORS: Final = {
    "session": "endpoint",
    "prefill": "PrefillActor",
    "group": "PrefillActor (group log)",
    "rank": "PrefillActor (rank)",
    "slots": "BufferManagerActor",
    "sources": "BufferManagerActor",
    "reads": "TransferActor",
    "encoder": "EncodeActor",
    "jobs": "DedupCoordinator",
}
"""Who hosts the machines of a kind."""
_STEP_US: Final = 1.0
"""A step has no length of its own; this much is drawn."""

Event = dict[str, Any]


def as_perfetto(merged: Merged, transfers: Sequence[Transfer]) -> dict[str, Any]:
    """The whole file, to be written as JSON."""
    start_s = min(
        (merged.time_s(Place(n, 0)) for n, node in enumerate(merged.nodes) if node.steps), default=0
    )
    events = [
        *_names(merged),
        *_steps(merged, start_s),
        *_flows(merged, start_s),
        *_phases(merged, transfers, start_s),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(merged: Merged) -> Iterator[Event]:
    for pid, node in enumerate(merged.nodes, 1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": node.name}}
        for actor in dict.fromkeys(_actor(step.kind) for step in node.steps):
            tid = _track(actor)
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": actor}}


def _actor(kind: str) -> str:
    return _ACTORS.get(kind, kind)


def _track(actor: str) -> int:
    known = [*dict.fromkeys(_ACTORS.values()), actor]
    return known.index(actor) + 1


def _steps(merged: Merged, start_s: float) -> Iterator[Event]:
    for number, node in enumerate(merged.nodes):
        for at, step in enumerate(node.steps):
            ts = (merged.time_s(Place(number, at)) - start_s) * 1e6
            where = {"pid": number + 1, "tid": _track(_actor(step.kind)), "ts": ts}
            yield {
                "ph": "X",
                "name": type(step.event).__name__,
                "cat": step.kind,
                "dur": _STEP_US,
                **where,
                "args": {
                    "key": str(step.key),
                    "from": type(step.before).__name__,
                    "to": type(step.after).__name__,
                    "effects": [type(effect).__name__ for effect in step.effects],
                    "step": at,
                },
            }
            yield from _slot_spans(step, number + 1, ts)


def _slot_spans(step: TracedStep, pid: int, ts: float) -> Iterator[Event]:
    common = {"cat": "slot", "pid": pid, "tid": 0, "ts": ts}
    match step.event:
        case slots.LeaseTaken() if step.kind == "slots":
            yield {"ph": "b", "name": f"lease {step.key}", "id": f"{pid}-lease-{step.key}", **common}
        case sources.Reserved() if step.kind == "sources":
            yield {"ph": "b", "name": f"staged {step.key}", "id": f"{pid}-staged-{step.key}", **common}
    for effect in step.effects:
        match effect:
            case slots.FreeExtents():
                yield {"ph": "e", "name": f"lease {step.key}", "id": f"{pid}-lease-{step.key}", **common}
            case sources.FreeExtent():
                yield {"ph": "e", "name": f"staged {step.key}", "id": f"{pid}-staged-{step.key}", **common}


def _flows(merged: Merged, start_s: float) -> Iterator[Event]:
    for number, message in enumerate(merged.messages, 1):
        if message.sent is None or message.received is None:
            continue
        # A flow must not go back in time, which the estimate of the clocks may make of a fast message.
        sent_us = (merged.time_s(message.sent) - start_s) * 1e6
        received_us = max(sent_us, (merged.time_s(message.received) - start_s) * 1e6)
        for phase, place, ts in (("s", message.sent, sent_us), ("f", message.received, received_us)):
            kind = merged.nodes[place.node].steps[place.step].kind
            event = {
                "ph": phase,
                "name": message.kind,
                "cat": "message",
                "id": number,
                "pid": place.node + 1,
                "tid": _track(_actor(kind)),
                "ts": ts,
            }
            yield event | ({"bp": "e"} if phase == "f" else {})


def _phases(merged: Merged, transfers: Sequence[Transfer], start_s: float) -> Iterator[Event]:
    pids = {node.name: pid for pid, node in enumerate(merged.nodes, 1)}

    def span(phase: Phase, transfer: Transfer, name: str) -> Iterator[Event]:
        common = {
            "name": name,
            "cat": "transfer",
            "id": f"{transfer.node}-{transfer.number}-{phase.node}",
            "pid": pids[phase.node],
            "tid": 0,
        }
        yield {"ph": "b", "ts": (phase.start_s - start_s) * 1e6, **common}
        yield {"ph": "e", "ts": (phase.end_s - start_s) * 1e6, **common}

    for transfer in transfers:
        for phase in (*transfer.phases, *transfer.encoder_phases):
            yield from span(phase, transfer, f"transfer {transfer.number}: {phase.state}")
