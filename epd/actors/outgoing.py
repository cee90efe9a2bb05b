"""Streams large things over the media lane: cut late, one queue per session, as room allows."""

from collections import deque
from collections.abc import Iterator

from epd.protocol.ids import SessionId
from epd.protocol.messages import MediaChunk, Rows
from epd.protocol.wire import MEDIA_CHUNK_NBYTES
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


def media_chunks(sha256: bytes, media: bytes | memoryview) -> Iterator[MediaChunk]:
    """The media in chunks of at most 1 MiB; each is a view, cut when it is its turn."""
    view = memoryview(media)
    for offset in range(0, len(view), MEDIA_CHUNK_NBYTES):
        yield MediaChunk(sha256, offset, len(view), view[offset : offset + MEDIA_CHUNK_NBYTES])


def row_chunks(request: int, item: int, data: bytes) -> Iterator[Rows]:
    view = memoryview(data)
    for offset in range(0, len(view), MEDIA_CHUNK_NBYTES):
        yield Rows(request, item, offset, view[offset : offset + MEDIA_CHUNK_NBYTES])
