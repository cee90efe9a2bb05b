"""Containers of pictures, as far as decoders are too kind: whether the file ends where it should (a
decoder fills what is missing with grey), and the size of a WebP (its decoder takes memory before it is
asked for pixels).

Sources: ITU-T T.81 annex B (JPEG), RFC 2083 and PNG third edition 5.3, GIF89a appendix B, RFC 9649 (WebP).
"""

import struct
from collections.abc import Callable
from typing import Final

_EOI: Final = 0xD9
_SOS: Final = 0xDA
_STANDALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})
"""JPEG markers without a length: TEM, RST0 to RST7, SOI."""


def is_whole(picture_format: str | None, data: bytes | memoryview) -> bool:
    """Whether the first picture of a file is there to its end. Of other formats the decoder knows."""
    check = _CHECKS.get(picture_format or "")
    return check is None or check(bytes(data))


def webp_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Width and height that the header of a WebP announces; None if it is none."""
    head = bytes(data[:30])
    if len(head) < 30 or head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return None
    match head[12:16]:
        case b"VP8X":
            return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
        case b"VP8L":
            packed = int.from_bytes(head[21:25], "little")
            return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", head, 26)
            return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg_is_whole(data: bytes) -> bool:
    """Walk the segments, and behind each start of scan the coded data, to the end of the image."""
    at = 2
    while (at := data.find(b"\xff", at)) >= 0 and at + 1 < len(data):
        marker = data[at + 1]
        if marker == _EOI:
            return True
        if marker in _STANDALONE or marker in (0x00, 0xFF):  # or a coded 0xFF, or a fill byte
            at += 1 if marker == 0xFF else 2
            continue
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False


def _png_is_whole(data: bytes) -> bool:
    at = 8
    while at + 12 <= len(data):
        kind = data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")
        if kind == b"IEND":
            return at <= len(data)
    return False


def _gif_is_whole(data: bytes) -> bool:
    """To the end of the first frame's data: the frames behind it are not looked at."""
    at = 13 + _palette_nbytes(data[10])
    while at < len(data):
        match data[at]:
            case 0x21:  # an extension
                at = _after_blocks(data, at + 2)
            case 0x2C if at + 9 < len(data):  # a frame
                return _after_blocks(data, at + 11 + _palette_nbytes(data[at + 9])) <= len(data)
            case _:
                return False
    return False


def _palette_nbytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_blocks(data: bytes, at: int) -> int:
    """Behind a chain of sub-blocks; beyond the end of `data` if it is cut."""
    while at < len(data) and data[at]:
        at += 1 + data[at]
    return at + 1


_CHECKS: Final[dict[str, Callable[[bytes], bool]]] = {
    "JPEG": _jpeg_is_whole,
    "MPO": _jpeg_is_whole,
    "PNG": _png_is_whole,
    "GIF": _gif_is_whole,
}
