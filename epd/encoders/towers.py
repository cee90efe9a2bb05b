"""Vision towers of transformers as encoders: what all families share.

The node's half (`plan`, `fingerprint`) imports neither torch nor transformers: it is arithmetic on the
model's own configuration. The worker's half builds the tower, with seeded weights (`builtin:`) or those
of a checkpoint. The real architectures and the real image processors (in their Pillow form), so that
grids, rows and bytes are transformers' own.
"""

import functools
import hashlib
import importlib.metadata
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from epd.encoders.base import MediaItem
from epd.encoders.checkpoint import Checkpoint
from epd.encoders.media import open_image
from epd.protocol.errors import ConfigError, MediaInvalid, MediaMismatch, UnsupportedItem
from epd.protocol.messages import DType, EmbeddingSpec, Probe

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

MAX_RATIO: Final = 200
"""One side of a picture may be so many times the other: the limit of Qwen's own processor. For the others
it bounds what scaling takes: they scale the shorter side to a fixed length first."""
_SEED: Final = 0
_REVISION: Final = 2
"""Raise it when the code here changes what comes out: it is part of the fingerprint."""
_LIBRARIES: Final = ("torch", "transformers", "pillow", "numpy")
_DTYPES: Final[Mapping[str, DType]] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}


class Pixels(NamedTuple):
    """One preprocessed picture, and what it will become. `grid_thw` (1 x 3) of towers that need it."""

    values: "torch.Tensor"
    spec: EmbeddingSpec
    grid_thw: "torch.Tensor | None" = None


class Tower(ABC):
    """One family: an architecture and its processor, by the two configurations of a checkpoint.

    Raises `ConfigError` when it is constructed, if they are not of its kind.
    """

    model_types: ClassVar[tuple[str, ...]]
    """`model_type` of the checkpoints it takes."""
    prefixes: ClassVar[tuple[str, ...]]
    """Where its weights stand in a checkpoint; names have changed between versions of transformers."""

    def __init__(self, vision: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.vision = vision
        self.processor = processor

    @abstractmethod
    def plan(self, width: int, height: int, dtype: DType) -> EmbeddingSpec:
        """Rows, dim and aux tensors of a picture of so many pixels, its ratio already checked."""

    @abstractmethod
    def build(self, dtype: "torch.dtype") -> Any:
        """The tower with weights from torch's random numbers, on the CPU, for evaluation."""

    @abstractmethod
    def build_processor(self) -> Any: ...

    @abstractmethod
    def prepare(self, processor: Any, image: "Image", spec: EmbeddingSpec) -> Pixels:
        """Raises `MediaMismatch` if the processor makes something else than was planned."""

    @abstractmethod
    def run(self, tower: Any, batch: list[Pixels], device: str) -> "list[torch.Tensor]":
        """One tensor of rows x dim per picture, in the tower's dtype."""


class TowerEncoder:
    """An `Encoder` of one picture per item.

    The tower computes in its own dtype (`default_dtype`; float16 on a CPU in float32); rows of another
    dtype are its rows, rounded or widened.
    """

    def __init__(
        self, name: str, tower: Tower, *, dtype: DType = "float32", checkpoint: Checkpoint | None = None
    ) -> None:
        self.name = name
        self.default_dtype: DType = dtype
        self._family = tower
        self._checkpoint = checkpoint
        self._model: Any = None
        self._processor: Any = None
        self._device = "cpu"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of everything that decides the bytes, the weights included. Raises `ConfigError` if a library is
        missing or a weight file damaged."""
        try:
            versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
        except importlib.metadata.PackageNotFoundError as error:
            message = f"model: {self.name} needs {error.name}: install the extra `hf`"
            raise ConfigError(message, key="model") from None
        facts = {
            "family": type(self._family).__name__,
            "revision": _REVISION,
            "vision": dict(self._family.vision),
            "processor": dict(self._family.processor),
            "dtype": self.default_dtype,
            "weights": self._checkpoint.digest(self._family.prefixes) if self._checkpoint else _SEED,
            "versions": versions,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def plan(self, probe: Probe, dtype: DType) -> EmbeddingSpec:
        """See `Encoder.plan`."""
        if probe.kind != "image":
            raise UnsupportedItem(f"{self.name} takes images, this is of kind {probe.kind}")
        width, height = probe.width, probe.height
        if width < 1 or height < 1:
            raise MediaInvalid(f"a picture of {width}x{height} pixels")
        if max(width, height) > MAX_RATIO * min(width, height):
            raise UnsupportedItem(f"{width}x{height}: one side may be {MAX_RATIO} times the other at most")
        return self._family.plan(width, height, dtype)

    def load(self, num_threads: int, device: str) -> None:
        """Build tower and processor, and set the process's torch threads. Takes seconds."""
        import torch

        torch.set_num_threads(num_threads)
        dtype = getattr(torch, self.default_dtype)
        if dtype == torch.float16 and device == "cpu":
            dtype = torch.float32
        if self._checkpoint is None:
            with torch.random.fork_rng(devices=[]):  # the caller's random numbers are its own
                torch.manual_seed(_SEED)
                model = self._family.build(dtype)
        else:
            from transformers.initialization import no_init_weights

            with no_init_weights():
                model = self._family.build(dtype)
            self._checkpoint.load_into(model, self._family.prefixes)
        self._model = model.to(device).eval()
        self._device = device
        self._processor = self._family.build_processor()

    def preprocess(self, item: MediaItem) -> Pixels:
        """See `Encoder.preprocess`."""
        image = open_image(item.media, rules=item.rules)
        probe = item.probe
        if image.size != (probe.width, probe.height):
            raise MediaMismatch(f"{probe.width}x{probe.height} announced, the picture is {image.size}")
        return self._family.prepare(self._processor, image, self.plan(probe, item.dtype))

    def forward(self, batch: list[Pixels]) -> "list[torch.Tensor]":
        """See `Encoder.forward`. Rows differ bitwise between batch sizes, as of any matrix product."""
        import torch

        with torch.inference_mode():
            results = self._family.run(self._model, batch, self._device)
            for rows, pixels in zip(results, batch, strict=True):
                if tuple(rows.shape) != (pixels.spec.rows, pixels.spec.dim):
                    planned = f"{pixels.spec.rows}x{pixels.spec.dim}"
                    raise MediaMismatch(f"{planned} announced, the tower made {tuple(rows.shape)}")
            return [
                rows.to(getattr(torch, pixels.spec.dtype))
                for rows, pixels in zip(results, batch, strict=True)
            ]


def tower_dtype(config: Mapping[str, Any]) -> DType:
    """The dtype that a checkpoint says it is of; float32 if it says nothing."""
    given = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = _DTYPES.get(str(given).removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"model: weights of dtype {given!r}, allowed: {', '.join(_DTYPES)}", key="model")
    return dtype


def positive(table: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size of a configuration. Raises `ConfigError` if it is none."""
    value = table.get(key, default)
    if type(value) is not int or not 0 < value < 2**31:
        raise ConfigError(f"model: {key} is {value!r} in its configuration, a size is expected", key="model")
    return value
