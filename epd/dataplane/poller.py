"""The one thread that posts reads and asks for their ends.

The loop's thread hands in commands and gets results, in batches, by `call_soon_threadsafe`. Each read
is driven by its machine (`epd.protocol.reads`). The thread sleeps on its command queue when nothing
is posted. With one read in flight it asks without pause for a moment after a post; otherwise it
pauses, longer the longer the youngest piece is out, and a command always wakes it.

No read is synchronous on a plane that can wait for a peer: a stopped peer would stop all the others'
reads. For the same reason the bound on posted pieces is per session, and peers are opened in threads
of their own. Among the reads of a session pieces are posted first in, first out, so that a large
read does not delay a small one; seals go first, they end reads.
"""

import asyncio
import contextlib
import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import structlog

from epd.dataplane.base import DataPlane, Piece, Posted, ReadState
from epd.protocol import reads
from epd.protocol.ids import ReadId, SessionId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import RegionDescriptor, Source
from epd.protocol.sources import SEAL_WORD, seal_offset

_log = structlog.get_logger()

PIECES_FROM_NBYTES: Final = 1024 * 1024
"""Reads of this size and more are cut in `PIECES`, or more if a piece would exceed the next bound."""
PIECES: Final = 4
MAX_PIECE_NBYTES: Final = 64 * 1024 * 1024
MAX_POSTED_PER_SESSION: Final = 8

_PAGE_NBYTES: Final = 4096
_SEAL_PIECE: Final = -1
"""The place of a piece's index in the queue of what is to be posted, for the seal."""
_SEALS: Final = 1024
_SPIN_S: Final = 200e-6
_PAUSE_S: Final = 30e-6
_MAX_PAUSE_S: Final = 1e-3
_PAUSE_PER_AGE: Final = 1 / 32
_ANNOUNCE_AFTER_S: Final = 2e-3
_ABORT_AGAIN_S: Final = 0.25
_TURN_S: Final = 500e-6
_PR_SET_TIMERSLACK: Final = 29


class ReadRequest(NamedTuple):
    """Read `source` to `local_address`, then check its seal and, if given, its digest, unless
    the poller is told not to check."""

    read: ReadId
    session: SessionId
    local_address: int
    source: Source
    digest: bytes | None = None


class ReadPosted(NamedTuple):
    """The engine has (a part of) this read and has not ended it within 2 ms: its time counts now."""

    read: ReadId


class ReadDone(NamedTuple):
    """The last word on a read; our engine will not touch its memory any more.

    `outcome`: ok, seal_mismatch, digest_mismatch, failed, refused or aborted. `seconds` since it was
    handed in; `nbytes` is 0 unless ok. `posted`: the engine had something of it.
    """

    read: ReadId
    outcome: str
    seconds: float
    nbytes: int
    posted: bool = True


class PeerOpened(NamedTuple):
    session: SessionId
    ok: bool
    reason: str


class PollerFailed(NamedTuple):
    """Our own bug: no read will be posted or ended any more."""

    reason: str


ReadResult = ReadPosted | ReadDone | PeerOpened | PollerFailed
Tap = Callable[[ReadId, Event, float, tuple[Effect, ...], reads.AnyState], None]
_Command = tuple[Callable[..., None], tuple[Any, ...]]
_Tapped = tuple[ReadId, Event, float, tuple[Effect, ...], reads.AnyState]


def cut(nbytes: int, pieces: int = PIECES) -> list[tuple[int, int]]:
    """`(offset, nbytes)` of what a payload of `nbytes` is read in; nothing of an empty one.

    `pieces` is the plane's wish (`DataPlane.pieces`); of 1 it gets one whole piece.
    """
    if nbytes == 0:
        return []
    if nbytes < PIECES_FROM_NBYTES or pieces == 1:
        return [(0, nbytes)]
    count = max(pieces, -(-nbytes // MAX_PIECE_NBYTES))
    step = -(-nbytes // (count * _PAGE_NBYTES)) * _PAGE_NBYTES
    return [(offset, min(step, nbytes - offset)) for offset in range(0, nbytes, step)]


class Opener(Protocol):
    """Who opens a peer beside the poller: a thread."""

    def join(self) -> None:
        """Wait for its end."""
        ...


class _Read:
    """One read that is not terminal. `seal_address` is held while its seal is being read."""

    __slots__ = ("pieces", "posted_s", "request", "seal_address", "started_s", "state")

    def __init__(self, request: ReadRequest, started_s: float, pieces: int) -> None:
        self.request = request
        self.started_s = started_s
        self.pieces = cut(request.source.nbytes, pieces)
        self.state: Any = reads.INITIAL
        self.posted_s: float | None = None
        self.seal_address = 0


class _Lane:
    """What is to be posted to one session, in order, and how many pieces are out."""

    __slots__ = ("posted", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[_Read, int]] = deque()
        self.posted = 0


class _Flight(NamedTuple):
    read: _Read
    piece: int


class ReadPoller:
    """Starts its thread at once; `stop` ends it. Commands may come from any thread.

    `deliver(results)` is called in the loop's thread. So is `tap(read, event, now_s, effects, state)`,
    once for each step of the machines, before the results that come with it; `state` is the one after
    it. Without `check` neither seals nor digests are looked at: bytes of a source that was reused too
    early are delivered.
    """

    def __init__(
        self,
        plane: DataPlane,
        deliver: Callable[[list[ReadResult]], None],
        loop: asyncio.AbstractEventLoop,
        *,
        tap: Tap | None = None,
        limits: reads.Limits | None = None,
        now_s: Callable[[], float] = time.monotonic,
        check: bool = True,
    ) -> None:
        self._plane = plane
        self._check = check
        self._deliver = deliver
        self._loop = loop
        self._tap = tap
        self._limits = limits or reads.Limits()
        self._now_s = now_s
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._reads: dict[ReadId, _Read] = {}
        self._lanes: dict[SessionId, _Lane] = {}
        self._flights: dict[int, _Flight] = {}
        self._unannounced: deque[_Read] = deque()
        self._openers: dict[SessionId, Opener] = {}
        self._closed_early: set[SessionId] = set()
        self._aborted_s: dict[SessionId, float] = {}
        self._last_post_s = 0.0
        self._results: list[ReadResult] = []
        self._steps: list[_Tapped] = []
        self._stopping = False
        self._give_up_s = 0.0
        # On planes that need it this memory is registered, once; a seal's word lands here.
        seals = plane.words(_SEALS * SEAL_WORD.size)
        self._free_seals = [seals.address + at for at in range(0, seals.nbytes, SEAL_WORD.size)]
        self._begin()

    # -- commands ----------------------------------------------------------------------------

    def read(self, request: ReadRequest) -> None:
        """Its end comes as one `ReadDone`."""
        self._put((self._start, (_Read(request, self._now_s(), self._plane.pieces),)))

    def abort(self, read: ReadId) -> None:
        """End a read by our own side; its `ReadDone` comes when it is terminal."""
        self._put((self._abort, (read,)))

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> None:
        """The answer comes as `PeerOpened`, unless the peer is closed before."""
        self._put((self._open, (session, segment, tuple(regions))))

    def close_peer(self, session: SessionId) -> None:
        """No more reads from it; those that run end by themselves."""
        self._put((self._close, (session,)))

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Abort all reads, wait for their ends, end the thread. Blocks: not for the loop's thread.

        False if something was not terminal within `timeout_s`: then its memory must not be reused.
        """
        self._put((self._stop, (timeout_s,)))
        self._thread.join(timeout_s + 1.0)
        return not (self._thread.is_alive() or self._reads or self._openers)

    # -- threads: the simulator drives its own without any -----------------------------------

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="epd-poller", daemon=True)
        self._thread.start()

    def _put(self, command: _Command) -> None:
        self._commands.put(command)

    def _run(self) -> None:
        # Otherwise a pause of 30 us takes 80: the kernel rounds the wake-ups of a thread.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
        while self._turn():
            pass

    def _pause(self, pause_s: float | None) -> _Command | None:
        """Until the next command or for so many seconds; None: for ever."""
        if pause_s == 0.0:
            # Nothing blocks in this turn, so leave the interpreter to the loop's thread for once.
            time.sleep(0)
            return self._next_command()
        try:
            return self._commands.get(timeout=pause_s)
        except queue.Empty:
            return None

    def _beside(self, work: Callable[[], None]) -> Opener:
        """Not in this thread: a stopped peer may take seconds to be given up."""
        thread = threading.Thread(target=work, name="epd-open-peer", daemon=True)
        thread.start()
        return thread

    # -- turns -------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Do what there is to do; False: it was the last time."""
        try:
            self._take_commands()
            self._post_waiting()
            self._poll_flights()
            self._abort_again()
            self._announce_old()
            self._flush()
        except Exception as error:
            _log.exception("the read poller failed")
            self._results.append(PollerFailed(f"{type(error).__name__}: {error}"))
            self._flush()
            return False
        return not self._is_over()

    def _is_over(self) -> bool:
        if not self._stopping:
            return False
        return not (self._reads or self._openers) or self._now_s() > self._give_up_s

    def _take_commands(self) -> None:
        """Pause as the reads in flight allow, until a command comes; then take all there are."""
        command = self._pause(self._pause_s())
        while command is not None:
            call, arguments = command
            call(*arguments)
            command = self._next_command()

    def _next_command(self) -> _Command | None:
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def _pause_s(self) -> float | None:
        if self._flights:
            age_s = self._now_s() - self._last_post_s
            if len(self._reads) == 1 and age_s < _SPIN_S:
                return 0.0
            return min(_MAX_PAUSE_S, max(_PAUSE_S, age_s * _PAUSE_PER_AGE))
        if self._lanes:
            return 0.0
        return _MAX_PAUSE_S if self._stopping else None

    def _flush(self) -> None:
        if not self._results and not self._steps:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
            self._loop.call_soon_threadsafe(self._hand_over, self._steps, self._results)
        self._steps, self._results = [], []

    def _hand_over(self, steps: list[_Tapped], results: list[ReadResult]) -> None:
        if self._tap is not None:
            for record in steps:
                self._tap(*record)
        if results:
            self._deliver(results)

    # -- peers -------------------------------------------------------------------------------

    def _open(self, session: SessionId, segment: str, regions: tuple[RegionDescriptor, ...]) -> None:
        if self._stopping:
            return

        def work() -> None:
            try:
                ok = self._plane.open_peer(session, segment, regions) is ReadState.DONE
                reason = "" if ok else f"{segment} cannot be reached or does not export what it announced"
            except Exception as error:  # told, not raised: an open peer is never lost in a thread
                _log.exception("opening a peer failed")
                ok, reason = False, f"{type(error).__name__}: {error}"
            self._put((self._opened, (PeerOpened(session, ok, reason),)))

        self._openers[session] = self._beside(work)

    def _opened(self, result: PeerOpened) -> None:
        self._openers.pop(result.session).join()
        if result.session in self._closed_early or self._stopping:
            self._closed_early.discard(result.session)
            self._plane.close_peer(result.session)
            return
        self._results.append(result)

    def _close(self, session: SessionId) -> None:
        if session in self._openers:
            self._closed_early.add(session)
        else:
            self._plane.close_peer(session)

    # -- reads -------------------------------------------------------------------------------

    def _start(self, read: _Read) -> None:
        request = read.request
        self._reads[request.read] = read
        if self._stopping:
            self._feed(read, reads.AbortWanted())
            return
        seal = request.source.seal if self._check else None
        self._feed(read, reads.ReadWanted(len(read.pieces), seal))

    def _abort(self, read_id: ReadId) -> None:
        read = self._reads.get(read_id)
        if read is not None:
            self._feed(read, reads.AbortWanted())

    def _stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._give_up_s = self._now_s() + timeout_s
        for read in list(self._reads.values()):
            self._feed(read, reads.AbortWanted())

    def _feed(self, read: _Read, event: reads.AnyEvent) -> None:
        """Step the read's machine and perform the effects; what they cause at once is fed as well."""
        events: deque[reads.AnyEvent] = deque((event,))
        while events:
            fed, now_s = events.popleft(), self._now_s()
            read.state, effects = reads.step(read.state, fed, now_s, self._limits)
            if self._tap is not None:
                self._steps.append((read.request.read, fed, now_s, effects, read.state))
            for effect in effects:
                match effect:
                    case reads.PostPiece():
                        self._lane(read).waiting.append((read, effect.index))
                    case reads.ReadSeal():
                        self._lane(read).waiting.appendleft((read, _SEAL_PIECE))
                    case reads.AbortPeer():
                        self._abort_peer(read.request.session, now_s)
                    case reads.Finish():
                        self._finish(read, effect.outcome, now_s)
            if _is_lost(read.state):
                events.extend(self._withdraw(read))

    def _abort_peer(self, session: SessionId, now_s: float) -> None:
        self._aborted_s[session] = now_s
        self._plane.abort(session)

    def _abort_again(self) -> None:
        """An abort can miss, for example a connection that was just being made."""
        now_s = self._now_s()
        for session, aborted_s in list(self._aborted_s.items()):
            if now_s - aborted_s < _ABORT_AGAIN_S:
                continue
            flights = self._flights.values()
            if any(f.read.request.session == session and _is_lost(f.read.state) for f in flights):
                self._abort_peer(session, now_s)
            else:
                del self._aborted_s[session]

    def _lane(self, read: _Read) -> _Lane:
        return self._lanes.setdefault(read.request.session, _Lane())

    def _withdraw(self, read: _Read) -> list[reads.AnyEvent]:
        """Take back what was not posted yet: nothing of it will ever be written."""
        session = read.request.session
        lane = self._lanes.get(session)
        if lane is None:
            return []
        withdrawn: list[reads.AnyEvent] = []
        for _ in range(len(lane.waiting)):
            waiting, index = lane.waiting.popleft()
            if waiting is not read:
                lane.waiting.append((waiting, index))
            elif index == _SEAL_PIECE:
                withdrawn.append(reads.SealRead(None))
            else:
                withdrawn.append(reads.PieceEnded(index, "refused"))
        self._drop_if_idle(session, lane)
        return withdrawn

    def _drop_if_idle(self, session: SessionId, lane: _Lane) -> None:
        if not lane.waiting and not lane.posted:
            self._lanes.pop(session, None)

    def _finish(self, read: _Read, outcome: str, now_s: float) -> None:
        request = read.request
        del self._reads[request.read]
        digest = request.digest if self._check else None
        if outcome == "ok" and digest is not None and self._digest(request) != digest:
            outcome = "digest_mismatch"
        nbytes = request.source.nbytes if outcome == "ok" else 0
        posted = read.posted_s is not None
        self._results.append(ReadDone(request.read, outcome, now_s - read.started_s, nbytes, posted))

    def _digest(self, request: ReadRequest) -> bytes:
        return self._plane.digest(request.local_address, request.source.nbytes)

    # -- pieces ------------------------------------------------------------------------------

    def _post_waiting(self) -> None:
        """Post what may be posted, one piece of each session in turn; a while only (`_TURN_S`),
        because a synchronous plane copies in here and results and commands wait."""
        stop_s = self._now_s() + _TURN_S
        progress = True
        while progress:
            progress = False
            for session, lane in list(self._lanes.items()):
                if lane.waiting and lane.posted < MAX_POSTED_PER_SESSION:
                    progress |= self._post_one(session, lane)
                if self._now_s() > stop_s:
                    return

    def _post_one(self, session: SessionId, lane: _Lane) -> bool:
        read, index = lane.waiting[0]
        if index == _SEAL_PIECE and not self._free_seals:
            return False
        lane.waiting.popleft()
        answer = self._plane.post(session, self._piece(read, index))
        if isinstance(answer, Posted):
            self._last_post_s = self._now_s()
            self._flights[answer.ticket] = _Flight(read, index)
            lane.posted += 1
            if read.posted_s is None:
                read.posted_s = self._last_post_s
                self._unannounced.append(read)
        else:
            self._feed(read, self._end_of(read, index, answer))
            self._drop_if_idle(session, lane)
        return True

    def _piece(self, read: _Read, index: int) -> Piece:
        request, source = read.request, read.request.source
        if index == _SEAL_PIECE:
            read.seal_address = self._free_seals.pop()
            after = source.offset + seal_offset(source.nbytes)
            return Piece(read.seal_address, source.region, after, SEAL_WORD.size)
        offset, nbytes = read.pieces[index]
        return Piece(request.local_address + offset, source.region, source.offset + offset, nbytes)

    def _end_of(self, read: _Read, index: int, state: ReadState) -> reads.AnyEvent:
        if index != _SEAL_PIECE:
            outcomes: dict[ReadState, reads.PieceOutcome]
            outcomes = {ReadState.DONE: "done", ReadState.FAILED: "failed", ReadState.REFUSED: "refused"}
            return reads.PieceEnded(index, outcomes[state])
        value = None
        if state is ReadState.DONE:
            (value,) = SEAL_WORD.unpack(ctypes.string_at(read.seal_address, SEAL_WORD.size))
        self._free_seals.append(read.seal_address)
        return reads.SealRead(value)

    def _poll_flights(self) -> None:
        for ticket, (read, index) in list(self._flights.items()):
            state = self._plane.poll(ticket)
            if state is ReadState.UNKNOWN:
                continue
            del self._flights[ticket]
            session = read.request.session
            lane = self._lanes[session]
            lane.posted -= 1
            self._feed(read, self._end_of(read, index, state))
            self._drop_if_idle(session, lane)

    def _announce_old(self) -> None:
        """Only reads that take a while are announced: the others end with the next results anyway."""
        if not self._unannounced:
            return
        old_s = self._now_s() - _ANNOUNCE_AFTER_S
        while self._unannounced:
            read = self._unannounced[0]
            if read.request.read in self._reads:
                if read.posted_s is None or read.posted_s > old_s:
                    return
                self._results.append(ReadPosted(read.request.read))
            self._unannounced.popleft()


def _is_lost(state: reads.AnyState) -> bool:
    return isinstance(state, reads.Stopping) or (isinstance(state, reads.Sealing) and state.aborted)
