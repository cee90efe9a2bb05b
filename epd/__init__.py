"""epd: the embedding transfer layer for disaggregated multimodal LLM serving."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epd.node import EncoderNode, PrefillNode
    from epd.receiver import EmbeddingReceiver
    from epd.request import Delivery, EmbeddingRequest, ImageItem

__all__ = ["Delivery", "EmbeddingReceiver", "EmbeddingRequest", "EncoderNode", "ImageItem", "PrefillNode"]

_HOMES = {
    "Delivery": "epd.request",
    "EmbeddingReceiver": "epd.receiver",
    "EmbeddingRequest": "epd.request",
    "EncoderNode": "epd.node",
    "ImageItem": "epd.request",
    "PrefillNode": "epd.node",
}


def __getattr__(name: str) -> Any:
    """Imported at first use: a tool that only needs the protocol pays for nothing else."""
    import importlib

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'epd' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
