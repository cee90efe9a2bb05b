"""The ClientActor: sessions of role `client`. A convenience that copies; engines embed.

It is a user of the PrefillActor like any other: it collects the media, submits, hashes and copies
what is delivered, releases, and answers with one `Outcome`.
"""

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

from epd.actors.media import Arrived, MediaStore, Progress, Refused
from epd.actors.outgoing import OutgoingMedia, row_chunks
from epd.actors.prefill import CancelRequest, EndOpen, SubmitRequest
from epd.memory.tensors import host_bytes
from epd.protocol.errors import Draining, EpdError, MediaInvalid, WrongRole
from epd.protocol.ids import SessionId
from epd.protocol.messages import (
    ErrorValue,
    Inventory,
    InventoryRequest,
    ItemOutcome,
    MediaChunk,
    MediaMissing,
    NeedMedia,
    Outcome,
    Submit,
)
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.runtime.actor import Actor
from epd.runtime.endpoint import Endpoint
from epd.runtime.mailbox import Mailbox, Ref


class FromClient(NamedTuple):
    session: SessionId
    message: Submit | MediaChunk | MediaMissing | InventoryRequest


class ClientGone(NamedTuple):
    session: SessionId


class MediaWritable(NamedTuple):
    session: SessionId


class Delivered(NamedTuple):
    """The PrefillActor's answer to one of our submits."""

    session: SessionId
    request: int
    delivery: Delivery


class DigestResult(NamedTuple):
    items: tuple[ItemOutcome, ...]
    rows: tuple[bytes, ...]


class Digested(NamedTuple):
    """From the hashing thread."""

    session: SessionId
    request: int
    delivery: Delivery
    result: DigestResult


Mail = EndOpen | FromClient | ClientGone | MediaWritable | Delivered | Digested
Key = tuple[SessionId, int]
MediaUser = tuple[SessionId, int, bytes]


class _Open:
    __slots__ = ("collecting", "missing", "submit")

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.missing = {item.sha256 for item in submit.items}
        self.collecting = True


class ClientActor(Actor[Mail]):
    """`submit_to` is the PrefillActor's mailbox; None on an encoder node, which only has inventory."""

    def __init__(
        self,
        mailbox: Mailbox[Mail],
        endpoint: Endpoint,
        submit_to: Ref[SubmitRequest | CancelRequest] | None,
        inventory: Callable[[], Inventory],
        media_budget_nbytes: int,
        hasher: Executor,
    ) -> None:
        super().__init__("clients", mailbox)
        self._hasher = hasher
        self._endpoint = endpoint
        self._submit_to = submit_to
        self._inventory = inventory
        self._open: dict[Key, _Open] = {}
        self._outgoing = OutgoingMedia(endpoint)
        self._hashing: set[asyncio.Future[DigestResult]] = set()
        self._media: MediaStore[MediaUser] = MediaStore(
            media_budget_nbytes, ask=self._ask_media, report=self._media_news
        )

    def handle(self, message: Mail) -> None:
        match message:
            case FromClient(session, MediaChunk() as chunk):
                self._media.take_chunk(session, chunk)
            case FromClient(session, Submit() as submit):
                self._submit(session, submit)
            case FromClient(session, InventoryRequest()):
                self._endpoint.send(session, self._inventory())
            case FromClient(session, MediaMissing() as missing):
                self._media.missing(session, missing.sha256)
            case Delivered():
                self._answer(message)
            case Digested():
                self._send_outcome(message)
            case MediaWritable():
                self._outgoing.pump(message.session)
            case ClientGone():
                self._lose(message.session)
            case EndOpen():
                self._refuse_collecting()
                message.done()

    # -- submits -----------------------------------------------------------------------------

    def _submit(self, session: SessionId, submit: Submit) -> None:
        key = (session, submit.request)
        if self._submit_to is None:
            self._refuse(key, WrongRole("this is an encoder node; submit to a prefill node"))
        elif key in self._open or not submit.items:
            self._refuse(
                key,
                MediaInvalid("a request needs a fresh number and at least one item"),
            )
        else:
            opened = self._open[key] = _Open(submit)
            for item in submit.items:
                if key in self._open and item.sha256 in opened.missing:
                    user = (*key, item.sha256)
                    self._media.fetch(user, item.sha256, item.media_nbytes, session)

    def _ask_media(self, session: SessionId, sha256: bytes) -> None:
        self._endpoint.send(session, NeedMedia(sha256))  # unsent: the session has ended, we shall be told

    def _media_news(self, user: MediaUser, news: Progress | Arrived | Refused) -> None:
        session, request, sha256 = user
        opened = self._open.get((session, request))
        if opened is None:
            return
        match news:
            case Arrived():
                opened.missing.discard(sha256)
                if not opened.missing:
                    self._hand_over((session, request), opened)
            case Refused():
                item = next(i for i, it in enumerate(opened.submit.items) if it.sha256 == sha256)
                self._drop_media((session, request), opened)
                self._refuse((session, request), news.error, item)

    def _hand_over(self, key: Key, opened: _Open) -> None:
        assert self._submit_to is not None
        submit = opened.submit
        items = [
            ImageItem(
                f"item {number}",
                bytes(self._media.get(item.sha256)),
                item.probe,
                item.sha256,
            )
            for number, item in enumerate(submit.items)
        ]
        self._drop_media(key, opened)
        opened.collecting = False
        request = EmbeddingRequest(_request_id(key), items, submit.remaining_ms / 1000, submit.dtype)
        session, number = key
        self._submit_to.tell(
            SubmitRequest(
                request,
                lambda delivery: self.mailbox.tell(Delivered(session, number, delivery)),
            )
        )

    def _refuse_collecting(self) -> None:
        for key, opened in list(self._open.items()):
            if opened.collecting:
                self._drop_media(key, opened)
                self._refuse(key, Draining("the node stops: its time for draining is over"))

    # -- answers -----------------------------------------------------------------------------

    def _answer(self, message: Delivered) -> None:
        key = (message.session, message.request)
        delivery = message.delivery
        opened = self._open.pop(key, None)
        if delivery.error is not None:
            if opened is not None:
                error = delivery.error.as_value(delivery.error.facts.get("item"))
                states = tuple(delivery.phases_s)
                self._endpoint.send(message.session, Outcome(message.request, (), error, states))
            return
        if opened is None:  # its client has gone
            delivery.release()
            return
        delivery.take()
        rows = opened.submit.rows
        hashing = asyncio.get_running_loop().run_in_executor(self._hasher, _digest, delivery, rows)
        self._hashing.add(hashing)
        hashing.add_done_callback(self._hashing.discard)
        hashing.add_done_callback(
            lambda done: self.mailbox.tell(
                Digested(message.session, message.request, delivery, done.result())
            )
        )

    def _send_outcome(self, message: Digested) -> None:
        """The bytes were hashed and copied: the views are no longer needed."""
        delivery, result = message.delivery, message.result
        delivery.release()
        for item, data in enumerate(result.rows):
            if data:
                self._outgoing.add(message.session, row_chunks(message.request, item, data))
        states = tuple(dict.fromkeys((*delivery.phases_s, "consumed", "freed")))
        self._endpoint.send(message.session, Outcome(message.request, result.items, None, states))

    def _refuse(self, key: Key, error: EpdError, item: int | None = None) -> None:
        self._open.pop(key, None)
        value: ErrorValue = error.as_value(item)
        self._endpoint.send(key[0], Outcome(key[1], (), value))

    def _drop_media(self, key: Key, opened: _Open) -> None:
        for item in opened.submit.items:
            self._media.drop((*key, item.sha256), item.sha256)

    def _lose(self, session: SessionId) -> None:
        self._outgoing.drop(session)
        for key, opened in [(k, o) for k, o in self._open.items() if k[0] == session]:
            del self._open[key]
            self._drop_media(key, opened)
            if not opened.collecting and self._submit_to is not None:
                self._submit_to.tell(CancelRequest(_request_id(key)))

    def counts(self) -> dict[str, int]:
        return {
            "clients.requests": len(self._open),
            "clients.media": len(self._media),
            "clients.outgoing": len(self._outgoing),
            "clients.hashing": len(self._hashing),
        }


def _digest(delivery: Delivery, rows: bool) -> DigestResult:
    """Hash the delivered bytes, and copy them if asked; runs in a thread, the views are held."""
    views = [host_bytes(view) for view in delivery.views]
    items = tuple(
        ItemOutcome(spec, view.nbytes, hashlib.sha256(view).digest(), verified)
        for spec, view, verified in zip(delivery.specs, views, delivery.verified, strict=True)
    )
    return DigestResult(items, tuple(bytes(view) for view in views) if rows else ())


def _request_id(key: Key) -> str:
    return f"{key[0]:016x}-{key[1]}"
