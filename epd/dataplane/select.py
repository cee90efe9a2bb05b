"""Which data plane this node uses: decided once, at start."""

from typing import Literal

import structlog

from epd.dataplane.base import DataPlane
from epd.dataplane.mooncake import MooncakePlane
from epd.dataplane.shm import ShmPlane
from epd.protocol.errors import DataPlaneError

_log = structlog.get_logger()

Choice = Literal["auto", "mooncake", "shm"]


def open_plane(choice: Choice, host: str) -> DataPlane:
    """The plane of that name; `auto`: Mooncake where it imports and initialises, else shm.

    `host` is the address by which peers reach this one. Raises `DataPlaneError` for an explicit
    choice that cannot be had.
    """
    if choice == "shm":
        return ShmPlane()
    try:
        return MooncakePlane(host)
    except DataPlaneError as error:
        if choice == "mooncake":
            raise
        _log.warning("data plane shm: same host only", reason=error.message)
        return ShmPlane()
