"""Windows of the push plane, over an engine of its own."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd.dataplane.mappings import Window
from epd.dataplane.push import PushPlane
from epd.memory.region import Region
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import SessionId

ONE, TWO = SessionId(1), SessionId(2)
NBYTES = 64 * 1024


@pytest.fixture(scope="module")
def plane() -> Iterator[PushPlane]:
    plane = PushPlane("127.0.0.1")
    yield plane
    plane.close()


@pytest.fixture(scope="module")
def pool(plane: PushPlane) -> list[Region]:
    return plane.allocate(2, NBYTES, exported=False)


def mappings_at(address: int) -> str:
    """The permissions of the mapping of that address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.split()[1]
    return ""


@pytest.mark.slow
def test_a_window_is_the_pool_itself_until_it_is_revoked(plane: PushPlane, pool: list[Region]) -> None:
    before = plane.registrations()
    first, second = plane.open_window(ONE)
    assert plane.registrations() == before + 2
    assert (first.nbytes, second.nbytes) == (NBYTES, NBYTES)
    ctypes.memmove(second.base + 100, b"through", 7)
    assert bytes(pool[1].view[100:107]) == b"through"
    assert plane.revoke_window(ONE)
    assert mappings_at(first.base) == mappings_at(second.base) == "---p", "taken, and out of reach"
    assert bytes(pool[1].view[100:107]) == b"through", "the pool's own mapping goes on"
    assert plane.revoke_window(ONE), "nothing is left to be revoked"


@pytest.mark.slow
def test_each_session_has_its_own_and_no_address_comes_again(plane: PushPlane, pool: list[Region]) -> None:
    seen: set[int] = set()
    other = plane.open_window(TWO)
    for _ in range(20):
        opened = {region.base for region in plane.open_window(ONE)}
        assert not opened & seen
        seen |= opened
        assert plane.revoke_window(ONE)
    assert mappings_at(other[0].base) == "rw-s", "another session's window is not disturbed"
    assert plane.revoke_window(TWO)


@pytest.mark.slow
def test_what_is_not_proven_is_not_claimed(
    plane: PushPlane, pool: list[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses:
        """An engine that does not let go of a registration."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def unregister_memory(self, address: int) -> int:
            self._engine.unregister_memory(address)
            return -1

    opened = plane.open_window(ONE)
    with monkeypatch.context() as patched:
        patched.setattr(plane, "_engine", Refuses(plane._engine))
        assert not plane.revoke_window(ONE)
    assert mappings_at(opened[0].base) == "---p", "it is made inaccessible all the same"

    def refuses(window: Window) -> None:
        raise OSError("no more mappings")

    plane.open_window(ONE)
    with monkeypatch.context() as patched:
        patched.setattr(Window, "shut", refuses)
        assert not plane.revoke_window(ONE)


@pytest.mark.slow
def test_a_window_that_cannot_be_had_leaves_nothing(
    plane: PushPlane, pool: list[Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Path("/proc/self/maps").read_text().count("memfd:")
    registered = list(plane._registered)

    def fails(address: int, nbytes: int) -> None:
        raise DataPlaneError("engine code -1")

    monkeypatch.setattr(plane, "_register", fails)
    with pytest.raises(DataPlaneError, match="no window for session 0000000000000001: engine code -1"):
        plane.open_window(ONE)
    assert Path("/proc/self/maps").read_text().count("memfd:") == shared
    assert plane._registered == registered


@pytest.mark.slow
def test_places_are_within_the_pool(plane: PushPlane, pool: list[Region]) -> None:
    assert plane.place_of(pool[1].address + 5) == (1, 5)
    (staging,) = plane.allocate(1, NBYTES, exported=True)
    with pytest.raises(DataPlaneError, match="is not in the pool"):
        plane.place_of(staging.address)
    assert plane.export() == ()


@pytest.mark.slow
def test_push_is_refused_where_a_write_ends_before_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "MC_TCP_PROTO", "1")
    with pytest.raises(DataPlaneError, match="MC_TCP_PROTO=1 ends writes before they have arrived"):
        PushPlane("127.0.0.1")


def test_a_shut_window_stops_the_kernel_too() -> None:
    """What a late write meets: a receive into it fails, and the process goes on."""
    fd = os.memfd_create("epd-test")
    os.ftruncate(fd, mmap.PAGESIZE)
    window = Window(fd, mmap.PAGESIZE)
    window.shut()
    reads, writes = os.pipe()
    os.write(writes, b"late")
    into = (ctypes.c_char * 4).from_address(window.address)
    with pytest.raises(OSError, match="Bad address"):
        os.readv(reads, [into])
    assert os.pread(fd, 4, 0) == bytes(4)
    for one in (fd, reads, writes):
        os.close(one)
