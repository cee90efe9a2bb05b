"""Streams large things over the media lane: cut late, one queue per session, as room allows."""

from collections import deque
from collections.abc import Iterator, Sequence

from epd.protocol.ids import SessionId, TransferId
from epd.protocol.messages import MediaChunk, MediaMissing, Rows
from epd.protocol.wire import MEDIA_CHUNK_NBYTES
from epd.request import ImageItem
from epd.runtime.endpoint import Endpoint


class OutgoingMedia:
    """Owned by one actor; `pump` on every `media_writable` and after every `add`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._queues: dict[SessionId, deque[Iterator[MediaChunk | Rows]]] = {}
        self._refused: dict[SessionId, MediaChunk | Rows] = {}

    def add(self, session: SessionId, messages: Iterator[MediaChunk | Rows]) -> None:
        """Send these messages after what is queued already."""
        self._queues.setdefault(session, deque()).append(messages)
        self.pump(session)

    def pump(self, session: SessionId) -> None:
        queue = self._queues.get(session)
        while queue:
            message = self._refused.pop(session, None) or next(queue[0], None)
            if message is None:
                queue.popleft()
            elif not self._endpoint.send_media(session, message):
                self._refused[session] = message
                return
        self._queues.pop(session, None)

    def drop(self, session: SessionId) -> None:
        """The session has ended."""
        self._queues.pop(session, None)
        self._refused.pop(session, None)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))


class OfferedMedia:
    """Media of open requests by their hash, sent to whichever encoder asks for them."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._holders: dict[bytes, dict[TransferId, bytes]] = {}
        self._outgoing = OutgoingMedia(endpoint)

    def offer(self, transfer: TransferId, items: Sequence[ImageItem]) -> None:
        for item in items:
            self._holders.setdefault(item.sha256, {})[transfer] = item.media

    def withdraw(self, transfer: TransferId, items: Sequence[ImageItem]) -> None:
        """The request needs them no more; others of the same hash may. Idempotent."""
        for item in items:
            holders = self._holders.get(item.sha256)
            if holders is not None:
                holders.pop(transfer, None)
                if not holders:
                    del self._holders[item.sha256]

    def send(self, session: SessionId, sha256: bytes) -> None:
        """Answer a `NeedMedia`."""
        holders = self._holders.get(sha256)
        if holders:
            self._outgoing.add(session, media_chunks(sha256, next(iter(holders.values()))))
        else:
            self._endpoint.send(session, MediaMissing(sha256))

    def pump(self, session: SessionId) -> None:
        """There is room on its media lane again."""
        self._outgoing.pump(session)

    def drop(self, session: SessionId) -> None:
        """The session has ended."""
        self._outgoing.drop(session)

    def counts(self) -> dict[str, int]:
        return {"media": len(self._holders), "outgoing_media": len(self._outgoing)}


def media_chunks(sha256: bytes, media: bytes | memoryview) -> Iterator[MediaChunk]:
    """The media in chunks of at most 1 MiB; each is a view, cut when it is its turn."""
    view = memoryview(media)
    for offset in range(0, len(view), MEDIA_CHUNK_NBYTES):
        yield MediaChunk(sha256, offset, len(view), view[offset : offset + MEDIA_CHUNK_NBYTES])


def row_chunks(request: int, item: int, data: bytes) -> Iterator[Rows]:
    view = memoryview(data)
    for offset in range(0, len(view), MEDIA_CHUNK_NBYTES):
        yield Rows(request, item, offset, view[offset : offset + MEDIA_CHUNK_NBYTES])
