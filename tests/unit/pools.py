"""Pools of ordinary memory."""

from epd.memory.pool import Pool
from epd.memory.region import HostRegion
from epd.protocol.ids import RegionId

KIB = 1024


class Memory(HostRegion):
    """A region of ordinary memory."""

    fd = None

    def __init__(self, region: int, nbytes: int) -> None:
        self.region = RegionId(region)
        self.nbytes = nbytes
        self.address = (region + 1) << 32
        self._view = memoryview(bytearray(nbytes))

    @property
    def view(self) -> memoryview:
        return self._view


def make_pool(count: int = 4, region_nbytes: int = 16 * KIB) -> Pool:
    return Pool([Memory(region, region_nbytes) for region in range(count)])
