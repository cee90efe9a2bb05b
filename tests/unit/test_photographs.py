"""The photographs of the package: enough of them, different, decodable, with their terms named."""

import io

from PIL import Image

from epd.data import photographs
from epd.encoders.media import open_image, probe_image


def test_there_are_different_photographs_of_both_formats() -> None:
    found = photographs()
    sizes = {(p.width, p.height) for p in (probe_image(f.read_bytes(), f.name) for f in found)}
    assert len(found) >= 8
    assert len(sizes) == len(found)
    assert {file.suffix for file in found} == {".jpg", ".png"}
    assert sum(file.stat().st_size for file in found) < 3_000_000


def test_each_decodes_to_the_size_its_header_tells() -> None:
    for file in photographs():
        data = file.read_bytes()
        probe = probe_image(data, file.name)
        assert open_image(data, file.name).size == (probe.width, probe.height)


def test_one_is_turned_by_exif_and_one_is_grey() -> None:
    images = [Image.open(io.BytesIO(file.read_bytes())) for file in photographs()]
    assert any(image.getexif().get(0x0112) == 6 for image in images)
    assert any(image.mode == "L" for image in images)


def test_the_source_and_terms_of_each_are_named() -> None:
    files = photographs()
    text = (files[0].parent / "LICENSES.md").read_text()
    assert all(f"| `{file.name}` |" in text for file in files)
