"""What of a GPU's memory can be tested without one: where seals stand, views, and what is refused."""

import random

import pytest

from epd.dataplane.cuda import CudaBlock, CudaRegion, device_count, seal_place, seal_table_nbytes
from epd.dataplane.select import open_plane
from epd.memory.pool import Pool
from epd.memory.region import DeviceView
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import RegionId, Seal
from epd.protocol.sources import SEAL_WORD, seal_offset

NBYTES = 1 << 20


class Block(CudaBlock):
    """An address that nobody touches."""

    def __init__(self) -> None:
        self.address = 0x7F00_0000_0000
        self.nbytes = NBYTES


def region(table: bytearray | None = None) -> CudaRegion:
    return CudaRegion(RegionId(0), NBYTES, "cuda:0", Block(), memoryview(table) if table else None)


def test_no_two_slots_share_the_place_of_a_seal() -> None:
    chance = random.Random(1)
    table = bytearray(seal_table_nbytes(NBYTES))
    pool = Pool([region(table)])
    seals: dict[int, int] = {}
    while taken := pool.take([seal_offset(nbytes := chance.randrange(1, 3000)) + SEAL_WORD.size]):
        (extent,) = taken
        at, seal = seal_offset(nbytes), len(seals) * 2 + 1
        pool.write_seal(extent, at, Seal(seal))
        seals[seal_place(extent.offset + at)] = seal
        assert extent.offset <= seal_place(extent.offset + at) // 8 * 256 < extent.offset + extent.nbytes
    assert len(seals) > 300
    for place, seal in seals.items():
        assert SEAL_WORD.unpack_from(table, place) == (seal,)


def test_the_word_that_names_the_memory_stands_behind_all_seals() -> None:
    assert seal_table_nbytes(NBYTES) == seal_place(NBYTES) + 8
    assert seal_place(NBYTES - 1) < seal_place(NBYTES)


def test_a_part_says_where_it_lies_and_keeps_the_memory() -> None:
    whole = region()
    part = whole.part(512, 256)
    assert isinstance(part, DeviceView)
    assert (part.address, part.nbytes, part.device) == (whole.address + 512, 256, "cuda:0")
    assert part.__cuda_array_interface__["data"] == (whole.address + 512, False)
    assert part.__cuda_array_interface__["shape"] == (256,)
    assert isinstance(part.owner, Block)
    assert whole.part(NBYTES - 8, 256).nbytes == 8


def test_the_host_has_no_view_of_it_and_nobody_one_after_the_end() -> None:
    whole = region()
    with pytest.raises(DataPlaneError, match="cuda:0"):
        _ = whole.view
    whole.close()
    with pytest.raises(DataPlaneError, match="closed"):
        whole.part(0, 1)


@pytest.mark.skipif(device_count() > 0, reason="says what is missing, and here nothing is")
def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(DataPlaneError, match="CUDA driver"):
        open_plane("auto", "127.0.0.1", "cuda:0")


@pytest.mark.skipif(device_count() > 0, reason="auto takes the GPU where there is one")
def test_auto_takes_host_memory_where_there_is_no_gpu() -> None:
    plane = open_plane("shm", "127.0.0.1", "auto")
    assert (plane.name, plane.device) == ("shm", "cpu")
    plane.close()
