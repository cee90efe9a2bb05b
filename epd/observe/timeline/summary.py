"""`epd trace --summary`: every transfer in a few lines, or as JSON."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from epd.observe.timeline.load import Damage
from epd.observe.timeline.merge import Merged
from epd.observe.timeline.transfers import Transfer


def as_json(merged: Merged, transfers: Sequence[Transfer], damages: Sequence[Damage]) -> dict[str, Any]:
    """One object; times are seconds of the first node's clock, durations seconds."""
    return {
        "ok": not damages,
        "nodes": [
            {
                "node": node.name,
                "role": node.header.role,
                "incarnation": node.header.incarnation,
                "logic_version": node.header.logic_version,
                "files": [str(path) for path in node.files],
                "steps": len(node.steps),
                "from_the_beginning": node.whole,
                "torn": node.torn,
                "clock_offset_s": offset.add_s,
                "clock_offset_within_s": offset.within_s,
            }
            for node, offset in zip(merged.nodes, merged.offsets, strict=True)
        ],
        "outcomes": Counter(transfer.outcome for transfer in transfers),
        "transfers": [_transfer(transfer) for transfer in transfers],
        "unmatched_messages": sum(m.sent is None or m.received is None for m in merged.messages),
        "damages": [str(damage) for damage in damages],
    }


def _transfer(transfer: Transfer) -> dict[str, Any]:
    return {
        "node": transfer.node,
        "transfer": transfer.number,
        "outcome": transfer.outcome,
        "delivered": transfer.delivered,
        "items": transfer.items,
        "nbytes": transfer.nbytes,
        "attempts": transfer.attempts,
        "encoders": transfer.encoders,
        "start_s": transfer.start_s,
        "took_s": transfer.took_s,
        "states": [
            {"node": phase.node, "state": phase.state, "start_s": phase.start_s, "took_s": phase.took_s}
            for phase in (*transfer.phases, *transfer.encoder_phases)
        ],
        "waits": [wait._asdict() for wait in transfer.waits],
    }


def as_text(merged: Merged, transfers: Sequence[Transfer]) -> Iterator[str]:
    """Lines for a terminal."""
    for node, offset in zip(merged.nodes, merged.offsets, strict=True):
        clock = "its clock is used" if node is merged.nodes[0] else _clock(offset.add_s, offset.within_s)
        torn = ", the last record was torn" if node.torn else ""
        begins = "" if node.whole else ", from the midst of its run"
        yield f"{node.name}: {len(node.steps)} steps{begins}{torn}; {clock}"
    outcomes = Counter(transfer.outcome for transfer in transfers)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    yield f"{len(transfers)} transfers: {counted or 'none'}"
    for transfer in transfers:
        yield ""
        yield from _lines(transfer)


def _clock(add_s: float, within_s: float | None) -> str:
    if within_s is None:
        return "no frames of both directions: its clock is not known"
    return f"its clock {add_s * 1e3:+.3f} ms (+-{within_s * 1e3:.3f})"


def _lines(transfer: Transfer) -> Iterator[str]:
    delivered = f", {transfer.nbytes} B delivered" if transfer.delivered else ""
    whom = f" by {', '.join(transfer.encoders)}" if transfer.encoders else ""
    yield (
        f"{transfer.node} transfer {transfer.number}: {transfer.outcome} after {_ms(transfer.took_s)}, "
        f"{transfer.items} items, {transfer.attempts} attempts{whom}{delivered}"
    )
    for node in dict.fromkeys(phase.node for phase in (*transfer.phases, *transfer.encoder_phases)):
        phases = [phase for phase in (*transfer.phases, *transfer.encoder_phases) if phase.node == node]
        states = ", ".join(f"{phase.state} {_ms(phase.took_s)}" for phase in phases)
        yield f"  {node}: {states}"
    for wait in transfer.waits[:3]:
        yield f"  {wait.who} waited {_ms(wait.took_s)} for {wait.what} ({wait.whom})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
