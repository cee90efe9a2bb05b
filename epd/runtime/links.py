"""Keeps one session to each configured address: dials, and dials again, with a growing pause.

Who refuses us (another version, another model, the wrong role) will not change its mind in a second:
such an address is tried slowly and reported once. Two addresses of one node would take turns in
ending each other's session, so the older one rests while the newer one's session lives.
"""

import random
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog

from epd.observe.log import log_info
from epd.protocol.errors import Busy, SessionRejected, TooFast, WrongRole
from epd.protocol.ids import Incarnation, SessionId
from epd.runtime.addresses import parse_address
from epd.runtime.clock import Clock
from epd.runtime.peers import PeerInfo
from epd.runtime.timers import TimerHandle, Timers

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Also the pause after a refusal, and the life of a session that makes the next pause short again."""
_REFUSALS: Final = frozenset({SessionRejected.code, TooFast.code, WrongRole.code})

_log = structlog.get_logger()


class Dials(Protocol):
    """What is needed of the endpoint."""

    def dial(self, address: str) -> SessionId: ...


class _Link:
    __slots__ = ("address", "incarnation", "opened_s", "pause_s", "reported", "rests_for", "session", "timer")

    def __init__(self, address: str) -> None:
        self.address = address
        self.session: SessionId | None = None
        self.timer: TimerHandle | None = None
        self.pause_s = FIRST_PAUSE_S
        self.opened_s: float | None = None
        self.incarnation: Incarnation | None = None
        self.rests_for: _Link | None = None
        self.reported = ""
        """The failure that was logged; not again until something else happens."""


class Links:
    """`jitter` gives a factor in 0..1 that is spread over half of each pause.

    Tell it of every `session_opened` and `session_ended` of the endpoint; those of others are ignored.
    Raises `ConfigError` for a malformed address.
    """

    def __init__(
        self,
        endpoint: Dials,
        addresses: Sequence[str],
        timers: Timers,
        clock: Clock,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        for address in addresses:
            parse_address(address, key="encoders")
        self._endpoint = endpoint
        self._timers = timers
        self._clock = clock
        self._jitter = jitter
        self._links = [_Link(address) for address in dict.fromkeys(addresses)]
        if len(self._links) < len(addresses):
            _log.warning("an address is given twice and used once", addresses=list(addresses))
        self._running = False

    def start(self) -> None:
        """Dial every address."""
        self._running = True
        for link in self._links:
            self._dial(link)

    def stop(self) -> None:
        """Dial no more; sessions are the endpoint's to end. Idempotent."""
        self._running = False
        for link in self._links:
            if link.timer is not None:
                link.timer.cancel()
                link.timer = None

    def session_opened(self, session: SessionId, peer: PeerInfo) -> None:
        """A session is in force."""
        link = self._find(session)
        if link is None:
            return
        link.opened_s = self._clock.now_s()
        link.incarnation = peer.incarnation
        link.reported = ""
        for other in self._links:
            if other is not link and other.incarnation == peer.incarnation:
                self._rest(other, link)
        log_info("session opened", address=link.address, peer=peer.node)

    def session_ended(self, session: SessionId, code: str, reason: str) -> None:
        """A session ended, or could not be had; it is dialled again."""
        link = self._find(session)
        if link is None:
            return
        lived_s = 0.0 if link.opened_s is None else self._clock.now_s() - link.opened_s
        link.session = link.opened_s = None
        if lived_s >= LONGEST_PAUSE_S:
            link.pause_s = FIRST_PAUSE_S
        if code in _REFUSALS:
            link.pause_s = LONGEST_PAUSE_S
        self._report(link, code, reason)
        for other in self._links:
            if other.rests_for is link:
                other.rests_for = None
                self._dial_later(other)
        self._dial_later(link)

    def _find(self, session: SessionId) -> _Link | None:
        return next((link for link in self._links if link.session == session), None)

    def _report(self, link: _Link, code: str, reason: str) -> None:
        if link.reported != code and self._running:
            link.reported = code
            _log.warning("no session", address=link.address, code=code, reason=reason)

    def _rest(self, link: _Link, newer: _Link) -> None:
        """Two addresses, one node; its older session has just ended for the newer one."""
        if link.timer is not None:
            link.timer.cancel()
            link.timer = None
        link.incarnation = None
        link.rests_for = newer
        _log.warning("two addresses of one node", address=link.address, used=newer.address)

    def _dial_later(self, link: _Link) -> None:
        if not self._running or link.timer is not None:
            return
        pause_s = link.pause_s * (0.5 + 0.5 * self._jitter())
        link.pause_s = min(2 * link.pause_s, LONGEST_PAUSE_S)

        def due() -> None:
            link.timer = None
            self._dial(link)

        link.timer = self._timers.at(self._clock.now_s() + pause_s, due)

    def _dial(self, link: _Link) -> None:
        if not self._running or link.session is not None or link.rests_for is not None:
            return
        try:
            link.session = self._endpoint.dial(link.address)
        except Busy as error:
            self._report(link, error.code, error.message)
            self._dial_later(link)
