"""A pool that does not fit is refused before it is touched, with what to change."""

from collections.abc import Callable

import pytest

from epd.dataplane import mappings
from epd.memory.available import Available
from epd.protocol.errors import DataPlaneError

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("allocate", "setting"), [(mappings.allocate_private, "pool"), (mappings.allocate_shared, "staging")]
)
def test_a_pool_above_what_is_available_names_sizes_and_settings(
    allocate: Callable[[int, int], object], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "available_memory", lambda: Available(3 * MIB, "a limit"))
    with pytest.raises(DataPlaneError) as refused:
        allocate(4, MIB)
    assert refused.value.message == (
        f"4 regions of {MIB} B ({4 * MIB} B in all) do not fit: {3 * MIB} B are available, by a limit;"
        f" lower {setting}.regions or {setting}.region_nbytes"
    )


@pytest.mark.parametrize("allocate", [mappings.allocate_private, mappings.allocate_shared])
def test_a_pool_that_fits_exactly_is_allocated(
    allocate: Callable[[int, int], list[mappings.OwnRegion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "available_memory", lambda: Available(2 * MIB, "a limit"))
    regions = allocate(2, MIB)
    try:
        assert [region.nbytes for region in regions] == [MIB, MIB]
    finally:
        for region in regions:
            region.close()
