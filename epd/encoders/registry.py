"""From the name of an encoder, as configured, to the encoder; the same in node and worker."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from epd.encoders import callables
from epd.encoders.base import Encoder
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.fixed_rows import Clip, Siglip
from epd.encoders.qwen_vl import Qwen2VL, Qwen3VL, Qwen25VL
from epd.encoders.towers import Tower, TowerEncoder, tower_dtype
from epd.protocol.errors import ConfigError

_FAMILIES: Final[Mapping[str, type[Tower]]] = {
    model_type: family
    for family in (Qwen2VL, Qwen25VL, Qwen3VL, Clip, Siglip)
    for model_type in family.model_types
}


class _Builtin(NamedTuple):
    """A small tower with seeded weights: nothing is downloaded."""

    family: type[Tower]
    vision: Mapping[str, Any]
    processor: Mapping[str, Any]


_QWEN_PIXELS: Final = {"size": {"shortest_edge": 3_136, "longest_edge": 1_003_520}}
_QWEN3_PIXELS: Final = {"size": {"shortest_edge": 4_096, "longest_edge": 1_003_520}, "patch_size": 16}
_SMALL: Final = {"depth": 2, "hidden_size": 64, "out_hidden_size": 128, "num_heads": 4}
_FIXED: Final = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128, "image_size": 224}
_HALF: Final = [0.5, 0.5, 0.5]

BUILTIN: Final[Mapping[str, _Builtin]] = MappingProxyType(
    {
        "builtin:qwen2-vl": _Builtin(
            Qwen2VL, {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 4}, _QWEN_PIXELS
        ),
        "builtin:qwen2.5-vl": _Builtin(
            Qwen25VL, {**_SMALL, "intermediate_size": 128, "fullatt_block_indexes": [1]}, _QWEN_PIXELS
        ),
        "builtin:qwen3-vl": _Builtin(
            Qwen3VL,
            {**_SMALL, "depth": 3, "intermediate_size": 128, "deepstack_visual_indexes": [0, 1]},
            {**_QWEN3_PIXELS, "image_mean": _HALF, "image_std": _HALF},
        ),
        "builtin:clip": _Builtin(
            Clip,
            {**_FIXED, "intermediate_size": 256, "patch_size": 14},
            {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}},
        ),
        "builtin:siglip": _Builtin(
            Siglip,
            {**_FIXED, "intermediate_size": 256, "patch_size": 14},
            {"size": {"height": 224, "width": 224}, "image_mean": _HALF, "image_std": _HALF},
        ),
    }
)


def load_encoder(spec: str) -> Encoder:
    """Construct the encoder that `spec` names; imports no torch of its own, loads no model.

    `builtin:NAME`, `callable:package.module:attribute`, or the path of a checkpoint directory. Raises
    `ConfigError` with what is allowed.
    """
    if spec.startswith(callables.PREFIX):
        return callables.import_encoder(spec)
    if spec in BUILTIN:
        chosen = BUILTIN[spec]
        return TowerEncoder(spec, chosen.family(chosen.vision, chosen.processor))
    if spec and not spec.startswith("builtin:") and ("/" in spec or Path(spec).exists()):
        return _from_checkpoint(spec, Checkpoint(Path(spec)))
    allowed = ", ".join((*BUILTIN, f"{callables.PREFIX}package.module:attribute", "a checkpoint directory"))
    raise ConfigError(f"model: unknown encoder {spec!r}, allowed: {allowed}", key="model", given=spec)


def _from_checkpoint(spec: str, checkpoint: Checkpoint) -> TowerEncoder:
    family = _FAMILIES.get(checkpoint.model_type)
    if family is None:
        known = ", ".join(_FAMILIES)
        message = f"model: {spec}: model_type {checkpoint.model_type!r} is not supported, these are: {known}"
        raise ConfigError(message, key="model", given=spec)
    tower = family(checkpoint.vision, checkpoint.processor())
    encoder = TowerEncoder(spec, tower, dtype=tower_dtype(checkpoint.config), checkpoint=checkpoint)
    _ = encoder.fingerprint  # reads the weights once: what is damaged or missing is said now
    return encoder
