"""An encoder of one's own: the mean colour of a picture, one row of three numbers.

PYTHONPATH=examples .venv/bin/epd-node --role encoder --model callable:mean_colour:ENCODER
"""

from typing import TYPE_CHECKING, Any

from epd.encoders.base import MediaItem
from epd.encoders.callables import CallableEncoder
from epd.encoders.media import open_image
from epd.protocol.messages import DType, EmbeddingSpec, Probe

if TYPE_CHECKING:
    import torch


def plan(probe: Probe, dtype: DType) -> EmbeddingSpec:
    """One row of three, whatever the picture."""
    return EmbeddingSpec(rows=1, dim=3, dtype=dtype)


def preprocess(item: MediaItem) -> Any:
    return open_image(item.media, rules=item.rules), item.dtype


def forward(batch: list[Any]) -> "list[torch.Tensor]":
    import torch  # in here: the node imports this module too, and has no use for torch

    tensors = []
    for image, dtype in batch:
        pixel = image.resize((1, 1)).getpixel((0, 0))
        tensors.append(torch.tensor([pixel], dtype=getattr(torch, dtype)))
    return tensors


ENCODER = CallableEncoder(
    name="mean-colour",
    fingerprint="mean-colour-1",
    default_dtype="float32",
    plan=plan,
    preprocess=preprocess,
    forward=forward,
)
