"""`epd trace --html`: one page that needs nothing else: timeline, filter, the messages of a transfer."""

from collections.abc import Sequence
from importlib import resources
from typing import Any

import msgspec

from epd.observe.timeline.merge import Merged
from epd.observe.timeline.messages import Message, Place
from epd.observe.timeline.transfers import Transfer


def as_page(merged: Merged, transfers: Sequence[Transfer]) -> str:
    """The page's text. Names come from other nodes, so nothing of them is ever markup."""
    template = resources.files("epd.data").joinpath("trace.html").read_text(encoding="utf-8")
    phases = [phase for one in transfers for phase in (*one.phases, *one.encoder_phases)]
    data = {
        "nodes": [f"{node.name} ({node.header.role}, {len(node.steps)} steps)" for node in merged.nodes],
        "start_s": min((phase.start_s for phase in phases), default=0.0),
        "end_s": max((phase.end_s for phase in phases), default=0.0),
        "transfers": [_transfer(merged, transfer) for transfer in transfers],
    }
    text = msgspec.json.encode(data).decode()
    return template.replace("/*DATA*/", text.replace("<", "\\u003c"), 1)


def _transfer(merged: Merged, transfer: Transfer) -> dict[str, Any]:
    messages = [_message(merged, message) for message in transfer.messages]
    return {
        "node": transfer.node,
        "number": transfer.number,
        "outcome": transfer.outcome,
        "attempts": transfer.attempts,
        "encoders": transfer.encoders,
        "start_s": transfer.start_s,
        "took_s": transfer.took_s,
        "phases": [
            {"node": phase.node, "state": phase.state, "start_s": phase.start_s, "took_s": phase.took_s}
            for phase in (*transfer.phases, *transfer.encoder_phases)
        ],
        "waits": [wait._asdict() for wait in transfer.waits],
        "messages": sorted(messages, key=lambda message: message["at_s"]),
    }


def _message(merged: Merged, message: Message) -> dict[str, Any]:
    place = message.sent or message.received
    assert place is not None
    return {
        "kind": message.kind,
        "from": _name(merged, message.sent),
        "to": _name(merged, message.received),
        "at_s": merged.time_s(place),
    }


def _name(merged: Merged, place: Place | None) -> str | None:
    return None if place is None else merged.nodes[place.node].name
