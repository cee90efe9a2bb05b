"""Probing and decoding pictures: the header tells the size, everything becomes RGB by our rules."""

import io
import zlib
from typing import Any

import pytest
from PIL import Image

from epd.encoders import media
from epd.encoders.media import FORMATS, PictureRules, open_image, probe_image
from epd.protocol.errors import MediaInvalid
from epd.protocol.messages import Probe


def encoded(image: Image.Image, picture_format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, picture_format, **options)
    return out.getvalue()


def noise(width: int, height: int) -> Image.Image:
    return Image.effect_noise((width, height), 64).convert("RGB")


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def corner_colours(image: Image.Image) -> list[Any]:
    right, bottom = image.width - 1, image.height - 1
    return [image.getpixel(at) for at in ((0, 0), (right, 0), (0, bottom), (right, bottom))]


@pytest.mark.parametrize("picture_format", FORMATS)
def test_the_header_tells_the_size(picture_format: str) -> None:
    data = encoded(noise(37, 21), picture_format)
    assert probe_image(data, "a") == Probe("image", width=37, height=21)
    assert probe_image(memoryview(data), "a") == probe_image(data, "a")
    assert open_image(data).mode == "RGB"


@pytest.mark.parametrize("picture_format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_width_and_height_are_those_after_rotation(picture_format: str, orientation: int) -> None:
    data = encoded(noise(40, 24), picture_format, exif=exif(orientation))
    probe = probe_image(data, "turned")
    assert (probe.width, probe.height) == ((24, 40) if orientation >= 5 else (40, 24))
    assert open_image(data).size == (probe.width, probe.height)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_are_turned_as_pillow_turns_them(orientation: int) -> None:
    from PIL import ImageOps

    data = encoded(noise(40, 24), "PNG", exif=exif(orientation))
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        expected = ImageOps.exif_transpose(image)
    assert open_image(data).tobytes() == expected.tobytes()


def test_exif_behind_the_pixels_turns_neither_the_probe_nor_the_picture() -> None:
    """Or the probe would have to decode, and an announced size would be wrong."""
    data = encoded(noise(40, 24), "PNG")
    tags = exif(6).tobytes().removeprefix(b"Exif\0\0")
    chunk = b"eXIf" + tags
    late = len(tags).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    end = data.rindex(b"IEND") - 4
    data = data[:end] + late + data[end:]
    probe = probe_image(data, "late")
    assert (probe.width, probe.height) == (40, 24)
    assert open_image(data).size == (40, 24)


@pytest.mark.parametrize("picture_format", ["JPEG", "PNG"])
def test_probing_reads_only_the_header(picture_format: str) -> None:
    data = encoded(noise(400, 300), picture_format)
    assert probe_image(data[: len(data) // 2], "half") == Probe("image", width=400, height=300)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"just a text file, nothing to see\n" * 9, "not a picture"),
        (encoded(noise(9, 9), "PNG")[:20], "header"),
        (encoded(noise(9, 9), "JPEG")[:30], "header"),
        (encoded(noise(9, 9), "PPM"), "not a picture"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "not a picture"),
        (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "not a picture"),
        (b"PK\x03\x04" + bytes(60), "not a picture"),
        (b"\x1f\x8b\x08" + bytes(60), "not a picture"),
        (bytes(64), "not a picture"),
        (b"\x89PNG\r\n\x1a\n", "header"),
        (b"II*\0" + bytes(60), "header|not a picture"),
        (b"RIFF\x40\0\0\0WEBPVP8 " + bytes(60), "pixels|header|not a picture"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value[:9]),
)
def test_what_is_no_picture_is_refused_by_name(data: bytes, why: str) -> None:
    for function in (probe_image, open_image):
        with pytest.raises(MediaInvalid, match=why) as refused:
            function(data, "cat.jpg")
        assert refused.value.message.startswith("cat.jpg: ")
        assert not refused.value.retryable


@pytest.mark.parametrize("picture_format", FORMATS)
@pytest.mark.parametrize("progressive", [False, True])
def test_a_picture_that_is_cut_anywhere_is_refused(picture_format: str, progressive: bool) -> None:
    if progressive and picture_format != "JPEG":
        return
    options = {"progressive": True} if progressive else {}
    data = encoded(noise(64, 48), picture_format, **options)
    whole = open_image(data).tobytes()
    ends = {len(data) * tenth // 16 for tenth in range(16)} | {len(data) - cut for cut in (1, 2, 3, 5, 9, 13)}
    for end in sorted(ends):
        try:
            cut = open_image(data[:end], "b.jpg")
        except MediaInvalid as refused:
            assert refused.message.startswith("b.jpg: ")
            continue
        # What is missing was nothing of this picture: the trailer of a GIF, padding.
        assert picture_format in ("GIF", "BMP", "WEBP", "TIFF", "AVIF"), (picture_format, end, len(data))
        assert end >= len(data) - 2
        assert cut.tobytes() == whole


@pytest.mark.parametrize("picture_format", FORMATS)
def test_too_many_pixels_are_refused_on_the_header(picture_format: str) -> None:
    data = encoded(noise(40, 24), picture_format)
    for function in (probe_image, open_image):
        function(data, "large", PictureRules(max_pixels=960))
        with pytest.raises(MediaInvalid, match="960 pixels, the limit is 959"):
            function(data, "large", PictureRules(max_pixels=959))


def test_a_header_of_absurd_size_is_refused_without_a_warning_or_memory() -> None:
    data = bytearray(encoded(Image.new("L", (1, 1))))
    for size in (10_000, 100_000, 2**31 - 1):  # Pillow warns at the first, raises at the others
        data[16:24] = size.to_bytes(4, "big") * 2
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
        with pytest.raises(MediaInvalid, match="huge"):
            probe_image(bytes(data), "huge")


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_over_white(mode: str) -> None:
    image = Image.new(mode, (2, 1), 0)
    image.putpixel((1, 0), (0, 0, 0, 255) if mode == "RGBA" else (0, 255))
    assert corner_colours(open_image(encoded(image)))[:2] == [(255, 255, 255), (0, 0, 0)]


def test_a_transparent_palette_entry_is_laid_over_white() -> None:
    image = Image.new("P", (2, 1), 0)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    assert corner_colours(open_image(encoded(image, transparency=0)))[:2] == [(255, 255, 255), (40, 50, 60)]
    assert corner_colours(open_image(encoded(image)))[:2] == [(10, 20, 30), (40, 50, 60)]


@pytest.mark.parametrize(("deep", "flat"), [(0, 0), (65_535, 255), (257 * 7, 7), (32_768, 128), (300, 1)])
def test_sixteen_bit_grey_is_scaled_not_clipped(deep: int, flat: int) -> None:
    data = encoded(Image.new("I;16", (3, 3), deep))
    assert corner_colours(open_image(data)) == [(flat, flat, flat)] * 4


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(mode: str) -> None:
    picture_format = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    result = open_image(encoded(noise(16, 16).convert(mode), picture_format))
    assert (result.mode, result.size) == ("RGB", (16, 16))


def test_running_out_of_memory_does_not_blame_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(image: Image.Image, orientation: int) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr(media, "_turn", no_memory)
    with pytest.raises(MemoryError):
        open_image(encoded(noise(8, 8)))
