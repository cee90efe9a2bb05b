"""A plane that wraps another one and misbehaves: seeded for chaos, by name for tests.

It stays truthful in one respect, or nothing could be concluded: DONE, FAILED and REFUSED are
terminal. What it does between is what real transports do: late ends, failures before and after bytes
were written, refusals, sources reused before the read had ended, reads that hang until aborted.

Hold points stop the plane at a named moment until a test lets go of it:
- `payload`: pieces larger than a seal are accepted, but stay UNKNOWN and unwritten;
- `seal`: the same for the read of the seal;
- `open`: `open_peer` blocks.
"""

import ctypes
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from epd.dataplane.base import DataPlane, Piece, Posted, ReadState
from epd.memory.region import Region
from epd.protocol.ids import SessionId
from epd.protocol.messages import RegionDescriptor
from epd.protocol.sources import SEAL_WORD, seal_offset

HoldPoint = Literal["payload", "seal", "open"]

_REMEMBERED_PAYLOADS: Final = 4096


class Rates(msgspec.Struct, frozen=True):
    """Probabilities per piece. `delay` answers UNKNOWN up to `max_delay_polls` times first."""

    delay: float = 0.0
    max_delay_polls: int = 50
    fail: float = 0.0
    """Ends FAILED, with the bytes written or not."""
    refuse: float = 0.0
    stale: float = 0.0
    """Per read with a seal: the payload is torn, and the seal tells."""
    hang: float = 0.0
    """Stays UNKNOWN until the peer is aborted; then FAILED."""


class _Pending(NamedTuple):
    session: SessionId
    piece: Piece
    point: HoldPoint | None
    """Posted only when this point is let go."""
    polls: int
    fails: bool
    hangs: bool
    inner: int | None
    result: ReadState | None


class FaultyPlane:
    """See `DataPlane`. `before_post(session, piece)` is called in the poller's thread for each piece,
    after the one before it has ended: the place to reuse a source behind a reader's back."""

    def __init__(
        self,
        inner: DataPlane,
        *,
        seed: int = 0,
        rates: Rates | None = None,
        before_post: Callable[[SessionId, Piece], None] | None = None,
    ) -> None:
        self.name = inner.name
        self.segment = inner.segment
        self.device = inner.device
        self.pieces = inner.pieces
        self._inner = inner
        self._random = random.Random(seed)
        self.rates = rates or Rates()
        self._before_post = before_post
        self.faults: dict[str, int] = {}
        """How often each kind was injected."""
        self._held: dict[HoldPoint, threading.Event] = {}
        self._reached: dict[HoldPoint, threading.Event] = {}
        self._survives_abort: set[HoldPoint] = set()
        self._pending: dict[int, _Pending] = {}
        self._next_ticket = 1
        self._payloads: OrderedDict[tuple[SessionId, int, int], list[Piece | None]] = OrderedDict()

    # -- hold points -------------------------------------------------------------------------

    def hold(self, point: HoldPoint, *, survives_abort: bool = False) -> threading.Event:
        """Stop at this point from now on; the event is set when something has been stopped there.

        A held read ends FAILED when its peer is aborted; with `survives_abort` it does not end before
        `release`: an engine that may still write.
        """
        self._reached[point] = threading.Event()
        if survives_abort:
            self._survives_abort.add(point)
        self._held[point] = threading.Event()
        return self._reached[point]

    def release(self, point: HoldPoint) -> None:
        """Let go: what was stopped here goes on, nothing more is stopped."""
        held = self._held.pop(point, None)
        self._survives_abort.discard(point)
        if held is not None:
            held.set()

    # -- the wrapped plane -------------------------------------------------------------------

    def allocate(self, count: int, region_nbytes: int, *, exported: bool) -> list[Region]:
        return self._inner.allocate(count, region_nbytes, exported=exported)

    def words(self, nbytes: int) -> Region:
        return self._inner.words(nbytes)

    def digest(self, address: int, nbytes: int) -> bytes:
        return self._inner.digest(address, nbytes)

    def export(self) -> tuple[RegionDescriptor, ...]:
        return self._inner.export()

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> ReadState:
        held = self._held.get("open")
        if held is not None:
            self._reached["open"].set()
            held.wait()
        return self._inner.open_peer(session, segment, regions)

    def close_peer(self, session: SessionId) -> None:
        for key in [key for key in self._payloads if key[0] == session]:
            del self._payloads[key]
        self._inner.close_peer(session)

    def post(self, session: SessionId, piece: Piece) -> Posted | ReadState:
        if self._before_post is not None:
            self._before_post(session, piece)
        if self._draw("refuse"):
            return ReadState.REFUSED
        point: HoldPoint = "seal" if piece.nbytes == SEAL_WORD.size else "payload"
        held = point in self._held
        fails, hangs = self._draw("fail"), self._draw("hang")
        polls = self._random.randint(1, self.rates.max_delay_polls) if self._draw("delay") else 0
        if held:
            self._reached[point].set()
        pending = _Pending(session, piece, point if held else None, polls, fails, hangs, None, None)
        if fails and self._random.random() < 0.5:
            pending = pending._replace(result=ReadState.FAILED)  # before any byte was written
        elif not (held or hangs):
            pending = self._post_inner(pending)
            if pending.result is not None and not polls:
                return self._end(pending, pending.result)
        ticket = self._next_ticket
        self._next_ticket += 1
        self._pending[ticket] = pending
        return Posted(ticket)

    def _post_inner(self, pending: _Pending) -> _Pending:
        answer = self._inner.post(pending.session, pending.piece)
        if isinstance(answer, Posted):
            return pending._replace(inner=answer.ticket, point=None)
        return pending._replace(result=answer, point=None)

    def poll(self, ticket: int) -> ReadState:
        pending = self._pending[ticket]
        if pending.hangs or (pending.point is not None and pending.point in self._held):
            return ReadState.UNKNOWN
        if pending.polls > 0:
            self._pending[ticket] = pending._replace(polls=pending.polls - 1)
            return ReadState.UNKNOWN
        if pending.result is None and pending.inner is None:
            pending = self._pending[ticket] = self._post_inner(pending)
        result = pending.result
        if result is None and pending.inner is not None:
            result = self._inner.poll(pending.inner)
        if result is None or result is ReadState.UNKNOWN:
            return ReadState.UNKNOWN
        del self._pending[ticket]
        # It was said to be posted before the wrapped plane was asked; REFUSED is no end of a ticket.
        return self._end(pending, ReadState.FAILED if result is ReadState.REFUSED else result)

    def _end(self, pending: _Pending, result: ReadState) -> ReadState:
        if pending.fails:
            return ReadState.FAILED
        if result is ReadState.DONE:
            self._make_stale(pending)
        return result

    def _make_stale(self, pending: _Pending) -> None:
        """Tear a payload exactly when the seal that follows it says so (the slot is still the read's)."""
        session, piece, _, *_ = pending
        if piece.nbytes != SEAL_WORD.size:
            after = seal_offset(piece.offset + piece.nbytes)
            self._payloads.setdefault((session, piece.region, after), []).append(piece)
            if len(self._payloads) > _REMEMBERED_PAYLOADS:
                self._payloads.popitem(last=False)
            return
        key = (session, piece.region, piece.offset)
        payloads = self._payloads.pop(key, [])
        if len(payloads) > 1:
            # Several reads of one source: nobody knows whose seal this was and whose slot is still its own.
            self._payloads[key] = [None] * (len(payloads) - 1)
            return
        payload = payloads[0] if payloads else None
        if payload is not None and self._draw("stale"):
            ctypes.memset(payload.local_address, 0xA5, payload.nbytes)
            seal = ctypes.c_uint64.from_address(piece.local_address)
            seal.value ^= 1

    def read_now(self, session: SessionId, piece: Piece) -> ReadState:
        return self._inner.read_now(session, piece)

    def abort(self, session: SessionId) -> None:
        for ticket, pending in self._pending.items():
            if pending.session == session and (pending.hangs or pending.point is not None):
                if pending.point in self._survives_abort:
                    continue
                self._pending[ticket] = pending._replace(hangs=False, point=None, result=ReadState.FAILED)
        self._inner.abort(session)

    def registrations(self) -> int:
        return self._inner.registrations()

    def close(self) -> None:
        for point in list(self._held):
            self.release(point)
        self._inner.close()

    def _draw(self, kind: Literal["delay", "fail", "refuse", "stale", "hang"]) -> bool:
        rate: float = getattr(self.rates, kind)
        if rate <= 0.0 or self._random.random() >= rate:
            return False
        self.faults[kind] = self.faults.get(kind, 0) + 1
        return True
