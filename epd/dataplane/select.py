"""Which data plane this node uses: decided once, at start."""

from typing import Literal

import structlog

from epd.dataplane.base import DataPlane
from epd.dataplane.cuda import device_count
from epd.dataplane.mooncake import MooncakePlane
from epd.dataplane.mooncake_cuda import MooncakeCudaPlane
from epd.dataplane.shm import ShmPlane
from epd.memory.region import HOST
from epd.protocol.errors import DataPlaneError

_log = structlog.get_logger()

Choice = Literal["auto", "mooncake", "shm"]


def open_plane(choice: Choice, host: str, device: str = HOST) -> DataPlane:
    """The plane of that name; `auto`: Mooncake where it imports and initialises, else shm.

    `host` is the address by which peers reach this one. `device` is whose memory the pools take: `cpu`,
    `cuda:N`, or `auto`: the first GPU if there is one and Mooncake can read between GPUs, else the CPU.
    Raises `DataPlaneError` for an explicit choice that cannot be had.
    """
    if device != HOST and choice != "shm" and (device != "auto" or device_count() > 0):
        try:
            return MooncakeCudaPlane(host, "cuda:0" if device == "auto" else device)
        except DataPlaneError as error:
            if device != "auto":
                raise
            _log.warning("pools in host memory: the GPU's cannot be had", reason=error.message)
    if choice == "shm":
        return ShmPlane()
    try:
        return MooncakePlane(host)
    except DataPlaneError as error:
        if choice == "mooncake":
            raise
        _log.warning("data plane shm: same host only", reason=error.message)
        return ShmPlane()
