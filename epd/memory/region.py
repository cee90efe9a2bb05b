"""One region: an allocation of its own, made by a data plane, mapped into this process."""

from typing import Protocol

from epd.protocol.ids import RegionId


class Region(Protocol):
    """Page-aligned memory of `nbytes` that this process may write, alive until its plane closes."""

    @property
    def region(self) -> RegionId: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Virtual address of our writable mapping."""
        ...

    @property
    def view(self) -> memoryview:
        """Writable bytes of the whole region."""
        ...

    @property
    def fd(self) -> int | None:
        """The memfd behind it, for the forward worker to map; None where there is none."""
        ...
