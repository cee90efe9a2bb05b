"""Small checkpoints of whole vision-language models, as `save_pretrained` writes them, and what transformers
itself makes of a picture with each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 200,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL_TEXT: dict[str, Any] = {key: _TEXT[key] for key in _TEXT if key != "num_key_value_heads"}
_QWEN: dict[str, Any] = {"hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
_FIXED: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 56,
    "patch_size": 14,
}


class Family(NamedTuple):
    """How to make a model, its processor, and its rows by plain transformers."""

    model: Callable[[], Any]
    processor: Callable[[], Any]
    rows: Callable[[Any, Any], torch.Tensor]


def _qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    config = transformers.Qwen2VLConfig(text_config=_TEXT, vision_config=vision)
    return transformers.Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl() -> Any:
    vision = {**_QWEN, "depth": 2, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(text_config=_TEXT, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl() -> Any:
    vision = {**_QWEN, "depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    config = transformers.Qwen3VLConfig(text_config={**_TEXT, "head_dim": 16}, vision_config=vision)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _clip() -> Any:
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=_SMALL_TEXT, vision_config=_FIXED))


def _siglip() -> Any:
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=_SMALL_TEXT, vision_config=_FIXED))


def _merged(model: Any, features: Any) -> torch.Tensor:
    rows: torch.Tensor = model.model.visual(
        features["pixel_values"], grid_thw=features["image_grid_thw"]
    ).pooler_output
    return rows


def _wide(model: Any, features: Any) -> torch.Tensor:
    """As that model's language side is given them: the merged rows, and one feature a DeepStack layer."""
    output = model.model.visual(features["pixel_values"], grid_thw=features["image_grid_thw"])
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)


def _last_hidden_state(model: Any, features: Any) -> torch.Tensor:
    rows: torch.Tensor = model.vision_model(pixel_values=features["pixel_values"]).last_hidden_state[0]
    return rows


def _qwen3_processor() -> Any:
    size = {"shortest_edge": 4096, "longest_edge": 200_000}
    half = [0.5, 0.5, 0.5]
    return Qwen2VLImageProcessorPil(size=size, patch_size=16, image_mean=half, image_std=half)


def _qwen_processor() -> Any:
    return Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 200_000})


FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(_qwen2_vl, _qwen_processor, _merged),
    "qwen2_5_vl": Family(_qwen2_5_vl, _qwen_processor, _merged),
    "qwen3_vl": Family(_qwen3_vl, _qwen3_processor, _wide),
    "clip": Family(
        _clip,
        lambda: CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        _last_hidden_state,
    ),
    "siglip": Family(
        _siglip, lambda: SiglipImageProcessorPil(size={"height": 56, "width": 56}), _last_hidden_state
    ),
}


def save(name: str, path: Path, *, shard_size: str = "5GB", dtype: Any = torch.float32) -> Any:
    """A checkpoint with random weights (of a seed) in `path`; the model."""
    torch.manual_seed(11)
    model = FAMILIES[name].model().to(dtype).eval()
    model.save_pretrained(path, max_shard_size=shard_size)
    FAMILIES[name].processor().save_pretrained(path)
    return model


def plain_rows(name: str, model: Any, image: Image.Image) -> torch.Tensor:
    """What transformers alone makes of a picture."""
    features = FAMILIES[name].processor()(images=[image], return_tensors="pt")
    with torch.inference_mode():
        return FAMILIES[name].rows(model, features)


def edit_json(path: Path, **changes: Any) -> None:
    table = json.loads(path.read_text())
    table.update(changes)
    path.write_text(json.dumps(table))
