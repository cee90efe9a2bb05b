"""The builtin towers: what the node computes without torch is what the worker's half makes."""

import functools
import io
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from epd.data import photographs
from epd.encoders.base import MediaItem
from epd.encoders.media import probe_image
from epd.encoders.qwen_vl import smart_resize
from epd.encoders.registry import BUILTIN, load_encoder
from epd.encoders.towers import TowerEncoder
from epd.protocol.errors import ConfigError, MediaInvalid, MediaMismatch, UnsupportedItem
from epd.protocol.messages import DType, EmbeddingSpec, Probe

QWEN = [name for name in BUILTIN if "qwen" in name]
FIXED = [name for name in BUILTIN if "qwen" not in name]


def tower(name: str) -> TowerEncoder:
    encoder = load_encoder(name)
    assert isinstance(encoder, TowerEncoder)
    return encoder


@functools.cache
def loaded(name: str = "builtin:qwen2-vl") -> TowerEncoder:
    encoder = tower(name)
    encoder.load(1, "cpu")
    return encoder


def image_probe(width: int, height: int) -> Probe:
    return Probe("image", width=width, height=height)


def item(path: Path, dtype: DType) -> MediaItem:
    data = path.read_bytes()
    return MediaItem(probe_image(data, path.name), memoryview(data), dtype)


def test_rows_follow_from_the_size() -> None:
    spec = tower("builtin:qwen2-vl").plan(image_probe(800, 600), "float32")
    assert (spec.rows, spec.dim, spec.nbytes) == (609, 128, 311_808)
    (grid,) = spec.aux
    assert (grid.name, grid.dtype, grid.shape) == ("grid_thw", "int64", (1, 3))
    assert struct.unpack("<3q", grid.data) == (1, 42, 58)


def test_a_large_picture_is_capped() -> None:
    wide, high = smart_resize(4000, 3000, 28, 3_136, 1_003_520)
    assert 1_003_520 * 0.9 < wide * high <= 1_003_520


def test_rows_of_deepstack_are_wide() -> None:
    spec = tower("builtin:qwen3-vl").plan(image_probe(640, 320), "bfloat16")
    assert (spec.rows, spec.dim) == (640 // 32 * 320 // 32, 3 * 128)


@pytest.mark.parametrize(("name", "rows"), [("builtin:clip", 257), ("builtin:siglip", 256)])
def test_fixed_rows_do_not_follow_from_the_size(name: str, rows: int) -> None:
    for size in ((1, 1), (20, 3000), (4000, 3000)):
        assert tower(name).plan(image_probe(*size), "float32") == EmbeddingSpec(rows, 128, "float32")


@pytest.mark.parametrize(
    ("probe", "error"),
    [
        (Probe("video", width=64, height=64), UnsupportedItem),
        (Probe("audio", samples=16_000), UnsupportedItem),
        (image_probe(0, 9), MediaInvalid),
        (image_probe(-3, -3), MediaInvalid),
        (image_probe(201, 1), UnsupportedItem),
    ],
)
@pytest.mark.parametrize("name", BUILTIN)
def test_what_cannot_be_planned_is_refused(name: str, probe: Probe, error: type[Exception]) -> None:
    with pytest.raises(error):
        tower(name).plan(probe, "float32")


@pytest.mark.parametrize("name", BUILTIN)
def test_a_ratio_of_200_is_the_last_that_is_taken(name: str) -> None:
    assert tower(name).plan(image_probe(200, 1), "float32").rows > 0


@pytest.mark.slow
def test_the_node_half_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from epd.encoders.registry import BUILTIN, load_encoder\n"
        "from epd.protocol.messages import Probe\n"
        "for name in BUILTIN:\n"
        "    encoder = load_encoder(name)\n"
        "    assert len(encoder.fingerprint) == 64\n"
        "    encoder.plan(Probe('image', width=640, height=480), encoder.default_dtype)\n"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.stderr.strip(), done.returncode) == ("", 0)


def test_the_fingerprint_follows_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {name: tower(name).fingerprint for name in BUILTIN}
    assert len(set(ours.values())) == len(BUILTIN)
    assert ours == {name: tower(name).fingerprint for name in BUILTIN}
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    assert all(tower(name).fingerprint != print_ for name, print_ in ours.items())


def test_a_missing_library_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.encoders.towers._LIBRARIES", ("no-such-library",))
    with pytest.raises(ConfigError, match="no-such-library"):
        _ = tower("builtin:qwen2-vl").fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("name", QWEN)
def test_the_grid_planned_is_the_processors_own(name: str) -> None:
    draw = random.Random(7)
    sizes = [(draw.randint(1, 57), draw.randint(1, 57)) for _ in range(40)]
    sizes += [(draw.randint(1, 900), draw.randint(1, 900)) for _ in range(20)]
    sizes += [(draw.randint(900, 2600), draw.randint(900, 2600)) for _ in range(4)]
    sizes += [(1, 1), (1, 3), (3, 1), (3, 3), (4, 3), (3, 4), (1, 200), (200, 1), (20, 3000)]
    processor = loaded(name)._family.build_processor()
    for width, height in sizes:
        if max(width, height) / min(width, height) > 200:
            continue
        features = processor(images=[Image.new("RGB", (width, height))], return_tensors="pt")
        spec = loaded(name).plan(image_probe(width, height), "float32")
        grid = struct.unpack("<3q", spec.aux[0].data)
        assert grid == tuple(features["image_grid_thw"][0].tolist()), (width, height)
        assert features["pixel_values"].shape[0] == 4 * spec.rows


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize(
    "size", [(1, 1), (1, 3), (3, 1), (3, 3), (4, 3), (3, 4), (1, 200), (200, 1), (20, 3000)]
)
def test_pictures_with_a_side_of_few_pixels_are_not_read_channels_first(
    name: str, size: tuple[int, int]
) -> None:
    """One colour: whatever is scaled and cropped of it is that colour, in each channel its own."""
    encoder, colour = loaded(name), (250, 120, 10)
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    data = out.getvalue()
    pixels = encoder.preprocess(MediaItem(probe_image(data, "x"), memoryview(data), "float32"))
    for channel, plane in enumerate(pixels.values[0]):
        assert float(plane.max() - plane.min()) < 1e-5
        mean, std = encoder._processor.image_mean[channel], encoder._processor.image_std[channel]
        assert float(plane[0, 0]) == pytest.approx((colour[channel] / 255 - mean) / std, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_rows_are_those_that_were_planned(name: str, dtype: DType) -> None:
    for path in photographs()[:3]:
        media = item(path, dtype)
        spec = loaded(name).plan(media.probe, dtype)
        (rows,) = loaded(name).forward([loaded(name).preprocess(media)])
        assert (tuple(rows.shape), str(rows.dtype)) == ((spec.rows, spec.dim), f"torch.{dtype}")


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILTIN)
def test_two_builds_are_equal_and_the_callers_random_numbers_untouched(name: str) -> None:
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    other = tower(name)
    other.load(1, "cpu")
    assert torch.equal(torch.rand(3), expected)
    media = item(photographs()[0], "float32")
    rows = [encoder.forward([encoder.preprocess(media)])[0] for encoder in (loaded(name), other)]
    assert torch.equal(*rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILTIN)
def test_several_items_in_one_forward_are_split_again(name: str) -> None:
    import torch

    encoder = loaded(name)
    media = [item(path, "float32") for path in photographs()[:3]]
    together = encoder.forward([encoder.preprocess(one) for one in media])
    for one, rows in zip(media, together, strict=True):
        (alone,) = encoder.forward([encoder.preprocess(one)])
        assert rows.shape == alone.shape
        assert torch.allclose(rows, alone, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_picture_of_another_size_than_announced_is_a_mismatch() -> None:
    media = item(photographs()[0], "float32")
    with pytest.raises(MediaMismatch, match="announced"):
        loaded().preprocess(media._replace(probe=image_probe(media.probe.width + 1, media.probe.height)))


@pytest.mark.slow
def test_a_grid_other_than_planned_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_processor(images: list[Any], return_tensors: str) -> Any:
        features = processor(images=images, return_tensors=return_tensors)
        features["image_grid_thw"][0, 1] += 2
        return features

    processor = loaded()._processor
    monkeypatch.setattr(loaded(), "_processor", other_processor)
    with pytest.raises(MediaMismatch, match="grid"):
        loaded().preprocess(item(photographs()[0], "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["builtin:qwen2-vl", "builtin:clip"])
def test_rows_other_than_planned_are_a_mismatch(name: str) -> None:
    import msgspec

    pixels = loaded(name).preprocess(item(photographs()[0], "float32"))
    wrong = msgspec.structs.replace(pixels.spec, rows=pixels.spec.rows + 1)
    with pytest.raises(MediaMismatch, match="the tower made"):
        loaded(name).forward([pixels._replace(spec=wrong)])
