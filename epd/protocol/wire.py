"""Frames and messages: the header, all limits, and what makes a frame malformed.

A frame is one ZeroMQ message of one part: a fixed header, then one msgpack array of messages (on
the media lane: of one message). The header is checked, by `open_frame`, before the body is
decoded, by `decode_body`.

    offset  size  field      little endian
    0       4     magic      b"EPDt"
    4       2     version    PROTOCOL_VERSION
    6       1     lane       0 control, 1 media
    7       1     reserved   0
    8       8     session
    16      8     sequence   counts frames per lane and direction, from 0
    24      4     nbytes     of the body
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from epd.protocol.errors import Malformed
from epd.protocol.ids import SessionId
from epd.protocol.messages import AnyMessage, ControlMessage, MediaChunk, MediaMessage, Rows

PROTOCOL_VERSION: Final = 1
MAGIC: Final = b"EPDt"
HEADER: Final = struct.Struct("<4sHBBQQI")
HEADER_NBYTES: Final = HEADER.size

CONTROL_FRAME_NBYTES: Final = 64 * 1024
"""Header and body of a control frame; also ZeroMQ's MAXMSGSIZE of that lane."""
MEDIA_CHUNK_NBYTES: Final = 1024 * 1024
MEDIA_FRAME_NBYTES: Final = MEDIA_CHUNK_NBYTES + 4096
"""One chunk with its header and msgpack around it."""
MAX_ITEMS_PER_PART: Final = 128
"""So that every message about a part fits a control frame: 128 x (source, spec, aux) < 64 KiB."""
MAX_AUX_NBYTES: Final = 256
"""Aux tensors of one item, together."""


class Lane(IntEnum):
    CONTROL = 0
    MEDIA = 1


FRAME_NBYTES: Final = {Lane.CONTROL: CONTROL_FRAME_NBYTES, Lane.MEDIA: MEDIA_FRAME_NBYTES}


class Frame(NamedTuple):
    """A frame whose header was checked and whose body was not yet decoded."""

    lane: Lane
    session: SessionId
    sequence: int
    body: memoryview


_encoder = msgspec.msgpack.Encoder()
_control_decoder = msgspec.msgpack.Decoder(list[ControlMessage])
_media_decoder = msgspec.msgpack.Decoder(list[MediaMessage])


def open_frame(data: bytes | memoryview, lane: Lane) -> Frame:
    """Check size and header of a frame that arrived on `lane`.

    Raises `Malformed` with a `reason` of: size, magic, version, lane, length.
    """
    nbytes = len(data)
    if not HEADER_NBYTES <= nbytes <= FRAME_NBYTES[lane]:
        raise Malformed(f"frame of {nbytes} B on {lane.name} lane", reason="size")
    magic, version, lane_value, _reserved, session, sequence, body_nbytes = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Malformed("not a frame of ours", reason="magic")
    if version != PROTOCOL_VERSION:
        raise Malformed(f"protocol version {version}, ours is {PROTOCOL_VERSION}", reason="version")
    if lane_value != lane:
        raise Malformed(f"frame for lane {lane_value} on {lane.name} lane", reason="lane")
    if body_nbytes != nbytes - HEADER_NBYTES:
        raise Malformed(f"body of {nbytes - HEADER_NBYTES} B, header says {body_nbytes}", reason="length")
    return Frame(lane, SessionId(session), sequence, memoryview(data)[HEADER_NBYTES:])


def decode_body(frame: Frame) -> Sequence[AnyMessage]:
    """The messages of a checked frame. Raises `Malformed(reason="body")`."""
    decoder = _control_decoder if frame.lane is Lane.CONTROL else _media_decoder
    try:
        messages: Sequence[AnyMessage] = decoder.decode(frame.body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Malformed(f"undecodable body: {error}", reason="body") from None
    return messages


def encode_message(message: AnyMessage) -> bytes:
    """One message, to be joined into a frame by `build_frame`."""
    return _encoder.encode(message)


def build_frame(lane: Lane, session: SessionId, sequence: int, encoded: Sequence[bytes]) -> bytes:
    """One frame of encoded messages; the caller has kept it within `FRAME_NBYTES` (see `split`)."""
    count = len(encoded)
    prefix = bytes([0x90 | count]) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
    nbytes = len(prefix) + sum(map(len, encoded))
    header = HEADER.pack(MAGIC, PROTOCOL_VERSION, lane, 0, session, sequence, nbytes)
    return b"".join((header, prefix, *encoded))


def split(encoded: Sequence[bytes]) -> list[list[bytes]]:
    """Group encoded control messages so that each group fits one frame, in order.

    Raises `Malformed(reason="size")` for a message that cannot fit any frame: our own fault.
    """
    room = CONTROL_FRAME_NBYTES - HEADER_NBYTES - 3
    groups: list[list[bytes]] = []
    used = room
    for message in encoded:
        if len(message) > room:
            raise Malformed(f"message of {len(message)} B, a frame holds {room}", reason="size")
        if used + len(message) > room or len(groups[-1]) == 0xFFFF:
            groups.append([])
            used = 0
        groups[-1].append(message)
        used += len(message)
    return groups


__all__ = [
    "CONTROL_FRAME_NBYTES",
    "FRAME_NBYTES",
    "HEADER_NBYTES",
    "MAX_AUX_NBYTES",
    "MAX_ITEMS_PER_PART",
    "MEDIA_CHUNK_NBYTES",
    "MEDIA_FRAME_NBYTES",
    "PROTOCOL_VERSION",
    "Frame",
    "Lane",
    "MediaChunk",
    "Rows",
    "build_frame",
    "decode_body",
    "encode_message",
    "open_frame",
    "split",
]
