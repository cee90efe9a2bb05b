"""One region: an allocation of its own, made by a data plane, on the host or on a GPU.

A part of it is named by what Python already has for it: a `memoryview` of host memory, or a
`DeviceView`, which torch, CuPy and others take as it is (`__cuda_array_interface__`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from epd.protocol.ids import RegionId, Seal
from epd.protocol.sources import SEAL_WORD

if TYPE_CHECKING:
    import torch

HOST: Final = "cpu"
"""The device of host memory; a GPU's is `cuda:N`, N as this process counts."""


class DeviceView:
    """`nbytes` at `address` in the memory of `device`. It keeps `owner`, and so the memory, alive.

    `whole`, if given, gives the tensor of all of its region, from whose `start` this is a part; None
    when the region is closed.
    """

    __slots__ = ("address", "device", "nbytes", "owner", "start", "whole")

    def __init__(
        self,
        address: int,
        nbytes: int,
        device: str,
        owner: object,
        whole: "Callable[[], torch.Tensor | None] | None" = None,
        start: int = 0,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self.owner = owner
        self.whole = whole
        self.start = start

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # No stream to wait for: whoever hands a view out has waited for what wrote it.
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "stream": None,
        }


View = memoryview | DeviceView


class Region(Protocol):
    """Page-aligned memory of `nbytes` that this process may write, alive until its plane closes."""

    @property
    def region(self) -> RegionId: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> str:
        """`cpu` or `cuda:N`."""
        ...

    @property
    def address(self) -> int:
        """Virtual address of our writable mapping."""
        ...

    @property
    def view(self) -> memoryview:
        """Writable bytes of the whole region. Raises `DataPlaneError` if it is not host memory."""
        ...

    @property
    def fd(self) -> int | None:
        """The memfd behind it, for a forward worker's process to map; None where there is none."""
        ...

    def part(self, offset: int, nbytes: int) -> View:
        """`nbytes` at `offset`, writable."""
        ...

    def write_seal(self, offset: int, seal: Seal) -> None:
        """Make `seal` what a reader finds at `offset`, before anything this process does next."""
        ...


class HostRegion(ABC):
    """What regions of host memory have in common."""

    device: str = HOST

    @property
    @abstractmethod
    def view(self) -> memoryview:
        """Writable bytes of the whole region."""

    def part(self, offset: int, nbytes: int) -> memoryview:
        return self.view[offset : offset + nbytes]

    def write_seal(self, offset: int, seal: Seal) -> None:
        SEAL_WORD.pack_into(self.view, offset, seal)
