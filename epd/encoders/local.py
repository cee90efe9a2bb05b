"""Encoding and saving in the caller's own process: what tools compare with, and write."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from epd.encoders.base import MediaItem
from epd.encoders.registry import load_encoder
from epd.protocol.messages import EmbeddingSpec


def encode_locally(model: str, items: Sequence[MediaItem], num_threads: int) -> list[bytes]:
    """SHA-256 of the embedding of each item: one item a batch, as a worker with so many threads does."""
    import torch

    encoder = load_encoder(model)
    encoder.load(num_threads, "cpu")
    digests = []
    for item in items:
        (tensor,) = encoder.forward([encoder.preprocess(item)])
        payload = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        digests.append(hashlib.sha256(payload.data).digest())
    return digests


def save_embedding(path: str | os.PathLike[str], spec: EmbeddingSpec, rows: bytes) -> None:
    """Write `embedding` and the aux tensors of one item as a safetensors file. Raises `OSError`."""
    import torch
    from safetensors.torch import save

    def tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        kind = getattr(torch, dtype)
        flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
        return flat.view(shape)

    tensors = {aux.name: tensor(aux.data, aux.dtype, aux.shape) for aux in spec.aux}
    tensors["embedding"] = tensor(rows, spec.dtype, (spec.rows, spec.dim))
    Path(path).write_bytes(save(tensors))
