"""What one session has to send: our own bounded queues, one per lane, in front of ZeroMQ's short ones.

Control messages are encoded when they are given and joined into frames once per turn of the loop:
all that one turn has for one peer is one frame. Media are encoded only when it is their turn. A
frame gets its number when it is built, and waits, built, while its socket has no room.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from epd.protocol.errors import Malformed
from epd.protocol.ids import SessionId
from epd.protocol.messages import ControlMessage, MediaMessage, Rejected
from epd.protocol.session import OUTSIDE
from epd.protocol.wire import (
    CONTROL_FRAME_NBYTES,
    HEADER_NBYTES,
    MEDIA_CHUNK_NBYTES,
    Lane,
    build_frame,
    encode_message,
    split,
)
from epd.runtime.lanes import LaneSocket, SendResult

MAX_CONTROL_NBYTES: Final = 256 * CONTROL_FRAME_NBYTES
"""Control bytes that may stand for one peer. What a peer may have open keeps far below it, so one
that lets so much stand has stopped reading, and loses its session before it is `dead_after`."""
MAX_MEDIA_MESSAGES: Final = 2
"""Chunks that may stand for one peer: one for the socket's next wake-up and one behind it."""
_MAX_MESSAGE_NBYTES: Final = CONTROL_FRAME_NBYTES - HEADER_NBYTES - 3

Sent = Callable[[SessionId, Lane, int, int], None]


class Outbox:
    """`sent(session, lane, sequence, nbytes)` is called for each frame that is built."""

    def __init__(self, session: SessionId, routing_id: bytes, sent: Sent) -> None:
        self.media_refused = False
        """Somebody was told that the media queue is full and waits to hear of room."""
        self._session = session
        self._routing_id = routing_id
        self._sent = sent
        self._messages: list[bytes] = []
        self._frames: deque[bytes] = deque()
        self._control_nbytes = 0
        self._next_control = 0
        self._media: deque[MediaMessage | None] = deque()
        self._media_frame: bytes | None = None
        self._next_media = 0

    @property
    def messages(self) -> int:
        """Control messages and frames that stand."""
        return len(self._messages) + len(self._frames)

    @property
    def media_messages(self) -> int:
        return len(self._media) + (self._media_frame is not None)

    def add(self, message: ControlMessage) -> bool:
        """Queue a control message; False if the queue is full.

        Raises `Malformed(reason="size")` for a message no frame can hold: our own fault.
        """
        encoded = encode_message(message)
        if len(encoded) > _MAX_MESSAGE_NBYTES:
            raise Malformed(
                f"{type(message).__name__} of {len(encoded)} B, a frame holds {_MAX_MESSAGE_NBYTES}",
                reason="size",
            )
        if self._control_nbytes + len(encoded) > MAX_CONTROL_NBYTES:
            return False
        self._control_nbytes += len(encoded)
        self._messages.append(encoded)
        return True

    def add_last_word(self, rejected: Rejected) -> None:
        """Queue a `Rejected` outside the sequence, behind everything else."""
        self._build_control()
        self._frames.append(last_word(self._session, rejected))

    def add_media(self, message: MediaMessage) -> bool:
        """Queue a chunk; False if the queue is full, and `media_refused` is set.

        Raises `Malformed(reason="size")` for a chunk that is too large: our own fault.
        """
        if len(message.data) > MEDIA_CHUNK_NBYTES:
            raise Malformed(f"chunk of {len(message.data)} B, at most {MEDIA_CHUNK_NBYTES}", reason="size")
        if self.media_messages >= MAX_MEDIA_MESSAGES:
            self.media_refused = True
            return False
        self._media.append(message)
        return True

    def add_empty_media(self) -> None:
        """Queue a media frame of no message, unless something is queued that does as well."""
        if not self.media_messages:
            self._media.append(None)

    def flush_control(self, socket: LaneSocket) -> SendResult:
        """Send until there is nothing (SENT), no room (FULL), or no peer (GONE)."""
        self._build_control()
        frames = self._frames
        while frames:
            result = socket.send(self._routing_id, frames[0])
            if result is not SendResult.SENT:
                return result
            self._control_nbytes -= len(frames.popleft())
        self._control_nbytes = 0
        return SendResult.SENT

    def flush_media(self, socket: LaneSocket) -> SendResult:
        """As `flush_control`; a chunk becomes a frame only when the one before it has gone."""
        while True:
            if self._media_frame is None:
                if not self._media:
                    return SendResult.SENT
                self._media_frame = self._build_media(self._media.popleft())
            result = socket.send(self._routing_id, self._media_frame)
            if result is not SendResult.SENT:
                return result
            self._media_frame = None

    def _build_control(self) -> None:
        if not self._messages:
            return
        messages, self._messages = self._messages, []
        for group in split(messages):
            frame = build_frame(Lane.CONTROL, self._session, self._next_control, group)
            self._sent(self._session, Lane.CONTROL, self._next_control, len(frame))
            self._next_control += 1
            self._frames.append(frame)

    def _build_media(self, message: MediaMessage | None) -> bytes:
        encoded = () if message is None else (encode_message(message),)
        frame = build_frame(Lane.MEDIA, self._session, self._next_media, encoded)
        self._sent(self._session, Lane.MEDIA, self._next_media, len(frame))
        self._next_media += 1
        return frame


def last_word(session: SessionId, rejected: Rejected) -> bytes:
    """The frame of a `Rejected` outside the sequence."""
    return build_frame(Lane.CONTROL, session, OUTSIDE, (encode_message(rejected),))
