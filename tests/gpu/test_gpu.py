"""Planes and whole nodes on a GPU: two processes on one card, Mooncake between them."""

import asyncio
import contextlib
import ctypes
import signal
from collections.abc import Iterator
from typing import Any

import gpu_encoders
import pytest
import torch
from gpu_encoders import check_pattern, pattern_item, tower_item
from gpu_node import Copies
from gpu_pairs import MIB, SESSION, Process, Reader, Requests, encoder, gather_all, prefill

from epd.dataplane.base import ReadState
from epd.encoders.base import MediaItem
from epd.memory.tensors import as_tensor, new_stream
from epd.protocol.errors import EpdError
from epd.protocol.ids import SessionId
from epd.protocol.sources import seal_offset

DEVICE = "cuda:0"
NBYTES = 16 * MIB


@contextlib.contextmanager
def reader(kind: str, nbytes: int = NBYTES) -> Iterator[tuple[Process, Reader]]:
    source = Process("gpu_source.py", str(32 * MIB), str(nbytes), kind)
    read = Reader(source, 32 * MIB)
    try:
        assert read.opened is ReadState.DONE
        yield source, read
    finally:
        source.close()
        read.close()


def words(read: Reader, nbytes: int) -> torch.Tensor:
    return as_tensor(read.region.part(0, nbytes)).view(torch.int32)


def test_a_region_is_a_block_of_its_own_and_its_bytes_are_read() -> None:
    with reader("still") as (_, read):
        assert read.read(NBYTES) is ReadState.DONE
        assert read.seal(seal_offset(NBYTES)) == 3
        assert bool((words(read, NBYTES) == 3).all())
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        cuda = ctypes.CDLL("libcuda.so.1")
        code = cuda.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(read.region.address)
        )
        assert (code, base.value) == (0, read.region.address)
        assert size.value == 34 * MIB  # the region, its mark, rounded up: nobody else's memory


@pytest.mark.parametrize("kind", ["honest", "late"])
def test_a_source_that_is_reused_during_a_read_is_never_taken_for_whole(kind: str) -> None:
    """`late` is what the seal protects from: changed after the slot was reused, it proves nothing."""
    delivered = wrong = mismatches = torn = 0
    with reader(kind) as (_, read):
        at = seal_offset(NBYTES)
        for _ in range(200_000):
            announced = read.seal(at)
            if announced % 2 == 0:
                continue
            assert read.read(NBYTES) is ReadState.DONE
            after = read.seal(at)
            whole = bool((words(read, NBYTES) == announced).all())
            torn += not whole
            if after != announced:
                mismatches += 1
                continue
            delivered += 1
            wrong += not whole
            if delivered >= 1000 and torn:
                break
    print(f"{kind}: {delivered=} {wrong=} {mismatches=} {torn=}")  # noqa: T201
    assert delivered >= 1000
    assert mismatches > 0
    assert torn > 0  # with the check off these would have been delivered
    assert (wrong == 0) == (kind == "honest")


def test_a_read_from_a_dead_process_is_whole_or_refused() -> None:
    with reader("still") as (source, read):
        assert read.read(NBYTES) is ReadState.DONE
        source.kill()
        words(read, NBYTES).zero_()
        torch.cuda.synchronize()
        assert read.read(NBYTES) is ReadState.DONE
        assert read.seal(seal_offset(NBYTES)) == 3
        assert bool((words(read, NBYTES) == 3).all())
        # Who opens it only now finds nobody to hand the seals over.
        assert read.open(source, SessionId(8)) is ReadState.FAILED


def test_a_stopped_process_is_read_all_the_same() -> None:
    with reader("still") as (source, read):
        source.signal(signal.SIGSTOP)
        assert read.read(NBYTES) is ReadState.DONE
        assert bool((words(read, NBYTES) == 3).all())


def test_what_was_not_announced_is_refused() -> None:
    with reader("still") as (_, read):
        assert read.read(33 * MIB) is ReadState.REFUSED
        read.plane.close_peer(SESSION)
        assert read.read(8) is ReadState.REFUSED


@pytest.mark.parametrize("verify", ["seal", "checksum"])
async def test_one_host_and_one_device_item_arrive_in_one_request(verify: str) -> None:
    with encoder(verify=verify) as process:
        assert process.hello["data_plane"] == "mooncake/nvlink_intra"
        async with prefill([process]) as node:
            requests = Requests(node)
            for nbytes in (8, 65536, 19_300_000, 154_300_000 // 8 * 8):
                delivery = await requests.encode(
                    pattern_item(nbytes, nbytes + 1, b"host"), pattern_item(nbytes, nbytes + 2)
                )
                first, second = delivery.tensors
                assert str(first.device) == str(second.device) == DEVICE
                assert first.dtype == torch.float32
                assert first.data_ptr() == delivery.tensors[0].data_ptr()
                assert check_pattern(first, nbytes + 1)
                assert check_pattern(second, nbytes + 2)
                assert delivery.verified == (verify == "checksum",) * 2
                delivery.release()


async def test_nothing_of_a_transfer_is_copied_to_the_host() -> None:
    with encoder() as process:
        async with prefill([process]) as node:
            requests = Requests(node)
            (await requests.encode(pattern_item(65536, 1))).release()
            copies = Copies()
            copies.start()
            process.ask("profile")
            for nonce in range(2, 22):
                (await requests.encode(pattern_item(19_300_000, nonce))).release()
            here, there = copies.stop(), process.ask("copies")
    print(f"{here=} {there=}")  # noqa: T201
    assert sum(here.values()) >= 20  # the profiler saw the reads
    assert not any("DtoH" in name for name in here)
    assert not any("DtoH" in name for name in there)


async def test_a_slot_is_leased_again_only_after_the_consumers_stream() -> None:
    nbytes = 8 * MIB
    with encoder() as process:
        async with prefill([process], pool__regions=1, pool__region_nbytes=nbytes) as node:
            requests = Requests(node)
            first = await requests.encode(pattern_item(nbytes, 1))
            stream = new_stream(DEVICE)
            kept = torch.empty(nbytes // 4, dtype=torch.float32, device=DEVICE)
            (tensor,) = first.tensors
            with torch.cuda.stream(stream):
                spin: Any = torch.cuda._sleep
                spin(2_000_000_000)  # cycles, on that stream: about a second of work
                kept.copy_(tensor.flatten())
            first.release(stream)
            assert not stream.query()
            second = await requests.encode(pattern_item(nbytes, 2))
            assert stream.query()
            assert check_pattern(kept, 1)
            assert check_pattern(second.tensors[0], 2)
            second.release()


QUICK: dict[str, Any] = {
    "timeouts__heartbeat_s": 0.1,
    "timeouts__suspect_after_s": 0.3,
    "timeouts__dead_after_s": 1.0,
}


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_requests_survive_an_encoder_that_stops_or_dies(number: signal.Signals) -> None:
    with encoder(**QUICK) as one, encoder(**QUICK) as two:
        async with prefill([one, two], pool__regions=8, **QUICK) as node:
            requests = Requests(node)
            await gather_all([_whole(requests, nonce) for nonce in range(8)])
            running = [asyncio.ensure_future(_whole(requests, nonce)) for nonce in range(100, 160)]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            one.signal(number)
            outcomes = await gather_all(running)
            assert outcomes == [True] * 60
            last = await requests.encode(pattern_item(8, 1))  # releases before it have been waited for
            last.release()
            assert await node.drain(10.0)
            assert node.counts()["quarantined"] == 0


async def _whole(requests: Requests, nonce: int) -> bool:
    nbytes = 1_000_000 + nonce * 8 * 4096
    try:
        delivery = await requests.encode(pattern_item(nbytes, nonce))
    except EpdError as error:
        pytest.fail(f"{nonce}: {error}")
    whole = check_pattern(delivery.tensors[0], nonce)
    delivery.release()
    return whole


async def test_a_tower_of_real_size_arrives_bit_for_bit() -> None:
    tower = gpu_encoders.Tower()
    items = [tower_item(504, 504, 1), tower_item(1092, 1932, 2)]
    with encoder("TOWER", worker__threads=4) as process:
        async with prefill([process], timeouts__metadata_s=60.0) as node:
            delivery = await Requests(node).encode(*items, deadline_s=120.0)
            tower.load(4, DEVICE)
            for item, tensor in zip(items, delivery.tensors, strict=True):
                media = MediaItem(item.probe, memoryview(item.media), "bfloat16")
                (expected,) = tower.forward([tower.preprocess(media)])
                assert tensor.dtype == expected.dtype == torch.bfloat16
                assert tensor.shape == expected.shape
                assert torch.equal(tensor, expected)
            delivery.release()
