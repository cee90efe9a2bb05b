"""Sends what sessions have queued: once at the end of each turn of the loop, and when there is room.

A send that finds no room is tried again when the socket's descriptor wakes. That wake-up may have
been swallowed by a read or another send in between, so a slow timer stands behind it.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from epd.protocol.wire import Lane
from epd.runtime.clock import Clock
from epd.runtime.lanes import LaneSocket, SendResult
from epd.runtime.outbox import MAX_MEDIA_MESSAGES
from epd.runtime.peers import Session
from epd.runtime.timers import TimerHandle, Timers

_RETRY_S: Final = 0.02
_PROBE_PAUSE_S: Final = 0.005
_PROBE_PAUSE_PER_SESSION_S: Final = 0.0002
"""Between two probes of all sessions of a lane, so that they cost a few percent of the loop at most."""


class Flusher:
    """`lost(session, lane)`: the listener's connection is gone, and all that came of it was read.
    `writable(session)`: there is room for media again. `failed`: a handler raised."""

    def __init__(
        self,
        clock: Clock,
        timers: Timers,
        lost: Callable[[Session, Lane], None],
        writable: Callable[[Session], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._clock = clock
        self._timers = timers
        self._lost = lost
        self._writable = writable
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._dirty: dict[Session, None] = {}
        self._blocked: dict[LaneSocket, dict[Session, None]] = {}
        self._gone: dict[Session, Lane] = {}
        self._used: dict[LaneSocket, None] = {}
        self._turn: asyncio.Handle | None = None
        self._retry: TimerHandle | None = None

    def later(self, session: Session) -> None:
        """At the end of this turn of the loop."""
        self._dirty[session] = None
        if self._turn is None:
            self._turn = self._loop.call_soon(self._flush)

    def early(self, session: Session) -> None:
        """Control messages leave before the turn ends, so that the peer works on them meanwhile."""
        if session.control is not None:
            self._note(session, session.control, session.outbox.flush_control(session.control))

    def now(self, session: Session) -> None:
        """As far as there is room; for last words."""
        self._send(session)
        self.later(session)  # reads what the sends may have swallowed, and reports the gone

    def woken(self, lane: LaneSocket) -> None:
        """There may be room."""
        for session in self._blocked.pop(lane, ()):
            self.later(session)

    def forget(self, session: Session) -> None:
        """The session has left its lanes."""
        self._dirty.pop(session, None)
        self._gone.pop(session, None)
        for lane, blocked in list(self._blocked.items()):
            blocked.pop(session, None)
            if not blocked:
                del self._blocked[lane]

    def close(self) -> None:
        """Nothing of this object stays in the loop."""
        self._dirty.clear()
        self._gone.clear()
        self._used.clear()
        self._blocked.clear()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _flush(self) -> None:
        self._turn = None
        dirty, self._dirty = self._dirty, {}
        try:
            for session in dirty:
                self._send(session)
            used, self._used = self._used, {}
            for lane in used:  # a send may have swallowed the wake-up of what arrived
                if not lane.closed:
                    lane.read()
            if self._gone:
                self._report_gone()
        except Exception as error:  # any bug of a handler ends the incarnation
            self._failed(error)
        if self._blocked and self._retry is None:
            self._retry = self._timers.at(self._clock.now_s() + _RETRY_S, self._try_again)

    def _send(self, session: Session) -> None:
        outbox = session.outbox
        if session.control is not None and outbox.messages:
            self._note(session, session.control, outbox.flush_control(session.control))
        if session.media is not None and session.media_ready and outbox.media_messages:
            self._note(session, session.media, outbox.flush_media(session.media))
        if outbox.media_refused and outbox.media_messages < MAX_MEDIA_MESSAGES:
            outbox.media_refused = False
            self._writable(session)

    def _note(self, session: Session, lane: LaneSocket, result: SendResult) -> None:
        self._used[lane] = None
        if result is SendResult.FULL:
            self._blocked.setdefault(lane, {})[session] = None
        elif result is SendResult.GONE:
            self._gone[session] = lane.lane

    def _report_gone(self) -> None:
        """Read all that came before acting on a loss: its last word may be among it."""
        gone, self._gone = self._gone, {}
        for session, lane in gone.items():
            socket = session.control if lane is Lane.CONTROL else session.media
            if socket is not None and not socket.closed:
                socket.read_all()
                if session.control is not None:
                    self._lost(session, lane)

    def _try_again(self) -> None:
        self._retry = None
        for lane in list(self._blocked):
            self.woken(lane)


class Probe:
    """Calls `probe` when asked to, but with a pause between two calls."""

    def __init__(self, clock: Clock, timers: Timers, probe: Callable[[], None]) -> None:
        self._clock = clock
        self._timers = timers
        self._probe = probe
        self._not_before_s = 0.0
        self._timer: TimerHandle | None = None

    def soon(self, sessions: int) -> None:
        """At once, or when the pause is over; `sessions` are how many it will reach."""
        if self._timer is not None:
            return
        now_s = self._clock.now_s()
        due_s, pause_s = self._not_before_s, _PROBE_PAUSE_S + sessions * _PROBE_PAUSE_PER_SESSION_S
        if now_s < due_s:
            self._timer = self._timers.at(due_s, self._late)
            self._not_before_s = due_s + pause_s
        else:
            self._not_before_s = now_s + pause_s
            self._probe()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self._probe()
