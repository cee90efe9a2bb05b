"""`builtin:qwen2-vl`: the Qwen2-VL vision tower of transformers, small, with seeded weights.

The real architecture and the real image processor, so that grids, rows and bytes behave as with
a downloaded model, without a model hub. The node's half (`plan`, `fingerprint`) imports neither
torch nor transformers; the worker's half imports both in `load`.
"""

import hashlib
import importlib.metadata
import json
import math
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from epd.encoders.base import MediaItem
from epd.encoders.media import open_image
from epd.protocol.errors import ConfigError, MediaInvalid, MediaMismatch, UnsupportedItem
from epd.protocol.messages import AuxTensor, DType, EmbeddingSpec, Probe

if TYPE_CHECKING:
    import torch

PATCH: Final = 14
MERGE: Final = 2
FACTOR: Final = PATCH * MERGE
"""Sides become multiples of this; one row of the embedding covers `FACTOR` x `FACTOR` pixels."""
MIN_RESIZED_PIXELS: Final = 3_136
MAX_RESIZED_PIXELS: Final = 1_003_520
MAX_RATIO: Final = 200
DIM: Final = 128

_CONFIG: Final[dict[str, Any]] = {"depth": 2, "embed_dim": 64, "hidden_size": DIM, "num_heads": 4}
_SEED: Final = 0
_REVISION: Final = 1
"""Raise it when the code here changes what comes out: it is part of the fingerprint."""
_LIBRARIES: Final = ("torch", "transformers", "pillow", "numpy")


def smart_resize(width: int, height: int) -> tuple[int, int]:
    """Width and height, in pixels, that the image processor scales a picture to.

    The same arithmetic as the processor's own, so that sizes are known before it is imported.
    Raises `UnsupportedItem` if one side is more than `MAX_RATIO` times the other.
    """
    if max(width, height) / min(width, height) > MAX_RATIO:
        raise UnsupportedItem(f"{width}x{height}: one side may be {MAX_RATIO} times the other at most")
    wide = round(width / FACTOR) * FACTOR
    high = round(height / FACTOR) * FACTOR
    if wide * high > MAX_RESIZED_PIXELS:
        shrink = math.sqrt((height * width) / MAX_RESIZED_PIXELS)
        wide = max(FACTOR, math.floor(width / shrink / FACTOR) * FACTOR)
        high = max(FACTOR, math.floor(height / shrink / FACTOR) * FACTOR)
    elif wide * high < MIN_RESIZED_PIXELS:
        grow = math.sqrt(MIN_RESIZED_PIXELS / (height * width))
        wide = math.ceil(width * grow / FACTOR) * FACTOR
        high = math.ceil(height * grow / FACTOR) * FACTOR
    return wide, high


class Pixels(NamedTuple):
    """One preprocessed picture: its patches, its grid (1 x 3), and what it will become."""

    patches: "torch.Tensor"
    grid_thw: "torch.Tensor"
    spec: EmbeddingSpec


class Qwen2VLEncoder:
    """An `Encoder` of one picture per item, at most `MAX_RESIZED_PIXELS` each.

    The tower computes in float32; bfloat16 and float16 are its rows, rounded.
    """

    name = "builtin:qwen2-vl"
    default_dtype: DType = "float32"

    def __init__(self) -> None:
        self.fingerprint = _fingerprint()
        self._tower: Any = None
        self._processor: Any = None
        self._device = "cpu"

    def plan(self, probe: Probe, dtype: DType) -> EmbeddingSpec:
        """See `Encoder.plan`; `aux` is `grid_thw`, int64 of shape (1, 3), in patches."""
        if probe.kind != "image":
            raise UnsupportedItem(f"{self.name} takes images, this is of kind {probe.kind}")
        if probe.width < 1 or probe.height < 1:
            raise MediaInvalid(f"a picture of {probe.width}x{probe.height} pixels")
        wide, high = smart_resize(probe.width, probe.height)
        grid = struct.pack("<3q", 1, high // PATCH, wide // PATCH)
        rows = wide * high // FACTOR**2
        return EmbeddingSpec(rows, DIM, dtype, (AuxTensor("grid_thw", "int64", (1, 3), grid),))

    def load(self, num_threads: int, device: str) -> None:
        """Build tower and processor, and set the process's torch threads. Takes seconds."""
        import torch
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        torch.set_num_threads(num_threads)
        tower: Any = Qwen2VisionTransformerPretrainedModel
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers are its own
            torch.manual_seed(_SEED)
            built = tower._from_config(Qwen2VLVisionConfig(**_CONFIG), dtype=torch.float32).eval()
        self._tower = built.to(device)
        self._device = device
        self._processor = Qwen2VLImageProcessorPil(
            size={"shortest_edge": MIN_RESIZED_PIXELS, "longest_edge": MAX_RESIZED_PIXELS}
        )

    def preprocess(self, item: MediaItem) -> Pixels:
        """See `Encoder.preprocess`."""
        image = open_image(item.media, rules=item.rules)
        probe = item.probe
        if image.size != (probe.width, probe.height):
            raise MediaMismatch(f"{probe.width}x{probe.height} announced, the picture is {image.size}")
        spec = self.plan(probe, item.dtype)
        # Always a PIL image: arrays of height 1 or 3 would be taken for channels first.
        features = self._processor(images=[image], return_tensors="pt")
        grid = features["image_grid_thw"]
        if struct.pack("<3q", *grid[0].tolist()) != spec.aux[0].data:
            planned = struct.unpack("<3q", spec.aux[0].data)
            raise MediaMismatch(f"a grid of {planned} announced, the processor made {grid[0].tolist()}")
        return Pixels(features["pixel_values"], grid, spec)

    def forward(self, batch: list[Pixels]) -> "list[torch.Tensor]":
        """See `Encoder.forward`. Rows differ bitwise between batch sizes, as of any matrix product."""
        import torch

        with torch.inference_mode():
            patches = torch.cat([pixels.patches for pixels in batch]).to(self._device)
            grids = torch.cat([pixels.grid_thw for pixels in batch]).to(self._device)
            merged = self._tower(patches, grid_thw=grids).pooler_output
            rows = [pixels.spec.rows for pixels in batch]
            if tuple(merged.shape) != (sum(rows), DIM):
                raise MediaMismatch(f"{sum(rows)}x{DIM} announced, the tower made {tuple(merged.shape)}")
            return [
                part.to(getattr(torch, pixels.spec.dtype))
                for part, pixels in zip(merged.split(rows), batch, strict=True)
            ]


def _fingerprint() -> str:
    """Of everything that decides the bytes. Raises `ConfigError` if a library is missing."""
    try:
        versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    except importlib.metadata.PackageNotFoundError as error:
        message = f"model: {Qwen2VLEncoder.name} needs {error.name}: install the extra `hf`"
        raise ConfigError(message, key="model") from None
    facts = {
        "name": Qwen2VLEncoder.name,
        "revision": _REVISION,
        "config": _CONFIG,
        "seed": _SEED,
        "pixels": [MIN_RESIZED_PIXELS, MAX_RESIZED_PIXELS],
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
