"""Puts the steps of some nodes into one order, and estimates how far their clocks are apart.

The order rests on messages alone: a step that received one comes after the step that sent it. Clocks are
never trusted; how far they are apart is estimated from the frames of both directions, for the display:
of two nodes the least `received - sent` each way has the offset in it once with either sign.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from epd.observe.timeline.load import NodeTrace
from epd.observe.timeline.messages import Message, Name, Place, frame_of, match_messages


class Offset(NamedTuple):
    """What to add to a node's seconds to get those of the first node. `within_s` is None if nothing, or
    only one direction, was seen; then `add_s` aligns the first steps, or the fastest message."""

    add_s: float
    within_s: float | None


class Merged(NamedTuple):
    nodes: Sequence[NodeTrace]
    offsets: Sequence[Offset]
    messages: Sequence[Message]

    def time_s(self, place: Place) -> float:
        """Seconds of the first node's clock, as estimated."""
        return self.nodes[place.node].steps[place.step].now_s + self.offsets[place.node].add_s

    def in_order(self) -> Iterator[Place]:
        """Every step, by estimated time, but never a receive before its send."""
        sender = {m.received: m.sent for m in self.messages if m.received and m.sent}
        heads = [0] * len(self.nodes)

        def ready(node: int) -> bool:
            sent = sender.get(Place(node, heads[node]))
            return sent is None or sent.step < heads[sent.node]

        while True:
            left = [node for node, head in enumerate(heads) if head < len(self.nodes[node].steps)]
            if not left:
                return
            # Traces that contradict each other have none that is ready: then the clocks decide.
            candidates = [node for node in left if ready(node)] or left
            node = min(candidates, key=lambda one: self.time_s(Place(one, heads[one])))
            yield Place(node, heads[node])
            heads[node] += 1


def merge(nodes: Sequence[NodeTrace]) -> Merged:
    """The nodes that dial first: they are the ones whose clock is used."""
    ordered = sorted(nodes, key=lambda node: (node.header.role != "prefill", node.name))
    return Merged(ordered, _offsets(ordered), match_messages(ordered))


def _offsets(nodes: Sequence[NodeTrace]) -> list[Offset]:
    least = _least_delays(nodes)
    found: dict[int, Offset] = {}
    for start in range(len(nodes)):
        if start in found:
            continue
        add_s = 0.0
        if found and nodes[0].steps and nodes[start].steps:
            add_s = nodes[0].steps[0].now_s - nodes[start].steps[0].now_s
        found[start] = Offset(add_s, 0.0 if start == 0 else None)
        waiting = deque([start])
        while waiting:
            near = waiting.popleft()
            for far in range(len(nodes)):
                if far in found or not ({(near, far), (far, near)} & least.keys()):
                    continue
                found[far] = _through(found[near], least.get((near, far)), least.get((far, near)))
                waiting.append(far)
    return [found[node] for node in range(len(nodes))]


def _through(near: Offset, there_s: float | None, back_s: float | None) -> Offset:
    """From the least `received - sent` from the near node to the far one, and back."""
    if there_s is None or back_s is None:
        return Offset(near.add_s + (back_s or 0.0) - (there_s or 0.0), None)
    within_s = (there_s + back_s) / 2
    return Offset(
        near.add_s - (there_s - back_s) / 2, None if near.within_s is None else near.within_s + within_s
    )


def _least_delays(nodes: Sequence[NodeTrace]) -> dict[tuple[int, int], float]:
    """By (sender, receiver): the least difference of the receiver's clock and the sender's."""
    sent: dict[Name, dict[int, float]] = defaultdict(dict)
    received: dict[Name, dict[int, float]] = defaultdict(dict)
    for number, node in enumerate(nodes):
        for step in node.steps:
            frame = frame_of(step)
            if frame is not None:
                (sent if frame[0] else received)[frame[1]].setdefault(number, step.now_s)
    least: dict[tuple[int, int], float] = {}
    for name, senders in sent.items():
        for receiver, received_s in received.get(name, {}).items():
            for sender, sent_s in senders.items():
                if sender != receiver:
                    way = sender, receiver
                    least[way] = min(least.get(way, received_s - sent_s), received_s - sent_s)
    return least
