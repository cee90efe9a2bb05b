"""CLIP and SigLIP: every picture is scaled to one size, so every embedding has the same number of rows.

A row is the last hidden state of a patch, as `last_hidden_state` of transformers' vision model: CLIP has one
more row, the class token's, before the patches', and its rows come before the final layer norm (which is
for the pooled output); SigLIP's come after it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from epd.encoders.towers import Pixels, Tower, positive
from epd.protocol.errors import ConfigError, MediaMismatch
from epd.protocol.messages import DType, EmbeddingSpec

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

_PROCESSOR_KEYS: Final = (
    *("size", "crop_size", "image_mean", "image_std", "rescale_factor", "resample"),
    *("do_resize", "do_center_crop", "do_rescale", "do_normalize"),
)


class _FixedRows(Tower):
    prefixes = ("vision_model.", "model.vision_model.", "")
    class_tokens: ClassVar[int] = 0

    def __init__(self, vision: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(vision, processor)
        self._side = positive(vision, "image_size", 224)
        patch = positive(vision, "patch_size", 32 if self.class_tokens else 16)
        self._rows = (self._side // patch) ** 2 + self.class_tokens
        self._dim = positive(vision, "hidden_size", 768)
        made = self._output_side()
        if made != (self._side, self._side):
            message = (
                f"model: the processor makes {made[0]}x{made[1]}, the tower takes {self._side}x{self._side}"
            )
            raise ConfigError(message, key="model")

    def _output_side(self) -> tuple[Any, Any]:
        given = self.processor.get("size", self._side)
        if self.processor.get("do_center_crop", self.class_tokens > 0):
            given = self.processor.get("crop_size", self._side)
        if isinstance(given, Mapping):
            return given.get("width"), given.get("height")
        return given, given

    def plan(self, width: int, height: int, dtype: DType) -> EmbeddingSpec:
        return EmbeddingSpec(self._rows, self._dim, dtype)

    def _processor_arguments(self) -> dict[str, Any]:
        return {key: self.processor[key] for key in _PROCESSOR_KEYS if key in self.processor}

    def prepare(self, processor: Any, image: "Image", spec: EmbeddingSpec) -> Pixels:
        # Always a PIL image: arrays with a side of 1 or 3 would be taken for channels first.
        values = processor(images=[image], return_tensors="pt")["pixel_values"]
        if tuple(values.shape) != (1, 3, self._side, self._side):
            raise MediaMismatch(f"pixels of {self._side}x{self._side} expected, made {tuple(values.shape)}")
        return Pixels(values, spec)

    def run(self, tower: Any, batch: list[Pixels], device: str) -> "list[torch.Tensor]":
        import torch

        values = torch.cat([pixels.values for pixels in batch]).to(device, tower.dtype)
        return list(tower(pixel_values=values).last_hidden_state)


class Clip(_FixedRows):
    model_types = ("clip", "clip_vision_model")
    class_tokens = 1

    def build(self, dtype: "torch.dtype") -> Any:
        from transformers.models.clip.configuration_clip import CLIPVisionConfig
        from transformers.models.clip.modeling_clip import CLIPVisionModel

        model: Any = CLIPVisionModel
        return model._from_config(CLIPVisionConfig(**self.vision), dtype=dtype)

    def build_processor(self) -> Any:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil(**self._processor_arguments())


class Siglip(_FixedRows):
    model_types = ("siglip", "siglip_vision_model")

    def build(self, dtype: "torch.dtype") -> Any:
        from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
        from transformers.models.siglip.modeling_siglip import SiglipVisionModel

        model: Any = SiglipVisionModel
        # The head makes the pooled output, which nobody reads here.
        return model._from_config(
            SiglipVisionConfig(**{**self.vision, "vision_use_head": False}), dtype=dtype
        )

    def build_processor(self) -> Any:
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        return SiglipImageProcessorPil(**self._processor_arguments())
