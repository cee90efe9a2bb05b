"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one row for each block of merged patches, as many as the size gives.

Qwen3-VL's rows are wide: beside the merged hidden state they hold one feature per DeepStack layer, which
its language model adds to its first layers' hidden states. The order in a row is that of
`[pooler_output, *deepstack_features]`, each of `out_hidden_size`; so `row.split(out_hidden_size, dim=-1)`
gives them back. SGLang and vLLM lay a row out in the same way.
"""

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from epd.encoders.towers import Pixels, Tower, positive
from epd.protocol.errors import ConfigError, MediaMismatch
from epd.protocol.messages import AuxTensor, DType, EmbeddingSpec

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

_PROCESSOR_KEYS: Final = (
    *("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor"),
    *("do_resize", "do_rescale", "do_normalize", "resample"),
)
_DEFAULT_SIZE: Final = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


class _QwenVL(Tower):
    prefixes = ("visual.", "model.visual.")
    patch_size: ClassVar[int] = 14
    out_key: ClassVar[str] = "out_hidden_size"

    def __init__(self, vision: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(vision, processor)
        self._patch = positive(vision, "patch_size", self.patch_size)
        self._merge = positive(vision, "spatial_merge_size", 2)
        self._dim = positive(vision, self.out_key)
        self._min_pixels, self._max_pixels = _pixels(processor)
        for key, expected in (("patch_size", self._patch), ("merge_size", self._merge)):
            if processor.get(key, expected) != expected:
                message = f"model: the processor's {key} is {processor[key]!r}, the tower's {expected}"
                raise ConfigError(message, key="model")
        if processor.get("do_resize", True) is not True:
            raise ConfigError("model: a processor that does not resize is not supported", key="model")

    def plan(self, width: int, height: int, dtype: DType) -> EmbeddingSpec:
        """`aux` is `grid_thw`, int64 of shape (1, 3), in patches."""
        factor = self._patch * self._merge
        wide, high = smart_resize(width, height, factor, self._min_pixels, self._max_pixels)
        grid = struct.pack("<3q", 1, high // self._patch, wide // self._patch)
        rows = wide * high // factor**2
        return EmbeddingSpec(rows, self._dim, dtype, (AuxTensor("grid_thw", "int64", (1, 3), grid),))

    def build_processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        given = {key: self.processor[key] for key in _PROCESSOR_KEYS if key in self.processor}
        sizes = {"patch_size": self._patch, "merge_size": self._merge}
        size = {"shortest_edge": self._min_pixels, "longest_edge": self._max_pixels}
        return Qwen2VLImageProcessorPil(**{**given, **sizes, "size": size})

    def prepare(self, processor: Any, image: "Image", spec: EmbeddingSpec) -> Pixels:
        # Always a PIL image: arrays of height 1 or 3 would be taken for channels first.
        features = processor(images=[image], return_tensors="pt")
        grid = features["image_grid_thw"]
        if struct.pack("<3q", *grid[0].tolist()) != spec.aux[0].data:
            planned = struct.unpack("<3q", spec.aux[0].data)
            raise MediaMismatch(f"a grid of {planned} announced, the processor made {grid[0].tolist()}")
        return Pixels(features["pixel_values"], spec, grid)

    def run(self, tower: Any, batch: list[Pixels], device: str) -> "list[torch.Tensor]":
        import torch

        patches = torch.cat([pixels.values for pixels in batch]).to(device, tower.dtype)
        grids = torch.cat([pixels.grid_thw for pixels in batch if pixels.grid_thw is not None]).to(device)
        wide: Any = self._rows(tower(patches, grid_thw=grids))
        expected = sum(pixels.spec.rows for pixels in batch)
        if len(wide) != expected:
            raise MediaMismatch(f"{expected} rows announced, the tower made {tuple(wide.shape)}")
        return list(wide.split([pixels.spec.rows for pixels in batch]))

    def _rows(self, output: Any) -> "torch.Tensor":
        rows: torch.Tensor = output.pooler_output
        return rows


class Qwen2VL(_QwenVL):
    model_types = ("qwen2_vl",)
    out_key = "hidden_size"

    def build(self, dtype: "torch.dtype") -> Any:
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        tower: Any = Qwen2VisionTransformerPretrainedModel
        return tower._from_config(Qwen2VLVisionConfig(**self.vision), dtype=dtype)


class Qwen25VL(_QwenVL):
    model_types = ("qwen2_5_vl",)

    def build(self, dtype: "torch.dtype") -> Any:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        tower: Any = Qwen2_5_VisionTransformerPretrainedModel
        return tower._from_config(Qwen2_5_VLVisionConfig(**self.vision), dtype=dtype)


class Qwen3VL(_QwenVL):
    model_types = ("qwen3_vl", "qwen3_vl_moe")
    patch_size = 16

    def __init__(self, vision: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(vision, processor)
        layers = vision.get("deepstack_visual_indexes", ())
        if not isinstance(layers, list | tuple):
            message = f"model: deepstack_visual_indexes is {layers!r}, a list is expected"
            raise ConfigError(message, key="model")
        self._dim *= 1 + len(layers)

    def build(self, dtype: "torch.dtype") -> Any:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        tower: Any = Qwen3VLVisionModel
        vision = {**self.vision, "model_type": "qwen3_vl_vision"}  # the mixture of experts has the same tower
        return tower._from_config(Qwen3VLVisionConfig(**vision), dtype=dtype)

    def _rows(self, output: Any) -> "torch.Tensor":
        import torch

        return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)


def smart_resize(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Width and height, in pixels, that the image processor scales a picture to: multiples of `factor`.

    The same arithmetic as the processor's own (`smart_resize` of transformers), so that sizes are known
    before it is imported.
    """
    wide = round(width / factor) * factor
    high = round(height / factor) * factor
    if wide * high > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
        high = max(factor, math.floor(height / shrink / factor) * factor)
    elif wide * high < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        wide = math.ceil(width * grow / factor) * factor
        high = math.ceil(height * grow / factor) * factor
    return wide, high


def _pixels(processor: Mapping[str, Any]) -> tuple[int, int]:
    """Least and most pixels: checkpoints of different ages say them in different places."""
    size = processor.get("size")
    size = dict(size) if isinstance(size, Mapping) else {}
    least = size.get("shortest_edge", size.get("min_pixels", _DEFAULT_SIZE["shortest_edge"]))
    most = size.get("longest_edge", size.get("max_pixels", _DEFAULT_SIZE["longest_edge"]))
    given = {
        "min_pixels": processor.get("min_pixels") or least,
        "max_pixels": processor.get("max_pixels") or most,
    }
    return positive(given, "min_pixels"), positive(given, "max_pixels")
