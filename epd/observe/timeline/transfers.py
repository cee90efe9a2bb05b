"""The story of every transfer: its states and how long each took, who waited for whom, how it ended."""

from collections import defaultdict
from typing import Any, Final, NamedTuple

from epd.observe.timeline.load import TracedStep
from epd.observe.timeline.merge import Merged
from epd.observe.timeline.messages import Message, Place
from epd.protocol import encoder, prefill
from epd.protocol import prefill_types as p
from epd.protocol.trace import Key

_WAITS_FOR: Final = {
    "requested": "sizes",
    "metadata": "room in the pool",
    "buffer-registered": "the forward",
    "forward-done": "the read",
    "rdma-written": "the consumer to take it",
    "consumed": "the consumer to release it",
}
"""What a transfer in this state waits for; from whom, if it is an encoder, the trace says."""
_OF_AN_ENCODER: Final = ("requested", "buffer-registered", "forward-done")


_OpenPhases = dict[tuple[int, str, Key, int, int], tuple[str, float]]
"""By node, kind and key of the machine, and the transfer it is of: a state, and since when."""


class Phase(NamedTuple):
    """One state from when to when, in the merged clock's seconds."""

    node: str
    state: str
    start_s: float
    end_s: float

    @property
    def took_s(self) -> float:
        return self.end_s - self.start_s


class Wait(NamedTuple):
    who: str
    whom: str
    what: str
    took_s: float


class Transfer:
    """One transfer, as the traces tell it. `outcome` is `freed`, `failed(...)`, `cancelled`, or `open`."""

    def __init__(self, node: str, number: int) -> None:
        self.node = node
        self.number = number
        self.items = 0
        self.nbytes = 0
        self.attempts = 0
        self.outcome = "open"
        self.delivered = False
        self.encoders: list[str] = []
        self.phases: list[Phase] = []
        """Of the prefill side."""
        self.encoder_phases: list[Phase] = []
        self.waits: list[Wait] = []
        self.messages: list[Message] = []
        self.steps: list[Place] = []

    @property
    def start_s(self) -> float:
        phases = self.phases or self.encoder_phases
        return phases[0].start_s if phases else 0.0

    @property
    def took_s(self) -> float:
        phases = self.phases or self.encoder_phases
        return phases[-1].end_s - phases[0].start_s if phases else 0.0


class _Sides(NamedTuple):
    """By session: who dialled, and who listens."""

    dialled: dict[int, int]
    listens: dict[int, int]


def transfers_of(merged: Merged) -> list[Transfer]:
    """Every transfer, by the node that asked and its number; one of which only the encoder's trace is
    there has that node's name."""
    sides = _sides_of(merged)
    found: dict[tuple[int, int], Transfer] = {}

    def transfer(node: int, number: int) -> Transfer:
        wanted = found.get((node, number))
        if wanted is None:
            wanted = found[node, number] = Transfer(merged.nodes[node].name, number)
        return wanted

    open_phases: _OpenPhases = {}
    for place in merged.in_order():
        step = merged.nodes[place.node].steps[place.step]
        owner = _owner(step, place.node, sides)
        if owner is None:
            continue
        story = transfer(*owner)
        story.steps.append(place)
        _note_phase(story, owner, merged, place, step, open_phases)
        if step.kind == "prefill":
            _note_request(story, step, merged, sides)
    end_s = _end_s(merged) if open_phases else 0.0
    for (node, kind, _, asker, transfer_number), (state, start_s) in open_phases.items():
        story = found[asker, transfer_number]
        phases = story.phases if kind == "prefill" else story.encoder_phases
        phases.append(Phase(merged.nodes[node].name, state, start_s, end_s))
    for message in merged.messages:
        of = _transfer_of(message, merged, sides)
        if of in found:
            found[of].messages.append(message)
    for story in found.values():
        story.waits = _waits(story)
    return list(found.values())


def _sides_of(merged: Merged) -> _Sides:
    dialled: dict[int, int] = {}
    listens: dict[int, int] = {}
    for number, node in enumerate(merged.nodes):
        sessions = dialled if node.header.role == "prefill" else listens
        for step in node.steps:
            if step.kind == "session" and isinstance(step.key, int):
                sessions.setdefault(step.key, number)
    return _Sides(dialled, listens)


def _owner(step: TracedStep, node: int, sides: _Sides) -> tuple[int, int] | None:
    if step.kind == "prefill":
        assert isinstance(step.key, int)
        return node, step.key
    if step.kind == "encoder":
        assert isinstance(step.key, tuple)
        session, number = int(step.key[0]), int(step.key[1])
        return sides.dialled.get(session, node), number
    return None


def _transfer_of(message: Message, merged: Merged, sides: _Sides) -> tuple[int, int] | None:
    place = message.sent or message.received
    assert place is not None
    return _owner(merged.nodes[place.node].steps[place.step], place.node, sides)


def _note_phase(
    story: Transfer,
    owner: tuple[int, int],
    merged: Merged,
    place: Place,
    step: TracedStep,
    open_phases: _OpenPhases,
) -> None:
    machine: Any = prefill if step.kind == "prefill" else encoder
    name = "" if step.after.final else machine.state_name(step.after)
    key = (place.node, step.kind, step.key, *owner)
    now_s = merged.time_s(place)
    known = open_phases.get(key)
    if known is None and not isinstance(step.before, type(machine.INITIAL)):
        known = (machine.state_name(step.before), now_s)  # the trace begins in the midst of it
    if known is not None and known[0] != name:
        phases = story.phases if step.kind == "prefill" else story.encoder_phases
        phases.append(Phase(merged.nodes[place.node].name, known[0], known[1], now_s))
        open_phases.pop(key, None)
        known = None
    if known is None and name and name not in ("new", "freed"):
        open_phases[key] = (name, now_s)


def _end_s(merged: Merged) -> float:
    """The last moment of any trace."""
    return max(
        node.steps[-1].now_s + offset.add_s
        for node, offset in zip(merged.nodes, merged.offsets, strict=True)
        if node.steps
    )


def _note_request(story: Transfer, step: TracedStep, merged: Merged, sides: _Sides) -> None:
    if isinstance(step.event, p.Submitted):
        story.items = len(step.event.items)
    for effect in step.effects:
        match effect:
            case p.SendEncodeRequest():
                story.attempts += 1
                listening = sides.listens.get(effect.session)
                name = f"session {effect.session:x}" if listening is None else merged.nodes[listening].name
                if name not in story.encoders:
                    story.encoders.append(name)
            case p.Deliver():
                story.delivered = True
                story.nbytes = sum(spec.nbytes for spec in effect.specs)
    if step.after.final:
        story.outcome = prefill.state_name(step.after)


def _waits(story: Transfer) -> list[Wait]:
    """One line per thing that was waited for; the longest first."""
    took: dict[tuple[str, str, str], float] = defaultdict(float)
    for phase in story.phases:
        what = _WAITS_FOR.get(phase.state)
        if what is not None:
            whom = ", ".join(story.encoders) if phase.state in _OF_AN_ENCODER else phase.node
            took[phase.node, whom or "an encoder", what] += phase.took_s
    for phase in story.encoder_phases:
        if phase.state == "metadata":
            took[phase.node, story.node, "the grant"] += phase.took_s
        elif phase.state == "forward-done":
            took[phase.node, story.node, "the receipt"] += phase.took_s
    waits = [Wait(*names, took_s=took_s) for names, took_s in took.items()]
    return sorted(waits, key=lambda wait: -wait.took_s)
