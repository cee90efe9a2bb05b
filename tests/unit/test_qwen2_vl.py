"""The builtin encoder: what the node computes without torch is what the worker's half makes."""

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
from epd.encoders.qwen2_vl import MAX_RESIZED_PIXELS, Qwen2VLEncoder, smart_resize
from epd.encoders.registry import load_encoder
from epd.protocol.errors import ConfigError, MediaInvalid, MediaMismatch, UnsupportedItem
from epd.protocol.messages import DType, Probe


@pytest.fixture(scope="module")
def loaded() -> Qwen2VLEncoder:
    encoder = Qwen2VLEncoder()
    encoder.load(1, "cpu")
    return encoder


def image_probe(width: int, height: int) -> Probe:
    return Probe("image", width=width, height=height)


def item(path: Path, dtype: DType) -> MediaItem:
    data = path.read_bytes()
    return MediaItem(probe_image(data, path.name), memoryview(data), dtype)


def test_rows_follow_from_the_size() -> None:
    spec = Qwen2VLEncoder().plan(image_probe(800, 600), "float32")
    assert (spec.rows, spec.dim, spec.nbytes) == (609, 128, 311_808)
    (grid,) = spec.aux
    assert (grid.name, grid.dtype, grid.shape) == ("grid_thw", "int64", (1, 3))
    assert struct.unpack("<3q", grid.data) == (1, 42, 58)


def test_a_large_picture_is_capped() -> None:
    wide, high = smart_resize(4000, 3000)
    assert MAX_RESIZED_PIXELS * 0.9 < wide * high <= MAX_RESIZED_PIXELS


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
def test_what_cannot_be_planned_is_refused(probe: Probe, error: type[Exception]) -> None:
    with pytest.raises(error):
        Qwen2VLEncoder().plan(probe, "float32")


def test_a_ratio_of_200_is_the_last_that_is_taken() -> None:
    assert Qwen2VLEncoder().plan(image_probe(200, 1), "float32").rows > 0


@pytest.mark.slow
def test_the_node_half_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from epd.encoders.registry import load_encoder\n"
        "from epd.protocol.messages import Probe\n"
        "encoder = load_encoder('builtin:qwen2-vl')\n"
        "assert len(encoder.fingerprint) == 64\n"
        "encoder.plan(Probe('image', width=640, height=480), encoder.default_dtype)\n"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.stderr.strip(), done.returncode) == ("", 0)


def test_the_fingerprint_follows_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Qwen2VLEncoder().fingerprint
    assert ours == Qwen2VLEncoder().fingerprint
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    assert Qwen2VLEncoder().fingerprint != ours


def test_a_missing_library_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.encoders.qwen2_vl._LIBRARIES", ("no-such-library",))
    with pytest.raises(ConfigError, match="no-such-library"):
        load_encoder("builtin:qwen2-vl")


@pytest.mark.slow
def test_smart_resize_is_the_processors_own(loaded: Qwen2VLEncoder) -> None:
    draw = random.Random(7)
    sizes = [(draw.randint(1, 57), draw.randint(1, 57)) for _ in range(60)]
    sizes += [(draw.randint(1, 900), draw.randint(1, 900)) for _ in range(60)]
    sizes += [(draw.randint(900, 2600), draw.randint(900, 2600)) for _ in range(8)]
    compared = 0
    for width, height in sizes:
        if max(width, height) / min(width, height) > 200:
            continue
        features = loaded._processor(images=[Image.new("RGB", (width, height))], return_tensors="pt")
        _, grid_high, grid_wide = features["image_grid_thw"][0].tolist()
        assert smart_resize(width, height) == (grid_wide * 14, grid_high * 14), (width, height)
        assert features["pixel_values"].shape[0] == grid_wide * grid_high
        compared += 1
    assert compared >= 100


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_rows_are_those_that_were_planned(loaded: Qwen2VLEncoder, dtype: DType) -> None:
    for path in photographs():
        media = item(path, dtype)
        spec = loaded.plan(media.probe, dtype)
        (rows,) = loaded.forward([loaded.preprocess(media)])
        assert (tuple(rows.shape), str(rows.dtype)) == ((spec.rows, spec.dim), f"torch.{dtype}")


@pytest.mark.slow
def test_two_builds_are_equal_and_the_callers_random_numbers_untouched(loaded: Qwen2VLEncoder) -> None:
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    other = Qwen2VLEncoder()
    other.load(1, "cpu")
    assert torch.equal(torch.rand(3), expected)
    media = item(photographs()[0], "float32")
    rows = [encoder.forward([encoder.preprocess(media)])[0] for encoder in (loaded, other)]
    assert torch.equal(*rows)


@pytest.mark.slow
def test_several_items_in_one_forward_are_split_again(loaded: Qwen2VLEncoder) -> None:
    media = [item(path, "float32") for path in photographs()[:3]]
    results = loaded.forward([loaded.preprocess(one) for one in media])
    assert [len(rows) for rows in results] == [loaded.plan(one.probe, "float32").rows for one in media]


@pytest.mark.slow
def test_a_picture_of_another_size_than_announced_is_a_mismatch(loaded: Qwen2VLEncoder) -> None:
    media = item(photographs()[0], "float32")
    with pytest.raises(MediaMismatch, match="announced"):
        loaded.preprocess(media._replace(probe=image_probe(media.probe.width + 1, media.probe.height)))


@pytest.mark.slow
def test_a_grid_other_than_planned_is_a_mismatch(
    loaded: Qwen2VLEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_processor(images: list[Any], return_tensors: str) -> Any:
        features = processor(images=images, return_tensors=return_tensors)
        features["image_grid_thw"][0, 1] += 2
        return features

    processor = loaded._processor
    monkeypatch.setattr(loaded, "_processor", other_processor)
    with pytest.raises(MediaMismatch, match="grid"):
        loaded.preprocess(item(photographs()[0], "float32"))


@pytest.mark.slow
def test_rows_other_than_planned_are_a_mismatch(loaded: Qwen2VLEncoder) -> None:
    import msgspec

    pixels = loaded.preprocess(item(photographs()[0], "float32"))
    wrong = msgspec.structs.replace(pixels.spec, rows=pixels.spec.rows + 1)
    with pytest.raises(MediaMismatch, match="the tower made"):
        loaded.forward([pixels._replace(spec=wrong)])
