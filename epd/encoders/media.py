"""Pictures: what a header tells, and decoding to what a viewer shows.

The size that `probe_image` announces is the size that `open_image` returns: both take the
orientation from the same place, the metadata that stand before the pixels. Colour profiles are not
applied. Needs Pillow (extra `hf`), imported at the first picture.
"""

import importlib
import io
from typing import TYPE_CHECKING, Final

import msgspec

from epd.encoders.containers import is_whole, webp_size
from epd.protocol.errors import ConfigError, MediaInvalid
from epd.protocol.messages import Probe

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS: Final = 89_478_485
"""Default limit of one picture, checked on its header. Pillow's own, above which it warns."""
MAX_PIXELS_EVER: Final = 2 * MAX_PIXELS
"""No limit may be above this: Pillow itself refuses what is larger."""

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Of several frames, pages or pictures the first is taken. AVIF where Pillow has it."""

_EXIF_ORIENTATION: Final = 0x0112
_TURNED: Final = frozenset({5, 6, 7, 8})
"""EXIF orientations that swap width and height."""


class PictureRules(msgspec.Struct, frozen=True, kw_only=True):
    """How pictures are read; equal on all encoders, as the background is in the embeddings."""

    max_pixels: int = MAX_PIXELS
    background: tuple[int, int, int] = (255, 255, 255)
    """Red, green and blue, 0 to 255, under what is transparent."""


DEFAULT_RULES: Final = PictureRules()


def probe_image(data: bytes | memoryview, name: str, rules: PictureRules = DEFAULT_RULES) -> Probe:
    """What the header of a picture tells; no pixel is decoded.

    Width and height are in pixels, after EXIF rotation. `name` is for people, in errors. Raises
    `MediaInvalid` if it is empty, no picture of `FORMATS`, cut within its header, or larger than
    `rules.max_pixels`.
    """
    image, orientation = _open(data, name, rules)
    with image:
        width, height = image.size
    if orientation in _TURNED:
        width, height = height, width
    return Probe("image", width=width, height=height)


def open_image(data: bytes | memoryview, name: str = "image", rules: PictureRules = DEFAULT_RULES) -> "Image":
    """Decode a picture to RGB, turned as EXIF says, laid over `rules.background` where transparent.

    Raises `MediaInvalid` as `probe_image` does, and if the pixels are cut, damaged, or of a mode
    that has no plain meaning in RGB.
    """
    from epd.encoders.colours import to_rgb  # with numpy: only who decodes needs it

    image, orientation = _open(data, name, rules)
    try:
        image.load()
        if not is_whole(image.format, data):
            raise MediaInvalid(f"{name}: cut before its end ({len(data)} B)", name=name)
        rgb = to_rgb(image, data, rules.background)
        if rgb is None:
            raise MediaInvalid(f"{name}: pixels of mode {image.mode} have no meaning in RGB", name=name)
        return _turn(rgb, orientation)
    except (MediaInvalid, MemoryError):
        raise
    except Exception as error:  # whatever a decoder makes of damaged bytes, the bytes are to blame
        raise MediaInvalid(f"{name}: cannot be decoded: {_reason(error)}", name=name) from error


def _open(data: bytes | memoryview, name: str, rules: PictureRules) -> "tuple[Image, int]":
    """The picture, header read and limits checked, and its EXIF orientation (1: upright)."""
    try:
        from PIL import Image, UnidentifiedImageError

        importlib.import_module("PIL.WebPImagePlugin")  # each registers its format
        importlib.import_module("PIL.AvifImagePlugin")
    except ImportError:
        raise ConfigError(
            "pictures need Pillow from 11.3 on: install the extra `hf`", key="encoder"
        ) from None

    if len(data) == 0:
        raise MediaInvalid(f"{name}: empty, 0 B", name=name)
    # Pillow's decoder for WebP takes memory for the whole picture when it is opened.
    _check_size(*(webp_size(data) or (1, 1)), name, rules)
    known = [one for one in FORMATS if one != "AVIF" or one in Image.OPEN]
    try:
        image = Image.open(io.BytesIO(data), formats=known)
    except UnidentifiedImageError:
        message = f"{name}: not a picture ({', '.join(known)}), or cut within its header ({len(data)} B)"
        raise MediaInvalid(message, name=name) from None
    except MemoryError:
        raise
    except Exception as error:  # see open_image
        raise MediaInvalid(f"{name}: unreadable header: {_reason(error)}", name=name) from error
    _check_size(*image.size, name, rules)
    return image, _orientation(image)


def _check_size(width: int, height: int, name: str, rules: PictureRules) -> None:
    if width < 1 or height < 1:
        raise MediaInvalid(f"{name}: {width}x{height} pixels", name=name)
    if width * height > rules.max_pixels:
        message = f"{name}: {width}x{height} is {width * height} pixels, the limit is {rules.max_pixels}"
        raise MediaInvalid(message, name=name)


def _orientation(image: "Image") -> int:
    """1, upright, where the metadata are broken: a viewer shows such a picture too."""
    from PIL import Image

    if image.format == "TIFF":  # Pillow turns it by itself
        return 1
    try:
        # PngImageFile.getexif decodes the whole picture to look for EXIF behind the pixels; the base
        # class takes what was read with the header.
        value = Image.Image.getexif(image).get(_EXIF_ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _turn(image: "Image", orientation: int) -> "Image":
    from PIL.Image import Transpose

    methods = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    method = methods.get(orientation)
    return image if method is None else image.transpose(method)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
