"""A client of a node, for tools: `epd send`, the demo, tests. It copies; engines embed.

The client opens, probes and saves files; paths never travel.
"""

import asyncio
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from epd.actors.outgoing import OutgoingMedia, media_chunks
from epd.protocol.errors import BY_CODE, EpdError, PeerUnreachable, SessionLost
from epd.protocol.ids import Incarnation, NodeId, SessionId
from epd.protocol.messages import (
    AnyMessage,
    Heartbeat,
    Hello,
    Inventory,
    InventoryRequest,
    MediaMissing,
    NeedMedia,
    Outcome,
    PeerLimits,
    Rows,
    Submit,
    WantedDType,
)
from epd.protocol.session import SessionLimits
from epd.protocol.trace import LOGIC_VERSION
from epd.protocol.wire import MAX_ITEMS_PER_PART, PROTOCOL_VERSION
from epd.request import ImageItem
from epd.runtime.clock import MonotonicClock
from epd.runtime.endpoint import Endpoint, PeerInfo
from epd.runtime.keys import Security
from epd.runtime.timers import Timers


class Result(NamedTuple):
    """One ended request: its outcome and, if asked for, the bytes of each item."""

    outcome: Outcome
    rows: tuple[bytes, ...]


class _Open:
    def __init__(self, items: Sequence[ImageItem], rows: bool) -> None:
        self.items = items
        self.wants_rows = rows
        self.rows = [bytearray() for _ in items]
        self.outcome: Outcome | None = None
        self.done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def settle(self) -> None:
        """Done when the outcome is here and, as rows travel on the other lane, all of them too."""
        if self.outcome is None or self.done.done():
            return
        whole = all(len(got) == item.nbytes for got, item in zip(self.rows, self.outcome.items, strict=False))
        if not self.wants_rows or self.outcome.error is not None or whole:
            self.done.set_result(Result(self.outcome, tuple(bytes(got) for got in self.rows)))


class NodeClient:
    """One session of role `client`. Use as an async context manager.

    Entering raises `PeerUnreachable` or `SessionRejected`; requests that are open when the session
    ends raise `SessionLost`. `security` is needed where the node has keys: see `security_for`.
    """

    def __init__(self, address: str, *, connect_s: float = 5.0, security: Security | None = None) -> None:
        self.address = address
        self._security = security
        self._connect_s = connect_s
        self._endpoint: Endpoint
        self._session: SessionId | None = None
        self._opened: asyncio.Future[PeerInfo]
        self._requests: dict[int, _Open] = {}
        self._inventories: list[asyncio.Future[Inventory]] = []
        self._next_request = 1
        self._outgoing: OutgoingMedia
        self.peer: PeerInfo

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        clock = MonotonicClock()
        self._opened = loop.create_future()
        self._endpoint = Endpoint(
            hello=_hello,
            limits=SessionLimits(connect_s=self._connect_s),
            clock=clock,
            timers=Timers(clock, loop.call_at),
            recorder=None,
            handler=self,
            max_peers=1,
            security=self._security,
        )
        self._outgoing = OutgoingMedia(self._endpoint)
        try:
            self._session = self._endpoint.dial(self.address)
            self.peer = await self._opened
        except BaseException:
            await self._endpoint.close_all(0.0)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._endpoint.close_all(1.0)

    async def submit(
        self,
        items: Sequence[ImageItem],
        *,
        deadline_s: float = 60.0,
        dtype: WantedDType = "model",
        rows: bool = False,
    ) -> Result:
        """One request for all items. The outcome's `error` is set if it failed. Raises `SessionLost`."""
        number = self._next_request
        self._next_request += 1
        opened = self._requests[number] = _Open(items, rows)
        submit = Submit(
            number,
            tuple(item.described() for item in items),
            dtype,
            int(deadline_s * 1000),
            rows,
        )
        try:
            self._send(submit)
            return await opened.done
        finally:
            del self._requests[number]

    async def inventory(self) -> Inventory:
        """Counts of everything the node holds. Raises `SessionLost`."""
        answer: asyncio.Future[Inventory] = asyncio.get_running_loop().create_future()
        self._send(InventoryRequest())
        self._inventories.append(answer)
        return await answer

    def _send(self, message: Submit | InventoryRequest) -> None:
        if self._session is None or not self._endpoint.send(self._session, message):
            raise SessionLost(f"{self.address}: no session")

    # -- SessionHandler ----------------------------------------------------------------------

    def session_opened(self, session: SessionId, peer: PeerInfo) -> None:
        if not self._opened.done():
            self._opened.set_result(peer)

    def session_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None:
        self._session = None
        what = reason if self.address in reason else f"{self.address}: {reason or code}"
        if not self._opened.done():
            kind = BY_CODE.get(code, PeerUnreachable)
            self._opened.set_exception(kind(what))
        lost: EpdError = SessionLost(what)
        for opened in self._requests.values():
            if not opened.done.done():
                opened.done.set_exception(lost)
        for answer in self._inventories:
            if not answer.done():
                answer.set_exception(lost)
        self._inventories.clear()

    def session_suspect(self, session: SessionId, suspect: bool) -> None:
        """A silent node is only waited for: requests have their own deadlines."""

    def messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None:
        for message in messages:
            match message:
                case NeedMedia():
                    self._send_media(session, message.sha256)
                case Outcome():
                    opened = self._requests.get(message.request)
                    if opened is not None:
                        opened.outcome = message
                        opened.settle()
                case Rows():
                    opened = self._requests.get(message.request)
                    if opened is not None and message.item < len(opened.rows):
                        opened.rows[message.item] += message.data
                        opened.settle()
                case Inventory():
                    if self._inventories:
                        answer = self._inventories.pop(0)
                        if not answer.done():
                            answer.set_result(message)

    def _send_media(self, session: SessionId, sha256: bytes) -> None:
        for opened in self._requests.values():
            for item in opened.items:
                if item.sha256 == sha256:
                    self._outgoing.add(session, media_chunks(sha256, item.media))
                    return
        self._endpoint.send(session, MediaMissing(sha256))

    def media_writable(self, session: SessionId) -> None:
        self._outgoing.pump(session)

    def load(self) -> Heartbeat:
        return Heartbeat()


_INCARNATION = Incarnation(secrets.randbits(64))


def _hello() -> Hello:
    return Hello(
        NodeId(f"client-{secrets.token_hex(8)}"),
        _INCARNATION,
        "client",
        PROTOCOL_VERSION,
        LOGIC_VERSION,
        "",
        "",
        "",
        PeerLimits(MAX_ITEMS_PER_PART, 0, 0),
    )
