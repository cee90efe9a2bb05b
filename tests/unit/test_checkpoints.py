"""Checkpoint directories: the same rows as plain transformers, from the tower's weights alone; what is wrong
with one is one line."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, edit_json, plain_rows, save
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from epd.encoders.base import MediaItem
from epd.encoders.media import probe_image
from epd.encoders.registry import load_encoder
from epd.encoders.towers import TowerEncoder
from epd.protocol.errors import ConfigError

pytestmark = pytest.mark.slow
LANGUAGE = ("model.embed", "model.layers", "model.language_model", "lm_head", "text_model", "model.norm")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = path, save(name, path, shard_size="40KB")
        return made[name]

    return make


def encoder_of(path: Path) -> TowerEncoder:
    encoder = load_encoder(str(path))
    assert isinstance(encoder, TowerEncoder)
    return encoder


def picture(width: int, height: int, seed: int = 1) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def item(image: Image.Image, dtype: Any = "float32") -> MediaItem:
    out = io.BytesIO()
    image.save(out, "PNG")
    data = out.getvalue()
    return MediaItem(probe_image(data, "x"), memoryview(data), dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_bit_for_bit_those_of_plain_transformers(
    name: str, saved: Callable[[str], tuple[Path, Any]]
) -> None:
    path, model = saved(name)
    assert len(list(path.glob("*.safetensors"))) > 1
    encoder = encoder_of(path)
    encoder.load(torch.get_num_threads(), "cpu")
    images = [picture(120, 84), picture(33, 200, 2), picture(1, 3, 3), picture(3, 4, 4)]
    alone = [encoder.forward([encoder.preprocess(item(image))])[0] for image in images]
    for image, rows in zip(images, alone, strict=True):
        expected = plain_rows(name, model, image)
        assert torch.equal(rows, expected)
        spec = encoder.plan(item(image).probe, "float32")
        assert (spec.rows, spec.dim) == tuple(expected.shape)
    together = encoder.forward([encoder.preprocess(item(image)) for image in images])
    for rows, expected in zip(together, alone, strict=True):
        assert torch.allclose(rows, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_towers_weights_are_read(
    name: str, saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Files of language weights are gone, and those beside the tower's in a common file are garbage."""
    source, model = saved(name)
    path = tmp_path / "broken"
    shutil.copytree(source, path)
    whole = encoder_of(path).fingerprint
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if all(key.startswith(LANGUAGE) for key in tensors):
            file.unlink()
            continue
        spoilt = {
            key: torch.full_like(tensor, torch.nan) if key.startswith(LANGUAGE) else tensor
            for key, tensor in tensors.items()
        }
        save_file(spoilt, file)
    encoder = encoder_of(path)
    assert encoder.fingerprint == whole
    encoder.load(torch.get_num_threads(), "cpu")
    image = picture(60, 90)
    rows = encoder.forward([encoder.preprocess(item(image))])[0]
    assert torch.equal(rows, plain_rows(name, model, image))


def test_names_of_other_versions_of_transformers_are_found(tmp_path: Path) -> None:
    model = save("qwen2_vl", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"model.{key}" if key.startswith("visual.") else key: t for key, t in load_file(file).items()}
    assert any(key.startswith("model.visual.") for key in tensors)
    save_file(tensors, file)
    encoder = encoder_of(tmp_path)
    encoder.load(torch.get_num_threads(), "cpu")
    image = picture(60, 90)
    rows = encoder.forward([encoder.preprocess(item(image))])[0]
    assert torch.equal(rows, plain_rows("qwen2_vl", model, image))


def test_a_checkpoint_of_a_tower_alone_is_taken(tmp_path: Path) -> None:
    model = save("clip", tmp_path / "whole")
    model.vision_model.save_pretrained(tmp_path / "tower")
    FAMILIES["clip"].processor().save_pretrained(tmp_path / "tower")
    encoder = encoder_of(tmp_path / "tower")
    encoder.load(torch.get_num_threads(), "cpu")
    image = picture(60, 90)
    rows = encoder.forward([encoder.preprocess(item(image))])[0]
    assert torch.equal(rows, plain_rows("clip", model, image))


def test_a_model_computes_in_its_own_dtype_and_rows_are_cast_to_the_one_that_was_asked_for(
    tmp_path: Path,
) -> None:
    model = save("qwen2_5_vl", tmp_path, dtype=torch.bfloat16)
    encoder = encoder_of(tmp_path)
    assert encoder.default_dtype == "bfloat16"
    encoder.load(torch.get_num_threads(), "cpu")
    image = picture(60, 90)
    features = FAMILIES["qwen2_5_vl"].processor()(images=[image], return_tensors="pt")
    features["pixel_values"] = features["pixel_values"].to(torch.bfloat16)
    with torch.inference_mode():
        expected = FAMILIES["qwen2_5_vl"].rows(model, features)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        asked = item(image, str(dtype).removeprefix("torch."))
        rows = encoder.forward([encoder.preprocess(asked)])[0]
        assert rows.dtype == dtype
        assert torch.equal(rows, expected.to(dtype))


def test_the_fingerprint_is_of_the_weights_the_tower_and_the_processor(tmp_path: Path) -> None:
    save("siglip", tmp_path)
    first = encoder_of(tmp_path).fingerprint
    assert encoder_of(tmp_path).fingerprint == first
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.startswith("vision_model."))
    changed = tensors[key].clone()
    changed.view(-1)[0] += 1
    save_file({**tensors, key: changed}, file)
    second = encoder_of(tmp_path).fingerprint
    assert second != first
    save_file(tensors, file)
    assert encoder_of(tmp_path).fingerprint == first
    edit_json(tmp_path / "preprocessor_config.json", image_std=[0.4, 0.5, 0.6])
    assert encoder_of(tmp_path).fingerprint not in (first, second)


def test_a_processor_that_is_saved_with_its_tokenizer_is_found(tmp_path: Path) -> None:
    save("qwen2_vl", tmp_path)
    before = encoder_of(tmp_path).fingerprint
    inner = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    assert encoder_of(tmp_path).fingerprint == before


@pytest.mark.parametrize(
    ("processor", "pixels"),
    [
        ({"min_pixels": 3136, "max_pixels": 12_845_056}, (3136, 12_845_056)),
        ({"size": {"min_pixels": 3136, "max_pixels": 50_000}}, (3136, 50_000)),
        ({"size": {"shortest_edge": 4096, "longest_edge": 60_000}}, (4096, 60_000)),
        ({}, (3136, 1_003_520)),
    ],
)
def test_pixel_limits_are_found_where_checkpoints_of_different_ages_have_them(
    processor: dict[str, Any], pixels: tuple[int, int]
) -> None:
    from epd.encoders.qwen_vl import Qwen2VL

    made = Qwen2VL({"hidden_size": 32}, processor).build_processor()
    assert (made.size["shortest_edge"], made.size["longest_edge"]) == pixels


# -- what is wrong is one line -------------------------------------------------------------------


def no_config(path: Path) -> None:
    (path / "config.json").unlink()


def bad_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def other_model(path: Path) -> None:
    edit_json(path / "config.json", model_type="llama")


def no_processor(path: Path) -> None:
    (path / "preprocessor_config.json").unlink()


def other_processor(path: Path) -> None:
    edit_json(path / "preprocessor_config.json", patch_size=16)


def other_dtype(path: Path) -> None:
    edit_json(path / "config.json", dtype="int8")


def no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def pickled_weights(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def cut_weights(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])


def cut_table(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def huge_table(path: Path) -> None:
    (path / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")


def list_table(path: Path) -> None:
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")


def deep_table(path: Path) -> None:
    deep = b"[" * 50_000
    (path / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)


def odd_offsets(path: Path) -> None:
    table = json.dumps({"visual.a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}).encode()
    (path / "model.safetensors").write_bytes(len(table).to_bytes(8, "little") + table + bytes(4))


def no_tower(path: Path) -> None:
    file = path / "model.safetensors"
    save_file({key: t for key, t in load_file(file).items() if not key.startswith("visual.")}, file)


def outside_index(path: Path) -> None:
    index = {"weight_map": {"visual.patch_embed.proj.weight": "../../etc/passwd"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_shard(path: Path) -> None:
    index = {"weight_map": {"visual.patch_embed.proj.weight": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


WRONG: dict[Callable[[Path], None], str] = {
    no_config: "config.json: No such file",
    bad_config: "not JSON",
    other_model: "model_type 'llama' is not supported, these are: qwen2_vl, qwen2_5_vl, qwen3_vl",
    no_processor: "neither preprocessor_config.json",
    other_processor: "the processor's patch_size is 16, the tower's 14",
    other_dtype: "weights of dtype 'int8', allowed: float32, bfloat16, float16",
    no_weights: "model.safetensors: missing",
    pickled_weights: r"weights only as pickles \(pytorch_model.bin\)",
    cut_weights: "not a whole safetensors file",
    cut_table: "not a whole safetensors file",
    huge_table: "not a whole safetensors file",
    list_table: "not a whole safetensors file",
    deep_table: "not a whole safetensors file",
    odd_offsets: "not a whole safetensors file",
    no_tower: "no weights of a vision tower",
    outside_index: "is no plain file name",
    missing_shard: "model-00001-of-00002.safetensors: missing",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good")
    save("qwen2_vl", path)
    return path


@pytest.mark.parametrize(("spoil", "why"), WRONG.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_checkpoint_is_refused_in_one_line(
    spoil: Callable[[Path], None], why: str, good: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(good, path)
    assert encoder_of(path).fingerprint
    spoil(path)
    with pytest.raises(ConfigError, match=why) as refused:
        load_encoder(str(path))
    assert "\n" not in refused.value.message


def test_missing_weights_are_named_when_the_model_is_loaded(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(good, path)
    file = path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        names: list[str] = opened.keys()
    key = next(name for name in names if name.startswith("visual."))
    save_file({name: tensor for name, tensor in load_file(file).items() if name != key}, file)
    with pytest.raises(ConfigError, match=f"weights of the tower missing: {key.removeprefix('visual.')}"):
        encoder_of(path).load(1, "cpu")


def test_weights_of_another_shape_are_named(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(good, path)
    vision = json.loads((path / "config.json").read_text())["vision_config"]
    edit_json(path / "config.json", vision_config={**vision, "embed_dim": 64})
    with pytest.raises(ConfigError, match=r"is of shape \[.*\], the configuration says \["):
        encoder_of(path).load(1, "cpu")


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a directory with a checkpoint"):
        load_encoder("/no/such/model")
    with pytest.raises(ConfigError, match=r"unknown encoder 'builtin:nothing', allowed: builtin:qwen2-vl, "):
        load_encoder("builtin:nothing")


def test_the_helper_makes_models_of_every_family() -> None:
    assert set(checkpoints.FAMILIES) == {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "clip", "siglip"}
