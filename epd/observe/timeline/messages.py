"""Which steps sent a message and which received one, so that sends of one node meet receives of another.

A message is named by what it is about; the n-th send of a name meets the n-th receive of it.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from epd.observe.timeline.load import NodeTrace, TracedStep
from epd.protocol import encoder as e
from epd.protocol import prefill_types as p
from epd.protocol import session as s

Name = tuple[str | int, ...]
"""Kind of message, session, and then: transfer, part, attempt, first item; or lane and sequence."""


class Place(NamedTuple):
    """A step, by its node's and its own number."""

    node: int
    step: int


class Message(NamedTuple):
    """`received` is None if no trace has it."""

    name: Name
    sent: Place | None
    received: Place | None

    @property
    def kind(self) -> str:
        return str(self.name[0])


def sent_by(node: NodeTrace, step: TracedStep) -> Iterator[Name]:
    """Names of the messages that this step sent."""
    if step.kind == "prefill":
        assert isinstance(step.key, int)
        for effect in step.effects:
            match effect:
                case p.SendEncodeRequest():
                    yield "EncodeRequest", effect.session, step.key, effect.part, effect.attempt
                case p.SendGrant():
                    yield "BufferGrant", effect.session, step.key, effect.part, effect.attempt
                case p.SendReceipt():
                    about = (effect.session, step.key, effect.part, effect.attempt)
                    yield "Receipt", *about, effect.first
                case p.SendCancel():
                    yield "Cancel", effect.session, step.key, effect.part, effect.attempt
    elif step.kind == "encoder":
        assert isinstance(step.key, tuple)
        for effect in step.effects:
            match effect:
                case e.SendMetadata():
                    yield "EmbeddingMetadata", *step.key, effect.attempt
                case e.SendForwardDone():
                    yield "ForwardDone", *step.key, effect.attempt, effect.first
                case e.SendFailed():
                    yield "Failed", *step.key, effect.attempt


def received_by(step: TracedStep) -> Name | None:
    """The name of the message that this step received."""
    event, key = step.event, step.key
    if step.kind == "prefill":
        assert isinstance(key, int)
        match event:
            case p.MetadataReceived():
                return "EmbeddingMetadata", event.session, key, event.part, event.attempt
            case p.SourcesReady():
                return "ForwardDone", event.session, key, event.part, event.attempt, event.first
            case p.AttemptFailed():
                return "Failed", event.session, key, event.part, event.attempt
    elif step.kind == "encoder":
        assert isinstance(key, tuple)
        match event:
            case e.RequestReceived():
                return "EncodeRequest", *key, event.attempt
            case e.GrantReceived():
                return "BufferGrant", *key, event.attempt
            case e.ReceiptReceived():
                return "Receipt", *key, event.attempt, event.first
            case e.CancelReceived():
                return "Cancel", *key, event.attempt
    return None


def frame_of(step: TracedStep) -> tuple[bool, Name] | None:
    """Of a step of a session: whether it sent a frame or received one, and which."""
    match step.event:
        case s.FrameSent() if step.kind == "session":
            sent = True
        case s.FrameReceived() if step.kind == "session":
            sent = False
        case _:
            return None
    assert isinstance(step.key, int)
    return sent, ("frame", step.key, int(step.event.lane), step.event.sequence)


def match_messages(nodes: list[NodeTrace]) -> list[Message]:
    """Every message that a trace has, in the order of the sends; those nobody is known to have sent last."""
    sends: dict[Name, list[Place]] = defaultdict(list)
    receives: dict[Name, list[Place]] = defaultdict(list)
    for number, node in enumerate(nodes):
        for at, step in enumerate(node.steps):
            for name in sent_by(node, step):
                sends[name].append(Place(number, at))
            received = received_by(step)
            if received is not None:
                receives[received].append(Place(number, at))
    messages = []
    for name in dict.fromkeys([*sends, *receives]):
        out, back = sends.get(name, []), receives.get(name, [])
        for n in range(max(len(out), len(back))):
            sent = out[n] if n < len(out) else None
            received_at = back[n] if n < len(back) else None
            messages.append(Message(name, sent, received_at))
    return messages
