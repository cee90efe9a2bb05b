"""Pixels of every mode as RGB, by rules of our own: image processors convert silently, and Pillow
clips 16-bit grey to white and misses transparent colours of pictures with 2, 4 or 16 bits.
"""

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Colour = tuple[int, int, int]

_PNG_DEPTH_AT: Final = 24
_PNG_GREY_SCALE: Final = {1: 255, 2: 85, 4: 17, 8: 1}
"""By bits of a sample: what Pillow multiplies them with."""


def to_rgb(image: "Image", data: bytes | memoryview, background: Colour) -> "Image | None":
    """A loaded picture as RGB, over `background` where it is transparent; None if its mode has no plain
    meaning in RGB. `data` is the file: a PNG's depth stands there, Pillow does not keep it.
    """
    mode = image.mode
    clear = image.info.get("transparency")
    if isinstance(clear, int | tuple) and image.format == "PNG":
        return _without_colour(image, clear, data[_PNG_DEPTH_AT], background)
    if mode in ("RGBA", "RGBa", "LA", "La", "PA") or clear is not None:
        return _over(image, background)
    if mode == "RGB":
        return image
    if mode in ("1", "L", "P", "RGBX", "CMYK", "YCbCr"):
        return image.convert("RGB")
    if mode.startswith("I;16"):
        return _of_array(_eight_bits(image))
    return None


def _over(image: "Image", background: Colour) -> "Image":
    from PIL import Image

    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, (*background, 255)), rgba).convert("RGB")


def _without_colour(
    image: "Image", clear: int | tuple[int, ...], depth: int, background: Colour
) -> "Image | None":
    """A PNG in which one colour, given in the file's own depth, is transparent."""
    pixels = np.asarray(image)
    if image.mode.startswith("I;16"):
        is_clear, rgb = pixels == clear, np.repeat(_eight_bits(image)[..., None], 3, axis=2)
    elif image.mode == "1":
        is_clear, rgb = pixels == bool(clear), np.asarray(image.convert("RGB")).copy()
    elif image.mode == "L":
        is_clear = pixels == np.multiply(clear, _PNG_GREY_SCALE.get(depth, 1))
        rgb = np.asarray(image.convert("RGB")).copy()
    elif image.mode == "P":
        return _over(image, background)
    elif image.mode == "RGB":
        # Pillow keeps the upper bytes of 16-bit colours.
        colour = np.right_shift(clear, 8) if depth == 16 else np.asarray(clear)
        is_clear, rgb = (pixels == colour).all(axis=2), pixels.copy()
    else:
        return None
    rgb[is_clear] = background
    return _of_array(rgb)


def _eight_bits(image: "Image") -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """16-bit grey scaled and rounded: 65,535 becomes 255."""
    wide = np.asarray(image).astype(np.uint32)
    return ((wide * 255 + 32_767) // 65_535).astype(np.uint8)


def _of_array(pixels: "np.ndarray[Any, np.dtype[np.uint8]]") -> "Image":
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
