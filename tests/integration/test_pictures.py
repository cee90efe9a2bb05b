"""Whatever file a user sends: what a viewer shows is what is encoded, bit for bit, or the item is refused by
name and nothing else is lost."""

import asyncio
import io
import json
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from node_pairs import empty
from PIL import Image, ImageOps

from epd.testing.processes import NodeProcess, node_process

COMMON = {"data_plane": "shm", "log_format": "json", "worker.threads": 1}


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[NodeProcess, NodeProcess]]:
    with (
        node_process(COMMON | {"role": "encoder"}) as encoder,
        node_process(COMMON | {"role": "prefill", "encoders": [encoder.listen]}) as prefill,
    ):
        yield encoder, prefill


def send(prefill: NodeProcess, *paths: str) -> list[dict[str, Any]]:
    """Each file a request of its own; the results in order."""
    command = [sys.executable, "-m", "epd.cli.main", "send", "--to", prefill.listen, "--json", "--", *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    assert [result["item"] for result in results] == list(paths)
    return results


def saved(image: Image.Image, picture_format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, picture_format, **options)
    return out.getvalue()


def noise(width: int = 120, height: int = 84, mode: str = "RGB") -> Image.Image:
    return Image.effect_noise((width, height), 90).convert(mode)


def turned() -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = 6
    return tags


def with_alpha() -> Image.Image:
    image = noise(mode="RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def deep_grey() -> Image.Image:
    return Image.fromarray(np.linspace(0, 65_535, 120 * 84).reshape(84, 120).astype(np.uint16))


GOOD: dict[str, Callable[[], bytes]] = {
    "progressive.jpg": lambda: saved(noise(), "JPEG", progressive=True),
    "cmyk.jpg": lambda: saved(noise(mode="CMYK"), "JPEG"),
    "grey.jpg": lambda: saved(noise(mode="L"), "JPEG"),
    "turned.jpg": lambda: saved(noise(), "JPEG", exif=turned()),
    "turned.png": lambda: saved(noise(), "PNG", exif=turned()),
    "turned.webp": lambda: saved(noise(), "WEBP", exif=turned()),
    "turned.tif": lambda: saved(noise(), "TIFF", exif=turned()),
    "broken exif.jpg": lambda: saved(noise(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
    "broken profile.jpg": lambda: saved(noise(), "JPEG", icc_profile=b"\0garbage"),
    "several pictures.jpg": lambda: saved(noise(), "MPO", save_all=True, append_images=[noise(30, 30)]),
    "palette.png": lambda: saved(noise().convert("P", palette=Image.Palette.ADAPTIVE), "PNG"),
    "alpha.png": lambda: saved(with_alpha(), "PNG"),
    "grey and alpha.png": lambda: saved(with_alpha().convert("LA"), "PNG"),
    "one bit.png": lambda: saved(noise(mode="1"), "PNG"),
    "sixteen bits.png": lambda: saved(deep_grey(), "PNG"),
    "animated.png": lambda: saved(noise(), "PNG", save_all=True, append_images=[noise()]),
    "animated.webp": lambda: saved(noise(), "WEBP", lossless=True, save_all=True, append_images=[noise()]),
    "lossy.webp": lambda: saved(noise(), "WEBP"),
    "animated.gif": lambda: saved(noise(mode="L"), "GIF", save_all=True, append_images=[noise(mode="L")]),
    "plain.bmp": lambda: saved(noise(), "BMP"),
    "pages.tiff": lambda: saved(
        noise(), "TIFF", compression="tiff_lzw", save_all=True, append_images=[noise()]
    ),
    "plain.avif": lambda: saved(noise(), "AVIF"),
    "a photograph.txt": lambda: saved(noise(), "JPEG"),
    "wrong suffix.png": lambda: saved(noise(), "JPEG"),
    "na\u00efve \u6771\u4eac \U0001f600.jpg": lambda: saved(noise(), "JPEG"),
    "1x1.png": lambda: saved(noise(1, 1), "PNG"),
    "3x4.png": lambda: saved(noise(3, 4), "PNG"),
    "20x3000.png": lambda: saved(noise(20, 3000), "PNG"),
    "8000x6000.jpg": lambda: saved(Image.linear_gradient("L").resize((8000, 6000)), "JPEG"),
}


def shown(data: bytes) -> Image.Image:
    """What a viewer shows, by other means than ours."""
    with Image.open(io.BytesIO(data)) as file:
        file.load()
        image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I;16"):
        scaled = np.round(np.asarray(image).astype(np.float64) / 257).astype(np.uint8)
        return Image.fromarray(scaled).convert("RGB")
    if image.mode in ("LA", "RGBA"):
        page = Image.new("RGBA", image.size, "white")
        page.alpha_composite(image.convert("RGBA"))
        return page.convert("RGB")
    return image.convert("RGB")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_every_picture_is_encoded_as_a_plain_png_of_what_it_shows(
    nodes: tuple[NodeProcess, NodeProcess], tmp_path: Path
) -> None:
    paths, twins = [], []
    for name, make in GOOD.items():
        data = make()
        paths.append(tmp_path / name)
        paths[-1].write_bytes(data)
        twins.append(tmp_path / f"{name}.twin.png")
        shown(data).save(twins[-1], compress_level=1)
    results = send(nodes[1], *map(str, paths), *map(str, twins))
    for name, one, twin in zip(GOOD, results[: len(paths)], results[len(paths) :], strict=True):
        assert one["ok"], one
        assert (name, one["sha256"]) == (name, twin["sha256"])
        assert one["grid_thw"] == twin["grid_thw"]


def corrupt(data: bytes) -> bytes:
    """A good header, damaged pixels."""
    at = len(data) // 2
    return data[:at] + bytes(byte ^ 0xFF for byte in data[at : at + 200]) + data[at + 200 :]


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("cat.jpg", saved(noise(), "JPEG"))
    return out.getvalue()


def bomb() -> bytes:
    """A PNG whose header claims 400 megapixels."""
    data = bytearray(saved(noise(1, 1), "PNG"))
    data[16:24] = (20_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut header.jpg": (lambda: saved(noise(), "JPEG")[:40], "header"),
    "cut.jpg": (lambda: saved(noise(), "JPEG")[:-700], ""),
    "cut at its end.jpg": (lambda: saved(noise(), "JPEG")[:-2], ""),
    "cut.png": (lambda: saved(noise(), "PNG")[:-700], ""),
    "cut at its end.png": (lambda: saved(noise(), "PNG")[:-6], "cut before its end"),
    "cut.webp": (lambda: saved(noise(), "WEBP")[:-700], ""),
    "cut.gif": (lambda: saved(noise(mode="L"), "GIF")[:-700], ""),
    "cut.tiff": (lambda: saved(noise(), "TIFF")[:-700], ""),
    "cut.avif": (lambda: saved(noise(), "AVIF")[:-700], ""),
    "corrupt.png": (lambda: corrupt(saved(noise(), "PNG")), "cannot be decoded"),
    "empty.jpg": (lambda: b"", "empty"),
    "text.jpg": (lambda: b"just some text\n" * 40, "not a picture"),
    "page.jpg": (lambda: b"<!DOCTYPE html><html><body>404</body></html>", "not a picture"),
    "drawing.svg": (
        lambda: b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "not a picture",
    ),
    "archive.jpg": (zipped, "not a picture"),
    "bomb.png": (bomb, "pixels"),
    "too thin.png": (lambda: saved(noise(2, 500), "PNG"), "200 times"),
}


@pytest.mark.slow
def test_every_bad_file_is_refused_by_name_and_nothing_else_is_lost(
    nodes: tuple[NodeProcess, NodeProcess], tmp_path: Path
) -> None:
    encoder, prefill = nodes
    worker_before = sorted(children(encoder.pid))
    good = tmp_path / "good.jpg"
    good.write_bytes(saved(noise(), "JPEG"))
    odd: dict[str, str] = {
        "missing": str(tmp_path / "missing.jpg"),
        "directory": str(tmp_path),
        "fifo": str(tmp_path / "fifo.jpg"),
        "device": "/dev/zero",
        "loop": str(tmp_path / "loop.jpg"),
        "huge": str(tmp_path / "huge.jpg"),
    }
    os.mkfifo(odd["fifo"])
    os.symlink(odd["loop"], odd["loop"])
    with open(odd["huge"], "wb") as file:
        file.truncate(20 * 2**30)
    for name, (make, _) in BAD.items():
        (tmp_path / name).write_bytes(make())
    given = [*(str(tmp_path / name) for name in BAD), *odd.values()]
    results = send(prefill, *(path for bad in given for path in (bad, str(good))))
    assert all(result["ok"] for result in results[1::2])
    assert len({result["sha256"] for result in results[1::2]}) == 1
    for result, why in zip(results[::2], [why for _, why in BAD.values()] + [""] * len(odd), strict=True):
        assert not result["ok"], result
        assert result["error"]["code"] in ("media_invalid", "unsupported_item"), result
        assert why in result["error"]["message"], result
        assert result["error"]["message"]
    assert sorted(children(encoder.pid)) == worker_before
    for node in nodes:
        asyncio.run(empty(node.listen))


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
