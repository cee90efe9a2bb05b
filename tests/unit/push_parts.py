"""An encoder's half of push between a poller and an endpoint that note what they are told."""

from collections.abc import Sequence
from typing import Any

from pools import make_pool

from epd.actors.push_writer import FromReader, PushWriter, ReaderOpened
from epd.actors.transfer import PollerNews
from epd.dataplane.poller import PeerOpened, ReadDone, ReadRequest
from epd.protocol.ids import ReadId, RegionId, SessionId
from epd.protocol.messages import PushWanted, Reconcile, RegionDescriptor, Windows
from epd.runtime.mailbox import Mailbox

A, B = SessionId(1), SessionId(2)
WINDOWS = Windows((RegionDescriptor(RegionId(0), 4096, 4096),))


class Parts:
    """`sent` has what was told to a session, `reads` what the poller was given, as writes."""

    def __init__(self) -> None:
        self.sent: list[tuple[SessionId, Any]] = []
        self.closed: list[SessionId] = []
        self.reads: list[ReadRequest] = []
        self.aborted: list[ReadId] = []
        self.pool = make_pool(1, 4096)
        parts: Any = self
        self.writer = PushWriter(Mailbox("test/push", 100), parts, self.pool, parts)
        self.writer.handle(ReaderOpened(A, "127.0.0.1:1"))

    # -- the endpoint's and the poller's methods -----------------------------------------------

    def send(self, session: SessionId, message: Any) -> None:
        self.sent.append((session, message))

    def close(self, session: SessionId, code: str, reason: str) -> None:
        self.closed.append(session)

    def read(self, request: ReadRequest) -> None:
        self.reads.append(request)

    def abort(self, read: ReadId) -> None:
        self.aborted.append(read)

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> None:
        self.opened = (session, segment, tuple(regions))

    def close_peer(self, session: SessionId) -> None:
        self.closed_peer = session

    # -- what a test does ------------------------------------------------------------------------

    def hear(self, message: Windows | PushWanted | Reconcile, session: SessionId = A) -> None:
        self.writer.handle(FromReader(session, message))

    def ready(self) -> None:
        self.hear(WINDOWS)
        self.writer.handle(PollerNews([PeerOpened(A, True, "")]))

    def end(self, outcome: str, *, posted: bool = True) -> None:
        """Of the newest write that the poller has."""
        self.writer.handle(PollerNews([ReadDone(self.reads[-1].read, outcome, 0.0, 0, posted)]))
