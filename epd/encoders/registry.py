"""From the name of an encoder, as configured, to the encoder; the same in node and worker."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from epd.encoders import callables
from epd.encoders.base import Encoder
from epd.encoders.qwen2_vl import Qwen2VLEncoder
from epd.protocol.errors import ConfigError

BUILTIN: Final[Mapping[str, Callable[[], Encoder]]] = MappingProxyType({Qwen2VLEncoder.name: Qwen2VLEncoder})


def load_encoder(spec: str) -> Encoder:
    """Construct the encoder that `spec` names; imports no torch of its own, loads no model.

    `builtin:NAME` or `callable:package.module:attribute`. Raises `ConfigError` with what is allowed.
    """
    if spec.startswith(callables.PREFIX):
        return callables.import_encoder(spec)
    if spec in BUILTIN:
        return BUILTIN[spec]()
    allowed = ", ".join((*BUILTIN, f"{callables.PREFIX}package.module:attribute"))
    raise ConfigError(f"model: unknown encoder {spec!r}, allowed: {allowed}", key="model", given=spec)
