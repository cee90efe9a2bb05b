"""What the endpoint knows of one session: its peer, its sockets, its queues."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from epd.protocol.ids import Incarnation, NodeId, SessionId
from epd.protocol.messages import AnyMessage, Heartbeat, Hello, PeerLimits, Role, Welcome
from epd.protocol.rates import Meter
from epd.runtime.addresses import Address
from epd.runtime.lanes import LaneSocket, routing_id_of
from epd.runtime.outbox import Outbox, Sent
from epd.runtime.timers import TimerHandle


@dataclass(slots=True)
class PeerInfo:
    """The node at the other end of one session.

    `suspect`, `draining` and `heartbeat` follow what is learnt while the session lives. `address` is
    the one that was dialled; empty at the listener.
    """

    node: NodeId
    incarnation: Incarnation
    role: Role
    address: str
    fingerprint: str
    data_plane: str
    segment: str
    limits: PeerLimits
    logic_version: int
    suspect: bool = False
    draining: bool = False
    heartbeat: Heartbeat = field(default_factory=Heartbeat)


class SessionHandler(Protocol):
    """Called in the loop's thread, never from inside `send` or `dial`. May call the endpoint."""

    def session_opened(self, session: SessionId, peer: PeerInfo) -> None:
        """The session is in force, ours or one that a peer dialled."""
        ...

    def session_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None:
        """Once for every session that was dialled or opened; `peer` is None if it never opened."""
        ...

    def session_suspect(self, session: SessionId, suspect: bool) -> None:
        """The peer is silent (no new work for it), or speaks again."""
        ...

    def messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None:
        """The messages of one frame, in order; `Hello`, `Welcome`, `Rejected`, `Heartbeat` never."""
        ...

    def media_writable(self, session: SessionId) -> None:
        """`send_media` had said False; there is room again."""
        ...

    def load(self) -> Heartbeat:
        """The load hints of now."""
        ...


def peer_info(hello: Hello | Welcome, address: str) -> PeerInfo:
    return PeerInfo(
        hello.node,
        hello.incarnation,
        hello.role,
        address,
        hello.fingerprint,
        hello.data_plane,
        hello.segment,
        hello.limits,
        hello.logic_version,
    )


class Session:
    """One session from its dial or `Hello` until nothing of it is left here."""

    __slots__ = (
        "address",
        "candidates",
        "control",
        "dialled",
        "greeting",
        "id",
        "is_open",
        "key",
        "linger",
        "media",
        "media_ready",
        "meter",
        "outbox",
        "over",
        "peer",
        "task",
    )

    def __init__(self, session: SessionId, address: str, sent: Sent) -> None:
        self.id = session
        self.address = address
        self.dialled = bool(address)
        self.key = ""
        """Of the peer, which it has proved to hold; empty without CURVE."""
        self.meter = Meter()
        """Of what the peer sends."""
        self.greeting: Hello | Welcome | None = None
        """What the peer said of itself; `peer` once that was found good."""
        self.peer: PeerInfo | None = None
        self.outbox = Outbox(session, routing_id_of(session), sent)
        self.control: LaneSocket | None = None
        self.media: LaneSocket | None = None
        self.media_ready = self.dialled
        """A listener may send media once the dialler's media lane has sent its first frame."""
        self.candidates: list[Address] = []
        """Numeric addresses not tried yet, of the lane that is being connected."""
        self.task: asyncio.Task[None] | None = None
        self.linger: TimerHandle | None = None
        """Ends the wait for the listener's answer to our last word."""
        self.is_open = False
        self.over = False
        """Its end was told; nothing of it is acted on any more."""

    def overtook(self, hello: Hello) -> bool:
        """Whether this session was dialled later, by the same incarnation, than the one of `hello`."""
        ours = self.greeting
        if not isinstance(ours, Hello) or (ours.node, ours.incarnation) != (hello.node, hello.incarnation):
            return False
        return 0 < hello.dial < ours.dial

    def close(self) -> None:
        """Nothing of it is acted on any more; its sockets are the endpoint's to close."""
        self.over = True
        self.is_open = False
        self.stop_dialling()
        if self.linger is not None:
            self.linger.cancel()
            self.linger = None
        self.control = self.media = None

    def stop_dialling(self) -> None:
        """No further lane of it is made; those that there are stay."""
        if self.task is not None:
            self.task.cancel()
            self.task = None
