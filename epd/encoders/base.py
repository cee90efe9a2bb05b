"""How an encoder plugs in: one small protocol in two halves.

`plan` and `fingerprint` run in the node: no torch, no model, microseconds. `load`, `preprocess`
and `forward` run in the forward worker. An encoder is constructed in both; `load` builds the model.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from epd.encoders.media import DEFAULT_RULES, PictureRules
from epd.protocol.messages import DType, EmbeddingSpec, Probe

if TYPE_CHECKING:
    import torch


class MediaItem(NamedTuple):
    """What `preprocess` gets: the probe that was announced and the media bytes."""

    probe: Probe
    media: memoryview
    dtype: DType
    rules: PictureRules = DEFAULT_RULES
    """Of the node's configuration: for `open_image`."""


class Encoder(Protocol):
    name: str
    default_dtype: DType

    @property
    def fingerprint(self) -> str:
        """Model, configuration, weights, processor: equal if and only if the embeddings are."""
        ...

    def plan(self, probe: Probe, dtype: DType) -> EmbeddingSpec:
        """Rows, dim, dtype and aux tensors of an item, from its probe alone.

        Raises `UnsupportedItem` or `MediaInvalid`, with the reason for people.
        """
        ...

    def load(self, num_threads: int, device: str) -> None:
        """Build the model (worker only) on `device`: `cpu` or `cuda:N`, N as this process counts."""
        ...

    def preprocess(self, item: MediaItem) -> Any:
        """Decode and normalise one item. Raises `MediaInvalid` or `MediaMismatch` (probe differs)."""
        ...

    def forward(self, batch: list[Any]) -> "list[torch.Tensor]":
        """One tensor of `rows x dim` per preprocessed item, in order, of the dtype planned.

        Each on any device. On a GPU a stream of the worker's own is current: what is queued on other
        streams must be joined to it before this returns.
        """
        ...
