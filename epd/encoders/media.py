"""Pictures: what a header tells, and decoding to RGB by rules of our own.

The size that `probe_image` announces is the size that `open_image` returns: both take the
orientation from the same place, the metadata that stand before the pixels. Needs Pillow (extra
`hf`), imported at the first picture.
"""

import io
from typing import TYPE_CHECKING, Final

from epd.protocol.errors import ConfigError, MediaInvalid
from epd.protocol.messages import Probe

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS: Final = 89_478_485
"""Of one picture, checked on its header. Pillow's own limit, so that it never warns below ours."""

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Of several frames the first is taken."""

_EXIF_ORIENTATION: Final = 0x0112
_TURNED: Final = frozenset({5, 6, 7, 8})
"""EXIF orientations that swap width and height."""


def probe_image(data: bytes | memoryview, name: str) -> Probe:
    """What the header of a picture tells; no pixel is decoded.

    Width and height are in pixels, after EXIF rotation. `name` is for people, in errors. Raises
    `MediaInvalid` if it is empty, no picture of `FORMATS`, cut within its header, or larger than
    `MAX_PIXELS`.
    """
    image, orientation = _open(data, name)
    with image:
        width, height = image.size
    if orientation in _TURNED:
        width, height = height, width
    return Probe("image", width=width, height=height)


def open_image(data: bytes | memoryview, name: str = "image") -> "Image":
    """Decode a picture to RGB, turned as EXIF says, transparency laid over white.

    Raises `MediaInvalid` as `probe_image` does, and if the pixels are cut, damaged, or of a mode
    that has no plain meaning in RGB.
    """
    image, orientation = _open(data, name)
    try:
        image.load()
        return _to_rgb(_turn(image, orientation), name)
    except (MediaInvalid, MemoryError):
        raise
    except Exception as error:  # whatever a decoder makes of damaged bytes, the bytes are to blame
        raise MediaInvalid(f"{name}: cannot be decoded: {_reason(error)}", name=name) from error


def _open(data: bytes | memoryview, name: str) -> "tuple[Image, int]":
    """The picture, header read and limits checked, and its EXIF orientation (1: upright)."""
    try:
        from PIL import Image, UnidentifiedImageError, WebPImagePlugin  # noqa: F401 (registers WEBP)
    except ImportError:
        raise ConfigError("pictures need Pillow: install the extra `hf`", key="encoder") from None

    if len(data) == 0:
        raise MediaInvalid(f"{name}: empty, 0 B", name=name)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        orientation = _orientation(image)
    except UnidentifiedImageError:
        message = f"{name}: not a picture ({', '.join(FORMATS)}), or cut within its header ({len(data)} B)"
        raise MediaInvalid(message, name=name) from None
    except MemoryError:
        raise
    except Exception as error:  # see open_image
        raise MediaInvalid(f"{name}: unreadable header: {_reason(error)}", name=name) from error
    width, height = image.size
    if width < 1 or height < 1:
        raise MediaInvalid(f"{name}: {width}x{height} pixels", name=name)
    if width * height > MAX_PIXELS:
        message = f"{name}: {width}x{height} is {width * height} pixels, the limit is {MAX_PIXELS}"
        raise MediaInvalid(message, name=name)
    return image, orientation


def _orientation(image: "Image") -> int:
    from PIL import Image

    # PngImageFile.getexif decodes the whole picture to look for EXIF behind the pixels; the base
    # class takes what was read with the header.
    return int(Image.Image.getexif(image).get(_EXIF_ORIENTATION, 1))


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


def _to_rgb(image: "Image", name: str) -> "Image":
    """Every mode by name: processors convert silently, and some clip 16-bit grey to white."""
    mode = image.mode
    if mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        return _over_white(image)
    if mode == "RGB":
        return image
    if mode in ("1", "L", "P", "RGBX", "CMYK", "YCbCr"):
        return image.convert("RGB")
    if mode in ("I", "I;16", "I;16L", "I;16B", "I;16N"):
        # 65,535 becomes 255; half a step is added because the result is cut, not rounded
        return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L").convert("RGB")
    raise MediaInvalid(f"{name}: pixels of mode {mode} have no meaning in RGB", name=name)


def _over_white(image: "Image") -> "Image":
    from PIL import Image

    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
