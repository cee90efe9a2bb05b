"""What a viewer shows is what is decoded, whatever the file is made of: compared with pixels we know."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from epd.encoders.media import PictureRules, open_image, probe_image
from epd.protocol.errors import MediaInvalid

WHITE = (255, 255, 255)
GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def packed(row: list[int], depth: int) -> bytes:
    """One filtered row (filter 0) of samples."""
    if depth == 16:
        return b"\0" + struct.pack(f">{len(row)}H", *row)
    bits = "".join(f"{sample:0{depth}b}" for sample in row)
    bits += "0" * (-len(bits) % 8)
    return b"\0" + bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8))


ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}


def png(
    samples: Any,
    depth: int,
    colour: int,
    *,
    clear: bytes = b"",
    palette: bytes = b"",
    interlaced: bool = False,
) -> bytes:
    """A PNG of `samples` (height x width x channels), written by hand: Pillow writes few kinds."""
    array = np.asarray(samples).reshape(len(samples), -1, CHANNELS[colour])
    if interlaced:
        passes = [array[y::dy, x::dx] for x, y, dx, dy in ADAM7]
        rows = [row for one in passes if one.size for row in one]
    else:
        rows = list(array)
    raw = b"".join(packed([int(sample) for sample in row.reshape(-1)], depth) for row in rows)
    head = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], depth, colour, 0, 0, int(interlaced))
    extra = (chunk(b"PLTE", palette) if palette else b"") + (chunk(b"tRNS", clear) if clear else b"")
    body = chunk(b"IDAT", zlib.compress(raw))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + body + chunk(b"IEND", b"")


def decoded(data: bytes, **rules: Any) -> list[list[tuple[int, ...]]]:
    image = open_image(data, rules=PictureRules(**rules))
    assert image.mode == "RGB"
    probe = probe_image(data, "x")
    assert image.size == (probe.width, probe.height)
    return [[tuple(pixel) for pixel in row] for row in np.asarray(image).tolist()]


def saved(image: Image.Image, picture_format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, picture_format, **options)
    return out.getvalue()


def noise(width: int = 31, height: int = 17, mode: str = "RGB") -> Image.Image:
    return Image.effect_noise((width, height), 90).convert(mode)


def grey(*values: int) -> list[tuple[int, int, int]]:
    return [(value, value, value) for value in values]


# -- PNG -------------------------------------------------------------------------------------


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_grey_of_every_depth_is_scaled_to_eight_bits(depth: int, interlaced: bool) -> None:
    top = 2**depth - 1
    values = sorted({0, 1, top // 3, top // 2, top})
    data = png([values, values[::-1]], depth, GREY, interlaced=interlaced)
    shown = [(value * 255 * 2 + top) // (2 * top) for value in values]
    assert decoded(data) == [grey(*shown), grey(*shown[::-1])]


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_a_transparent_grey_shows_the_background(depth: int) -> None:
    top = 2**depth - 1
    data = png([[0, top]], depth, GREY, clear=struct.pack(">H", top))
    assert decoded(data) == [[(0, 0, 0), WHITE]]
    assert decoded(data, background=(1, 2, 3)) == [[(0, 0, 0), (1, 2, 3)]]
    nothing_clear = png([[0, 0]], depth, GREY, clear=struct.pack(">H", top))
    assert decoded(nothing_clear, background=(1, 2, 3)) == [grey(0, 0)]


@pytest.mark.parametrize(("depth", "scale"), [(8, 1), (16, 257)])
def test_a_transparent_colour_shows_the_background(depth: int, scale: int) -> None:
    pixels = [[[10 * scale, 20 * scale, 30 * scale], [10 * scale, 20 * scale, 31 * scale]]]
    clear = struct.pack(">3H", *pixels[0][0])
    data = png(pixels, depth, RGB, clear=clear)
    assert decoded(data, background=(7, 8, 9)) == [[(7, 8, 9), (10, 20, 31)]]


@pytest.mark.parametrize("depth", [8, 16])
def test_alpha_is_laid_over_the_background(depth: int) -> None:
    top = 2**depth - 1
    data = png([[[0, 0, 0, 0], [top, 0, 0, top]]], depth, RGBA)
    assert decoded(data) == [[WHITE, (255, 0, 0)]]
    assert decoded(data, background=(0, 0, 9)) == [[(0, 0, 9), (255, 0, 0)]]
    data = png([[[0, 0], [top, top]]], depth, GREY_ALPHA)
    assert decoded(data, background=(0, 0, 9)) == [[(0, 0, 9), WHITE]]


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_palettes_of_every_depth_with_alpha(depth: int, interlaced: bool) -> None:
    palette = bytes([10, 20, 30, 40, 50, 60])
    data = png([[0, 1, 1], [1, 0, 0]], depth, PALETTE, palette=palette, interlaced=interlaced)
    one, two = (10, 20, 30), (40, 50, 60)
    assert decoded(data) == [[one, two, two], [two, one, one]]
    data = png([[0, 1]], depth, PALETTE, palette=palette, clear=bytes([0]))
    assert decoded(data, background=(1, 1, 1)) == [[(1, 1, 1), two]]


@given(st.integers(1, 20), st.integers(1, 20), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_interlaced_and_plain_pngs_show_the_same(width: int, height: int, alpha: bool, seed: int) -> None:
    channels = 4 if alpha else 3
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels))
    colour = RGBA if alpha else RGB
    assert decoded(png(pixels, 8, colour, interlaced=True)) == decoded(png(pixels, 8, colour))


# -- other containers: equal to a plain PNG of what they show ----------------------------------


def plain(image: Image.Image) -> bytes:
    return saved(image.convert("RGB"), "PNG")


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("picture_format", ["BMP", "TIFF", "PNG", "GIF"])
def test_lossless_formats_equal_a_plain_png(mode: str, picture_format: str) -> None:
    image = noise(mode="RGB" if mode == "P" else mode)
    if mode == "P" or picture_format == "GIF":
        image = image.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE)
    assert decoded(saved(image, picture_format)) == decoded(plain(image))


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_adobe_deflate", "packbits"])
def test_tiffs_of_every_compression_and_their_first_page(compression: str | None) -> None:
    first, second = noise(), noise(9, 9)
    data = saved(first, "TIFF", compression=compression, save_all=True, append_images=[second])
    assert decoded(data) == decoded(plain(first))


def test_a_deep_grey_tiff_is_scaled() -> None:
    image = Image.fromarray(np.array([[0, 300, 32_768, 65_535]], dtype=np.uint16))
    assert decoded(saved(image, "TIFF")) == [grey(0, 1, 128, 255)]


@pytest.mark.parametrize("mode", ["F", "I", "LAB"])
def test_modes_without_a_plain_meaning_are_refused(mode: str) -> None:
    image = Image.new(mode, (4, 4))
    with pytest.raises(MediaInvalid, match=f"cat: pixels of mode {mode} have no meaning in RGB"):
        open_image(saved(image, "TIFF"), "cat")


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 30, "subsampling": 0}])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpegs_equal_a_plain_png_of_what_they_show(mode: str, options: dict[str, Any]) -> None:
    data = saved(noise(mode=mode), "JPEG", **options)
    with Image.open(io.BytesIO(data)) as image:
        assert decoded(data) == decoded(plain(image))


def test_a_jpeg_of_several_pictures_is_its_first() -> None:
    first = noise()
    data = saved(first, "MPO", save_all=True, append_images=[noise(8, 8)])
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "MPO"
        assert decoded(data) == decoded(plain(image))


@pytest.mark.parametrize("picture_format", ["PNG", "WEBP", "GIF"])
def test_an_animation_is_its_first_frame(picture_format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if picture_format == "WEBP" else {}
    data = saved(frames[0], picture_format, save_all=True, append_images=frames[1:], duration=50, **options)
    assert decoded(data) == [[(255, 0, 0)] * 8] * 8


@pytest.mark.parametrize("picture_format", ["WEBP", "AVIF"])
def test_lossy_formats_with_alpha_are_laid_over_white(picture_format: str) -> None:
    image = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    options = {"lossless": True} if picture_format == "WEBP" else {"quality": 100}
    shown = np.asarray(open_image(saved(image, picture_format, **options)))
    assert shown.min() >= 254


# -- metadata ----------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("picture_format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_exif_turns_every_format_as_pillow_turns_it(picture_format: str, orientation: int) -> None:
    tags = Image.Exif()
    tags[0x0112] = orientation
    data = saved(noise(24, 16), picture_format, exif=tags)
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        turned = ImageOps.exif_transpose(image)
        assert decoded(data) == decoded(plain(turned))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("broken", [b"Exif\0\0", b"Exif\0\0XX", b"Exif\0\0II*\0\xff\xff\xff\xff", b"garbage"])
@pytest.mark.parametrize("picture_format", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_is_no_exif(picture_format: str, broken: bytes) -> None:
    image = Image.new("RGB", (24, 16), "red")
    data = saved(image, picture_format, exif=broken)
    assert open_image(data).size == (24, 16)


SHORT, TEXT, SIGNED = 3, 2, 9


@pytest.mark.parametrize(
    ("kind", "count", "value"),
    [
        (SHORT, 1, b"\0\0"),
        (SHORT, 1, b"\x09\0"),
        (TEXT, 2, b"6\0"),
        (SIGNED, 1, b"\xff" * 4),
    ],
)
def test_an_orientation_that_is_none_is_upright(kind: int, count: int, value: bytes) -> None:
    entry = struct.pack("<HHI", 0x0112, kind, count) + value.ljust(4, b"\0")
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + bytes(4)
    assert open_image(saved(noise(24, 16), "JPEG", exif=exif)).size == (24, 16)


@pytest.mark.parametrize("picture_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_broken_colour_profile_changes_nothing(picture_format: str) -> None:
    image = noise()
    data = saved(image, picture_format, icc_profile=b"\0\1garbage" * 9)
    assert decoded(data) == decoded(saved(image, picture_format))


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (20, 3000), (3000, 20), (3, 4), (1, 5)])
def test_odd_sizes(size: tuple[int, int]) -> None:
    for picture_format in ("JPEG", "PNG", "WEBP", "AVIF", "TIFF"):
        data = saved(noise(*size), picture_format)
        assert open_image(data).size == size
        probe = probe_image(data, "odd")
        assert (probe.width, probe.height) == size


@pytest.mark.slow
def test_a_picture_of_48_megapixels() -> None:
    data = saved(Image.new("RGB", (8000, 6000), "teal"), "JPEG")
    image = open_image(data)
    assert image.size == (8000, 6000)
    assert image.getpixel((7999, 5999)) == image.getpixel((0, 0))


def test_a_webp_that_claims_a_huge_size_is_refused_before_its_decoder_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("opened")

    monkeypatch.setattr(Image, "open", never)
    size = (16_383).to_bytes(3, "little") * 2
    extended = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + size + bytes(20)
    lossless = b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + (0x3FFF | 0x3FFF << 14).to_bytes(4, "little") + bytes(20)
    lossy = b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383) + bytes(20)
    for data in (extended, lossless, lossy):
        with pytest.raises(MediaInvalid, match="pixels, the limit is 89478485"):
            probe_image(data, "bomb")


def test_text_that_unpacks_without_end_is_refused() -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    image = png([[0]], 8, GREY)
    at = image.index(b"IDAT") - 4
    data = image[:at] + chunk(b"zTXt", b"Comment\0\0" + bomb) + image[at:]
    with pytest.raises(MediaInvalid, match="bomb"):
        open_image(data, "bomb")
