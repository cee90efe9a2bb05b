"""Push: the prefill node's reads, performed by the encoder. Only in nodes with `direction = push`.

Everything above stays as it is: a read is asked for, and ends with one `ReadDone`. `PushedReads` stands
where the poller stands on a prefill node that pulls; it asks the encoder to write the source, and ends
the read by the rules of the window machine. `PushWriter` is the encoder's half: it hands the writes to
its own poller, payload first, then the seal that the source has by then.
"""

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final, NamedTuple

import structlog

from epd.actors.transfer import PollerNews
from epd.dataplane.base import DataPlane
from epd.dataplane.poller import (
    PeerOpened,
    PollerFailed,
    ReadDone,
    ReadPoller,
    ReadPosted,
    ReadRequest,
    ReadResult,
)
from epd.dataplane.push import PushPlane
from epd.memory.pool import Extent, Pool
from epd.observe.log import log_info
from epd.protocol import push
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import ReadId, Seal, SessionId, WriteId
from epd.protocol.machine import Effect
from epd.protocol.messages import (
    Drained,
    EmbeddingWritten,
    PushWanted,
    Reconcile,
    RegionDescriptor,
    Source,
    Windows,
    WriteOutcome,
)
from epd.protocol.sources import SEAL_WORD, seal_offset, sealed_nbytes
from epd.runtime.actor import Actor
from epd.runtime.endpoint import Endpoint
from epd.runtime.machines import MachineTable
from epd.runtime.mailbox import Mailbox, Ref
from epd.runtime.runtime import Runtime

_log = structlog.get_logger()

_MAX_OPEN_WRITES: Final = 65_536
"""Of one session; what it asks for beyond is answered as not begun."""


# -- the prefill node's half -------------------------------------------------------------------


class WindowAsked(NamedTuple):
    session: SessionId


class WindowUnwanted(NamedTuple):
    session: SessionId


class AbortAsked(NamedTuple):
    read: ReadId


class FromWriter(NamedTuple):
    session: SessionId
    message: EmbeddingWritten | Drained


class WindowMade(NamedTuple):
    """`regions` is None if it could not be made, `reason` says why."""

    session: SessionId
    regions: tuple[RegionDescriptor, ...] | None
    reason: str


class WindowTaken(NamedTuple):
    session: SessionId
    proven: bool


class Compared(NamedTuple):
    """A write that has arrived, and whether its bytes have the digest."""

    write: WriteId
    equal: bool


ReaderMail = (
    ReadRequest | WindowAsked | WindowUnwanted | AbortAsked | FromWriter | WindowMade | WindowTaken | Compared
)


class _Asked(NamedTuple):
    request: ReadRequest
    started_s: float


class PushedReads(Actor[ReaderMail]):
    """Reads that encoders perform; what `TransferActor` asks of a poller can be asked of it.

    `thread` has one thread: windows are made and taken away there, and digests computed. Without `check`
    neither seals nor digests are looked at.
    """

    def __init__(
        self,
        runtime: Runtime,
        mailbox: Mailbox[ReaderMail],
        endpoint: Endpoint,
        plane: PushPlane,
        thread: Executor,
        limits: push.Limits,
        *,
        check: bool,
    ) -> None:
        super().__init__("push", mailbox)
        self._clock = runtime.clock
        self._endpoint = endpoint
        self._plane = plane
        self._thread = thread
        self._check = check
        self._windows: MachineTable = runtime.machines("push", push, limits, self._perform)
        self._made: dict[SessionId, WindowMade] = {}
        self._writes: dict[WriteId, _Asked] = {}
        self._of_read: dict[ReadId, WriteId] = {}
        self._next_write = 1
        self._running: set[asyncio.Future[ReaderMail]] = set()
        self.fenced = 0
        """Windows that were revoked, by proof."""
        self.to_transfer: Ref[PollerNews]

    # -- for the TransferActor -----------------------------------------------------------------

    def read(self, request: ReadRequest) -> None:
        self.mailbox.tell(request)

    def abort(self, read: ReadId) -> None:
        self.mailbox.tell(AbortAsked(read))

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> None:
        """The writer's memory is not of interest here, only that it is to get a window."""
        self.mailbox.tell(WindowAsked(session))

    def close_peer(self, session: SessionId) -> None:
        self.mailbox.tell(WindowUnwanted(session))

    # -- mail ------------------------------------------------------------------------------------

    def handle(self, message: ReaderMail) -> None:
        match message:
            case ReadRequest():
                self._start(message)
            case FromWriter(session, EmbeddingWritten(write, outcome)):
                self._windows.feed(session, push.WriteEnded(write, outcome))
            case FromWriter(session, Drained(writes)):
                self._windows.feed(session, push.WritesDrained(writes))
            case AbortAsked():
                unwanted = self._of_read.get(message.read)
                if unwanted is not None:
                    self._windows.feed(self._writes[unwanted].request.session, push.AbortWanted(unwanted))
            case WindowAsked():
                self._windows.feed(message.session, push.WindowWanted())
            case WindowUnwanted():
                self._windows.feed(message.session, push.SessionOver())
            case WindowMade():
                self._made[message.session] = message
                self._windows.feed(message.session, push.WindowOpened(message.regions is not None))
                del self._made[message.session]
            case WindowTaken():
                self.fenced += message.proven
                self._windows.feed(message.session, push.WindowRevoked(message.proven))
            case Compared():
                self._finish(message.write, "ok" if message.equal else "digest_mismatch")

    def _start(self, request: ReadRequest) -> None:
        write = WriteId(self._next_write)
        self._next_write += 1
        self._writes[write] = _Asked(request, self._clock.now_s())
        self._of_read[request.read] = write
        # No seal is zero: that it stands there afterwards is what shows that anything has arrived.
        _seal_word(request).value = 0
        self._windows.feed(request.session, push.WriteWanted(write))

    def _perform(self, session: SessionId, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case push.AskWrite():
                    self._ask(session, effect.write)
                case push.EndWrite():
                    self._end(effect.write, effect.end)
                case push.AskDrained():
                    self._endpoint.send(session, Reconcile(effect.writes))
                case push.OpenWindow():
                    self._work(_made, self._plane, session)
                case push.TellOpened():
                    self._tell_opened(self._made[session])
                case push.RevokeWindow():
                    self._work(_taken, self._plane, session)
                case push.EndSession():
                    self._endpoint.close(session, DataPlaneError.code, effect.reason)

    def _ask(self, session: SessionId, write: WriteId) -> None:
        request = self._writes[write].request
        region, offset = self._plane.place_of(request.local_address)
        self._endpoint.send(session, PushWanted(write, request.source, region, offset))
        self._tell(ReadPosted(request.read))

    def _tell_opened(self, made: WindowMade) -> None:
        if made.regions is not None:
            self._endpoint.send(made.session, Windows(made.regions))
        self._tell(PeerOpened(made.session, made.regions is not None, made.reason))

    def _end(self, write: WriteId, end: push.End) -> None:
        request = self._writes[write].request
        if end != "written":
            self._finish(write, "failed")
        elif self._check and _seal_word(request).value != request.source.seal:
            self._finish(write, "seal_mismatch")
        elif self._check and request.digest is not None:
            self._work(_compared, self._plane, write, request)
        else:
            self._finish(write, "ok")

    def _finish(self, write: WriteId, outcome: str) -> None:
        request, started_s = self._writes.pop(write)
        del self._of_read[request.read]
        nbytes = request.source.nbytes if outcome == "ok" else 0
        self._tell(ReadDone(request.read, outcome, self._clock.now_s() - started_s, nbytes))

    def _tell(self, result: ReadResult) -> None:
        self.to_transfer.tell(PollerNews([result]))

    def _work(self, work: Callable[..., ReaderMail], *arguments: object) -> None:
        """Do it in the thread; what it returns is mail."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        running.add_done_callback(lambda done: self.mailbox.tell(done.result()))

    # -- what is held ------------------------------------------------------------------------------

    @property
    def windows(self) -> dict[str, int]:
        """Windows by what is being done with them."""
        states = [type(state) for state in self._windows.states()]
        return {
            "granted": sum(state in (push.Granted, push.Writing) for state in states),
            "revoking": states.count(push.Revoking),
            "held": states.count(push.Held),
        }

    @property
    def quarantined_nbytes(self) -> int:
        """Of slots that only the revoking of a window will give back, or nothing."""
        states = self._windows.states()
        lost = [s.writes for s in states if isinstance(s, push.Revoking | push.Held)]
        doubted = [s.doubted for s in states if isinstance(s, push.Writing)]
        asked = [self._writes.get(write) for writes in (*lost, *doubted) for write in writes]
        return sum(one.request.source.nbytes for one in asked if one is not None)

    def counts(self) -> dict[str, int]:
        return {"writes": len(self._writes), "windows_held": self.windows["held"]}


def _seal_word(request: ReadRequest) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(request.local_address + seal_offset(request.source.nbytes))


def _made(plane: PushPlane, session: SessionId) -> WindowMade:
    try:
        return WindowMade(session, plane.open_window(session), "")
    except DataPlaneError as error:
        _log.warning("no window", reason=error.message)
        return WindowMade(session, None, error.message)


def _taken(plane: PushPlane, session: SessionId) -> WindowTaken:
    proven = plane.revoke_window(session)
    if not proven:
        _log.error("a window cannot be revoked: what its session was writing stays out of use")
    return WindowTaken(session, proven)


def _compared(plane: DataPlane, write: WriteId, request: ReadRequest) -> Compared:
    return Compared(write, plane.digest(request.local_address, request.source.nbytes) == request.digest)


# -- the encoder's half ------------------------------------------------------------------------


class ReaderOpened(NamedTuple):
    """A prefill node; its engine is at `segment`."""

    session: SessionId
    segment: str


class ReaderGone(NamedTuple):
    session: SessionId


class FromReader(NamedTuple):
    session: SessionId
    message: Windows | PushWanted | Reconcile


WriterMail = ReaderOpened | ReaderGone | FromReader | PollerNews


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


class PushWriter(Actor[WriterMail]):
    """Writes staged sources into windows, as prefill nodes ask; `poller` is over a `PushPlane`."""

    def __init__(
        self, mailbox: Mailbox[WriterMail], endpoint: Endpoint, pool: Pool, poller: ReadPoller
    ) -> None:
        super().__init__("push", mailbox)
        self._endpoint = endpoint
        self._pool = pool
        self._poller = poller
        self._readers: dict[SessionId, _Reader] = {}
        self._posted: dict[ReadId, tuple[SessionId, WriteId]] = {}
        self._next_read = 1

    def handle(self, message: WriterMail) -> None:
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
