"""Settings: their schema, and the sources that they come from."""

from epd.config.schema import (
    Config,
    Limits,
    MemoryConfig,
    PicturesConfig,
    SecurityConfig,
    Timeouts,
    WorkerConfig,
)
from epd.config.sources import Settings, load_config, load_settings

__all__ = [
    "Config",
    "Limits",
    "MemoryConfig",
    "PicturesConfig",
    "SecurityConfig",
    "Settings",
    "Timeouts",
    "WorkerConfig",
    "load_config",
    "load_settings",
]
