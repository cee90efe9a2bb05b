"""Memory of a GPU in blocks of its own, through the driver's C interface.

Not through torch: its allocator hands out pieces of larger blocks, and what a transport exports of a
piece is the whole block. The context is the device's primary one, which torch and the CUDA runtime use
as well. `N` of `cuda:N` is this process's own numbering; a peer's number never matters.
"""

import contextlib
import ctypes
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from epd.memory.region import DeviceView
from epd.memory.tensors import as_tensor
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import RegionId, Seal
from epd.protocol.sources import SEAL_WORD

if TYPE_CHECKING:
    import torch

BLOCK_NBYTES: Final = 2 * 1024 * 1024
"""Smaller allocations share a block of the driver's with others, and would be exported with them."""
_OUT_OF_MEMORY: Final = 2


def device_count() -> int:
    """GPUs that this process sees; 0 without a driver."""
    try:
        return _Driver().count()
    except DataPlaneError:
        return 0


class _Driver:
    """The calls of libcuda that are needed. Raises `DataPlaneError` where there is none."""

    def __init__(self) -> None:
        try:
            self._lib: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DataPlaneError(f"no CUDA driver: {error}") from error
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise DataPlaneError(f"{name}: {reason} (code {code})", code=code)

    def count(self) -> int:
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value


class CudaDevice:
    """One GPU. Raises `DataPlaneError`, with what there is, if there is no such device."""

    def __init__(self, device: str) -> None:
        self.name = device
        self._driver = _Driver()
        index, count = int(device.removeprefix("cuda:")), self._driver.count()
        if index >= count:
            raise DataPlaneError(f"{device}: this process sees {count} GPUs; set device")
        handle = ctypes.c_int()
        self._driver.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index))
        self._context = ctypes.c_void_p()
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self._bound = threading.local()

    def bind(self) -> None:
        """Make this device the calling thread's own: every call below does, and so must what calls
        CUDA by itself (a transport's engine) before it does."""
        if not getattr(self._bound, "yes", False):
            self._driver.call("cuCtxSetCurrent", self._context)
            self._bound.yes = True

    def allocate(self, nbytes: int) -> "CudaBlock":
        """A block of its own of at least `nbytes`, zeroed. Raises `DataPlaneError`, with what is free."""
        self.bind()
        size = -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        address = ctypes.c_uint64()
        try:
            self._driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        except DataPlaneError as error:
            if error.facts.get("code") != _OUT_OF_MEMORY:
                raise
            message = f"{size} B do not fit: {self.free_nbytes()} B are free on {self.name}"
            raise DataPlaneError(message, nbytes=size) from error
        block = CudaBlock(self, address.value, size)
        self._driver.call(
            "cuMemsetD8_v2", ctypes.c_uint64(block.address), ctypes.c_ubyte(0), ctypes.c_size_t(size)
        )
        self._driver.call("cuCtxSynchronize")
        return block

    def free_nbytes(self) -> int:
        self.bind()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def free(self, address: int) -> None:
        with contextlib.suppress(DataPlaneError):  # a context that has failed is given back as a whole
            self.bind()
            self._driver.call("cuMemFree_v2", ctypes.c_uint64(address))

    def write_word(self, address: int, value: int) -> None:
        self.bind()
        word = ctypes.c_uint64(value)
        self._driver.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.byref(word), ctypes.c_size_t(8))

    def read_word(self, address: int) -> int:
        self.bind()
        word = ctypes.c_uint64()
        self._driver.call("cuMemcpyDtoH_v2", ctypes.byref(word), ctypes.c_uint64(address), ctypes.c_size_t(8))
        return word.value


class CudaBlock:
    """One allocation; given back when nothing refers to it any more, not at the process's end."""

    def __init__(self, device: CudaDevice, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        weakref.finalize(self, device.free, address).atexit = False


class CudaRegion:
    """A region of a GPU (see `epd.memory.region.Region`). `seals` is where its seals stand, on the host:
    one word for each 256 bytes, see `seal_place`; None for a region that only receives."""

    fd = None

    def __init__(
        self, region: RegionId, nbytes: int, device: str, block: CudaBlock, seals: memoryview | None
    ) -> None:
        self.region = region
        self.nbytes = nbytes
        self.device = device
        self.address = block.address
        self._block: CudaBlock | None = block
        self._whole: torch.Tensor | None = None
        self._seals = seals

    @property
    def view(self) -> memoryview:
        raise DataPlaneError(f"region {self.region} is memory of {self.device}: the host has no view of it")

    def part(self, offset: int, nbytes: int) -> DeviceView:
        if self._block is None:
            raise DataPlaneError(f"region {self.region} belongs to a data plane that was closed")
        length = max(0, min(nbytes, self.nbytes - offset))
        return DeviceView(self.address + offset, length, self.device, self._block, self._tensor, offset)

    def _tensor(self) -> "torch.Tensor | None":
        """All of it as one tensor, made at the first call; None once it is closed."""
        if self._whole is None and self._block is not None:
            self._whole = as_tensor(DeviceView(self.address, self.nbytes, self.device, self._block))
        return self._whole

    def write_seal(self, offset: int, seal: Seal) -> None:
        assert self._seals is not None, "a seal in memory that nobody reads"
        SEAL_WORD.pack_into(self._seals, seal_place(offset), seal)

    def close(self) -> None:
        """Let go of the memory: given back now, or with the last view that a consumer still holds."""
        self._block = None
        self._whole = None
        self._seals = None


def seal_place(offset: int) -> int:
    """Where the seal that belongs at `offset` of a region stands in its table of seals. Slots are
    256-byte aligned and a seal lies within its slot, so no two share a word."""
    return offset // 256 * SEAL_WORD.size


def seal_table_nbytes(region_nbytes: int) -> int:
    """Of the table of a region: its seals, and behind them the word that names the region's memory."""
    return seal_place(region_nbytes) + SEAL_WORD.size
