"""The encoder's half of push: writes staged sources into the windows of prefill nodes that ask for it.

Only in nodes with `direction = push`; the other half is `epd.actors.pushed_reads`. The writes go to a
poller of its own, payload first, then the seal that the source has by then.
"""

from typing import Final, NamedTuple

from epd.actors.transfer import PollerNews
from epd.dataplane.poller import PeerOpened, PollerFailed, ReadDone, ReadPoller, ReadRequest, ReadResult
from epd.memory.pool import Extent, Pool
from epd.observe.log import log_info
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import ReadId, Seal, SessionId, WriteId
from epd.protocol.messages import (
    Drained,
    EmbeddingWritten,
    PushWanted,
    Reconcile,
    Source,
    Windows,
    WriteOutcome,
)
from epd.protocol.sources import SEAL_WORD, seal_offset, sealed_nbytes
from epd.runtime.actor import Actor
from epd.runtime.endpoint import Endpoint
from epd.runtime.mailbox import Mailbox

_MAX_OPEN_WRITES: Final = 65_536
"""Of one session; what it asks for beyond is answered as not begun."""


class ReaderOpened(NamedTuple):
    """A prefill node; its engine is at `segment`."""

    session: SessionId
    segment: str


class ReaderGone(NamedTuple):
    session: SessionId


class FromReader(NamedTuple):
    session: SessionId
    message: Windows | PushWanted | Reconcile


Mail = ReaderOpened | ReaderGone | FromReader | PollerNews


class _Write:
    __slots__ = ("failed", "read", "sealing", "wanted")

    def __init__(self, wanted: PushWanted) -> None:
        self.wanted = wanted
        self.read: ReadId | None = None
        """Under which number our poller has it; None: not yet."""
        self.sealing = False
        """The payload has arrived; the seal is on its way."""
        self.failed = False
        """Terminal, but parts may be on their way: remembered, so that it is never said to be drained."""


class _Reader:
    """One session. `writes` are those that have no last word, or had `unknown`."""

    __slots__ = ("last", "ready", "segment", "writes")

    def __init__(self, segment: str) -> None:
        self.segment = segment
        self.ready = False
        self.last = WriteId(0)
        self.writes: dict[WriteId, _Write] = {}


class PushWriter(Actor[Mail]):
    """Writes staged sources into windows, as prefill nodes ask; `poller` is over a `PushPlane`."""

    def __init__(self, mailbox: Mailbox[Mail], endpoint: Endpoint, pool: Pool, poller: ReadPoller) -> None:
        super().__init__("push", mailbox)
        self._endpoint = endpoint
        self._pool = pool
        self._poller = poller
        self._readers: dict[SessionId, _Reader] = {}
        self._posted: dict[ReadId, tuple[SessionId, WriteId]] = {}
        self._next_read = 1

    def handle(self, message: Mail) -> None:
        match message:
            case FromReader():
                reader = self._readers.get(message.session)
                if reader is not None:
                    self._hear(message.session, reader, message.message)
            case PollerNews():
                for result in message.results:
                    self._news(result)
            case ReaderOpened():
                self._readers[message.session] = _Reader(message.segment)
            case ReaderGone():
                self._lose(message.session)

    def _hear(self, session: SessionId, reader: _Reader, message: Windows | PushWanted | Reconcile) -> None:
        match message:
            case Windows():
                self._poller.open_peer(session, reader.segment, message.regions)
            case PushWanted():
                if message.write <= reader.last:
                    return  # a repeat: its slot may be somebody else's by now
                reader.last = message.write
                if len(reader.writes) >= _MAX_OPEN_WRITES or not self._is_staged(message.source):
                    self._endpoint.send(session, EmbeddingWritten(message.write, "untouched"))
                    return
                reader.writes[message.write] = write = _Write(message)
                if reader.ready:
                    self._post(session, write)
            case Reconcile():
                self._reconcile(session, reader, message.writes)

    def _is_staged(self, source: Source) -> bool:
        """Inside one region of our pool, its seal too. Whether it is still that source, the seal tells."""
        regions = self._pool.total_nbytes // self._pool.region_nbytes
        end = source.offset + sealed_nbytes(source.nbytes)
        in_region = source.offset >= 0 and source.nbytes >= 0 and end <= self._pool.region_nbytes
        return in_region and 0 <= source.region < regions

    def _post(self, session: SessionId, write: _Write) -> None:
        """Its payload; then, when that has arrived, the seal that stands behind it now."""
        wanted, source = write.wanted, write.wanted.source
        start, nbytes = 0, source.nbytes
        if write.sealing:
            start, nbytes = seal_offset(nbytes), SEAL_WORD.size
        write.read = read = ReadId(self._next_read)
        self._next_read += 1
        self._posted[read] = (session, wanted.write)
        address = self._pool.address(Extent(source.region, source.offset + start, nbytes))
        into = Source(wanted.region, wanted.offset + start, nbytes, Seal(0))
        self._poller.read(ReadRequest(read, session, address, into))

    def _reconcile(self, session: SessionId, reader: _Reader, writes: tuple[WriteId, ...]) -> None:
        drained = []
        for number in writes:
            write = reader.writes.get(number)
            if write is None or write.read is None:
                reader.writes.pop(number, None)
                reader.last = max(reader.last, number)
                drained.append(number)
            elif write.failed:
                self._endpoint.send(session, EmbeddingWritten(number, "unknown"))
            else:
                self._poller.abort(write.read)
        if drained:
            self._endpoint.send(session, Drained(tuple(drained)))

    def _news(self, result: ReadResult) -> None:
        match result:
            case ReadDone():
                self._end(result)
            case PeerOpened():
                reader = self._readers.get(result.session)
                if reader is None:
                    return
                if not result.ok:
                    self._endpoint.close(result.session, DataPlaneError.code, result.reason)
                    return
                reader.ready = True
                for write in reader.writes.values():
                    self._post(result.session, write)
            case PollerFailed():
                raise DataPlaneError(f"the poller of writes failed: {result.reason}")

    def _end(self, done: ReadDone) -> None:
        session, number = self._posted.pop(done.read)
        reader = self._readers.get(session)
        if reader is None:
            return
        write = reader.writes[number]
        if done.outcome == "ok" and not write.sealing:
            write.sealing = True
            self._post(session, write)
            return
        outcome: WriteOutcome = "written"
        if done.outcome != "ok":
            outcome = "unknown" if done.posted else "untouched"
        if outcome == "unknown":
            write.failed = True
            log_info("a write failed", session=session, outcome=done.outcome)
        else:
            del reader.writes[number]
        self._endpoint.send(session, EmbeddingWritten(number, outcome))

    def _lose(self, session: SessionId) -> None:
        """Its window is being revoked: what still runs would wait for a peer that may never answer."""
        reader = self._readers.pop(session, None)
        if reader is None:
            return
        for write in reader.writes.values():
            if write.read is not None and not write.failed:
                self._poller.abort(write.read)
        self._poller.close_peer(session)

    def counts(self) -> dict[str, int]:
        return {"writes": len(self._posted), "readers": len(self._readers)}
