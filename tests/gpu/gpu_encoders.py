"""Encoders on a GPU, imported by name: a pattern whose every byte is known, and a tower of real size."""

import struct
import time
from typing import Any

import torch

from epd.encoders.base import MediaItem
from epd.encoders.callables import CallableEncoder
from epd.protocol.messages import DType, EmbeddingSpec, Probe
from epd.request import ImageItem

_STAMP = struct.Struct("<d")
_loaded = {"device": "cpu"}
"""Of the encoder of plain functions: where its model is."""


def pattern_item(nbytes: int, nonce: int, kind: bytes = b"device") -> ImageItem:
    """An item that becomes `nbytes` (a multiple of 8) of the pattern of `nonce`.

    `kind` says where the forward leaves it: `device` or `host`.
    """
    import hashlib

    media = kind + b":%d" % nonce
    return ImageItem(f"{nbytes} B", media, Probe("image", nbytes // 4, 1), hashlib.sha256(media).digest())


def pattern(nbytes: int, nonce: int, device: str) -> torch.Tensor:
    """int32: other words in other places, and of other nonces."""
    words = torch.arange(nbytes // 4, dtype=torch.int32, device=device)
    return words.mul_(-1640531535).add_(nonce * 40503 + 1)


def check_pattern(tensor: torch.Tensor, nonce: int) -> bool:
    """Whether every byte behind the stamp is that of the pattern."""
    words = tensor.view(torch.int32).flatten()
    expected = pattern(words.numel() * 4, nonce, str(words.device))
    return bool(torch.equal(words[2:], expected[2:]))


def stamp_s(tensor: torch.Tensor) -> float:
    """When the forward had ended, monotonic seconds of this host."""
    value: float = _STAMP.unpack(tensor.flatten()[:2].view(torch.uint8).cpu().numpy().tobytes())[0]
    return value


def plan(probe: Probe, dtype: DType) -> EmbeddingSpec:
    return EmbeddingSpec(probe.width, 1, "float32")


def load(num_threads: int, device: str) -> None:
    _loaded["device"] = device


def load_on_gpu(num_threads: int, device: str) -> None:
    """Whatever the node's device: what it makes is then copied to the host by the worker."""
    load(num_threads, "cuda:0")
    pattern(1 << 20, 0, _loaded["device"])


def preprocess(item: MediaItem) -> tuple[int, int, bytes]:
    kind, _, nonce = bytes(item.media).partition(b":")
    return item.probe.width * 4, int(nonce), kind


def forward(batch: list[tuple[int, int, bytes]]) -> list[torch.Tensor]:
    results = []
    for nbytes, nonce, kind in batch:
        made = pattern(nbytes, nonce, _loaded["device"])
        if kind == b"host":
            made = made.cpu()
        elif _loaded["device"] != "cpu":
            torch.cuda.current_stream().synchronize()
        stamp = torch.frombuffer(bytearray(_STAMP.pack(time.monotonic())), dtype=torch.int32)
        made[:2].copy_(stamp)
        results.append(made.view(torch.float32).view(-1, 1))
    return results


def _encoder(name: str, load: Any) -> CallableEncoder:
    return CallableEncoder(
        name=name,
        fingerprint="pattern:1",
        default_dtype="float32",
        plan=plan,
        preprocess=preprocess,
        forward=forward,
        load=load,
    )


PATTERN = _encoder("pattern", load)
STAGED = _encoder("pattern-staged", load_on_gpu)


class Tower:
    """The vision tower of Qwen2.5-VL-7B with seeded random weights; an item is a grid of patches,
    `width` x `height` pixels, multiples of 28, filled from a seed."""

    name = "tower"
    fingerprint = "qwen2.5-vl-7b:seeded"
    default_dtype: DType = "bfloat16"
    DIM = 3584

    def plan(self, probe: Probe, dtype: DType) -> EmbeddingSpec:
        return EmbeddingSpec(probe.width * probe.height // 784, self.DIM, dtype)

    def load(self, num_threads: int, device: str) -> None:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        config = Qwen2_5_VLVisionConfig(
            depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, out_hidden_size=self.DIM
        )
        tower: Any = Qwen2_5_VisionTransformerPretrainedModel
        torch.manual_seed(0)
        with torch.device(device):
            self._tower = tower._from_config(config, dtype=torch.bfloat16).eval()
        self._device = device

    def preprocess(self, item: MediaItem) -> tuple[torch.Tensor, torch.Tensor]:
        high, wide = item.probe.height // 14, item.probe.width // 14
        seed = int.from_bytes(bytes(item.media)[-8:], "little") % (1 << 62)
        generator = torch.Generator().manual_seed(seed)
        patches = torch.randn(high * wide, 1176, generator=generator).to(torch.bfloat16)
        return patches, torch.tensor([[1, high, wide]])

    def forward(self, batch: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        results = []
        with torch.inference_mode():
            for patches, grid in batch:
                output = self._tower(patches.to(self._device), grid_thw=grid.to(self._device))
                rows = getattr(output, "pooler_output", output)
                results.append(rows)
        return results


TOWER = Tower


def tower_item(width: int, height: int, seed: int) -> ImageItem:
    import hashlib

    media = b"tower:" + seed.to_bytes(8, "little")
    return ImageItem(
        f"{width}x{height}", media, Probe("image", width, height), hashlib.sha256(media).digest()
    )
