"""The encoders that a prefill node has sessions with: who may get work, and how much each has open."""

from epd.protocol.ids import Incarnation, SessionId
from epd.protocol.placement import EncoderLoad
from epd.protocol.wire import MAX_ITEMS_PER_PART
from epd.runtime.peers import PeerInfo


class Encoder:
    """One session. `peer` is the endpoint's own record: it knows who is silent, and who drains."""

    __slots__ = ("open_items", "peer", "readable", "session")

    def __init__(self, session: SessionId, peer: PeerInfo) -> None:
        self.session = session
        self.peer = peer
        self.readable = False
        """Its memory was opened: before that nothing could be delivered from it."""
        self.open_items = 0

    @property
    def usable(self) -> bool:
        return self.readable and not self.peer.suspect and not self.peer.draining


class Encoders(dict[SessionId, Encoder]):
    """By session."""

    def loads(self) -> list[EncoderLoad]:
        """What placement chooses among: the usable ones."""
        return [
            EncoderLoad(
                encoder.session,
                Incarnation(encoder.peer.incarnation),
                encoder.open_items,
                min(MAX_ITEMS_PER_PART, encoder.peer.limits.max_items_per_part),
            )
            for encoder in self.values()
            if encoder.usable
        ]

    def add_items(self, session: SessionId, items: int) -> None:
        """So many more items are open there; nothing if its session has ended."""
        encoder = self.get(session)
        if encoder is not None:
            encoder.open_items += items

    def counts(self) -> dict[str, int]:
        return {
            "encoders": sum(encoder.usable for encoder in self.values()),
            "open_items": sum(encoder.open_items for encoder in self.values()),
        }
