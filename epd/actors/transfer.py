"""The TransferActor of the prefill side: peers' segments, reads, aborts."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import structlog

from epd.actors.receive_buffers import AbortOrder, ReadNews, ReadOrder
from epd.dataplane.poller import (
    PeerOpened,
    PollerFailed,
    ReadDone,
    ReadPosted,
    ReadRequest,
    ReadResult,
)
from epd.protocol import slots
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import LeaseId, ReadId, SessionId
from epd.protocol.messages import RegionDescriptor
from epd.runtime.actor import Actor
from epd.runtime.mailbox import Mailbox, Ref

_log = structlog.get_logger()


class PeerAnnounced(NamedTuple):
    """An encoder's staging regions: make them readable."""

    session: SessionId
    segment: str
    regions: tuple[RegionDescriptor, ...]


class PeerGone(NamedTuple):
    session: SessionId


class PeerAnswer(NamedTuple):
    """To the PrefillActor: may its sources be read?"""

    session: SessionId
    ok: bool
    reason: str


class PollerNews(NamedTuple):
    """From the poller's thread."""

    results: list[ReadResult]


Mail = PeerAnnounced | PeerGone | ReadOrder | AbortOrder | PollerNews


class Reads(Protocol):
    """What performs the reads: `ReadPoller` or `PushedReads`. Answers with `PollerNews`."""

    def read(self, request: ReadRequest) -> None: ...

    def abort(self, read: ReadId) -> None: ...

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> None: ...

    def close_peer(self, session: SessionId) -> None: ...


class TransferActor(Actor[Mail]):
    """Posts reads to the one poller and hands its words on; holds nothing but their numbers."""

    def __init__(self, mailbox: Mailbox[Mail], poller: Reads) -> None:
        super().__init__("transfer", mailbox)
        self._poller = poller
        self._reads: dict[ReadId, LeaseId] = {}
        self._peers: set[SessionId] = set()
        self.read_nbytes = 0
        self.read_s = 0.0
        self.outcomes: dict[str, int] = {}
        self.to_buffers: Ref[ReadNews]
        self.to_prefill: Ref[PeerAnswer]

    def handle(self, message: Mail) -> None:
        match message:
            case ReadOrder():
                self._order(message)
            case PollerNews():
                for result in message.results:
                    self._hear(result)
            case AbortOrder():
                if message.read in self._reads:
                    self._poller.abort(message.read)
            case PeerAnnounced():
                self._peers.add(message.session)
                self._poller.open_peer(message.session, message.segment, message.regions)
            case PeerGone():
                if message.session in self._peers:
                    self._peers.discard(message.session)
                    self._poller.close_peer(message.session)

    def _order(self, order: ReadOrder) -> None:
        wanted = order.wanted
        if wanted.source.nbytes == 0:  # nothing to read, so nothing to prove
            done = slots.ReadTerminal(wanted.read, "ok")
            self.to_buffers.tell(ReadNews(order.lease, done))
            return
        self._reads[wanted.read] = order.lease
        request = ReadRequest(
            wanted.read,
            wanted.session,
            order.local_address,
            wanted.source,
            wanted.digest,
        )
        self._poller.read(request)

    def _hear(self, result: ReadResult) -> None:
        match result:
            case ReadPosted():
                lease = self._reads.get(result.read)
                if lease is not None:
                    self.to_buffers.tell(ReadNews(lease, slots.ReadPosted(result.read)))
            case ReadDone():
                lease = self._reads.pop(result.read)
                self.outcomes[result.outcome] = self.outcomes.get(result.outcome, 0) + 1
                self.read_nbytes += result.nbytes
                self.read_s += result.seconds
                self.to_buffers.tell(ReadNews(lease, slots.ReadTerminal(result.read, result.outcome)))
            case PollerFailed():
                raise DataPlaneError(f"the read poller failed: {result.reason}")
            case PeerOpened():
                if result.session not in self._peers:
                    return
                if not result.ok:
                    _log.warning(
                        "peer's memory cannot be read",
                        session=result.session,
                        reason=result.reason,
                    )
                self.to_prefill.tell(PeerAnswer(result.session, result.ok, result.reason))

    @property
    def running(self) -> int:
        """Reads that are not terminal."""
        return len(self._reads)

    def counts(self) -> dict[str, int]:
        return {"reads": len(self._reads), "segments": len(self._peers)}
