"""An encoder made of plain functions, for users' own models.

    # my_package/vision.py
    ENCODER = CallableEncoder(
        name="mine", fingerprint="mine-v3-sha256:...", default_dtype="bfloat16",
        plan=plan, preprocess=preprocess, forward=forward, load=load,
    )

The forward worker is another process and imports it by name: `callable:my_package.vision:ENCODER`.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from epd.encoders.base import Encoder, MediaItem
from epd.protocol.errors import ConfigError
from epd.protocol.messages import DType, EmbeddingSpec, Probe

if TYPE_CHECKING:
    import torch

PREFIX: Final = "callable:"
_MEMBERS: Final = ("name", "fingerprint", "default_dtype", "plan", "load", "preprocess", "forward")


def _nothing_to_load(num_threads: int, device: str) -> None:
    del num_threads, device


class CallableEncoder:
    """An `Encoder` of functions; what each must do stands at `Encoder`'s methods.

    The module that makes it is imported in the node too: import torch inside `load`, not at its top.
    """

    def __init__(
        self,
        *,
        name: str,
        fingerprint: str,
        default_dtype: DType,
        plan: Callable[[Probe, DType], EmbeddingSpec],
        preprocess: Callable[[MediaItem], Any],
        forward: "Callable[[list[Any]], list[torch.Tensor]]",
        load: Callable[[int, str], None] = _nothing_to_load,
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.default_dtype: DType = default_dtype
        self._plan = plan
        self._preprocess = preprocess
        self._forward = forward
        self._load = load

    def plan(self, probe: Probe, dtype: DType) -> EmbeddingSpec:
        return self._plan(probe, dtype)

    def load(self, num_threads: int, device: str) -> None:
        self._load(num_threads, device)

    def preprocess(self, item: MediaItem) -> Any:
        return self._preprocess(item)

    def forward(self, batch: list[Any]) -> "list[torch.Tensor]":
        return self._forward(batch)


def import_encoder(spec: str) -> Encoder:
    """The encoder that `callable:package.module:attribute` names: one, or what makes one.

    An attribute that is not an encoder itself is called without arguments. Raises `ConfigError`.
    """
    module_name, colon, attribute = spec.removeprefix(PREFIX).partition(":")
    if not (colon and module_name and attribute):
        raise _refuse(spec, f"expected {PREFIX}package.module:attribute")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _refuse(spec, str(error)) from error
    is_factory = callable(found) and (isinstance(found, type) or _missing(found))
    encoder = found() if is_factory else found
    missing = _missing(encoder)
    if missing:
        raise _refuse(spec, f"{type(encoder).__name__} has no {', '.join(missing)}")
    checked: Encoder = encoder
    return checked


def _missing(candidate: Any) -> list[str]:
    return [member for member in _MEMBERS if not hasattr(candidate, member)]


def _refuse(spec: str, why: str) -> ConfigError:
    return ConfigError(f"model: {spec!r}: {why}", key="model", given=spec)
