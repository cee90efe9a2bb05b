"""The prefill node's half of push: reads that the encoder performs. Only in nodes with `direction = push`.

Everything above stays as it is: a read is asked for, and ends with one `ReadDone`. `PushedReads` stands
where the poller stands on a prefill node that pulls; it asks the encoder (`epd.actors.push_writer`) to
write the source, and ends the read by the rules of the window machine.
"""

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import structlog

from epd.actors.transfer import PollerNews
from epd.dataplane.base import DataPlane
from epd.dataplane.poller import PeerOpened, ReadDone, ReadPosted, ReadRequest, ReadResult
from epd.dataplane.push import PushPlane
from epd.protocol import push
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import ReadId, SessionId, WriteId
from epd.protocol.machine import Effect
from epd.protocol.messages import (
    Drained,
    EmbeddingWritten,
    PushWanted,
    Reconcile,
    RegionDescriptor,
    Windows,
)
from epd.protocol.sources import seal_offset
from epd.runtime.actor import Actor
from epd.runtime.endpoint import Endpoint
from epd.runtime.machines import MachineTable
from epd.runtime.mailbox import Mailbox, Ref
from epd.runtime.runtime import Runtime

_log = structlog.get_logger()


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


Mail = (
    ReadRequest | WindowAsked | WindowUnwanted | AbortAsked | FromWriter | WindowMade | WindowTaken | Compared
)


class _Asked(NamedTuple):
    request: ReadRequest
    started_s: float


class PushedReads(Actor[Mail]):
    """Reads that encoders perform; what `TransferActor` asks of a poller can be asked of it.

    `thread` has one thread: windows are made and taken away there, and digests computed. Without `check`
    neither seals nor digests are looked at.
    """

    def __init__(
        self,
        runtime: Runtime,
        mailbox: Mailbox[Mail],
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
        self._running: set[asyncio.Future[Mail]] = set()
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

    def handle(self, message: Mail) -> None:
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

    def _work(self, work: Callable[..., Mail], *arguments: object) -> None:
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
