"""Figures of one GPU.

    python measure.py figures OUT.json [STEP...]
    python measure.py soak SECONDS OUT.json

Each figure stands beside its reference of the same rounds; cells are min, median and max of all.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import uvloop
from gpu_encoders import check_pattern, pattern_item, stamp_s
from gpu_node import Copies, resources
from gpu_pairs import MIB, SESSION, Process, Reader, encoder, prefill

from epd.bench.report import machine
from epd.dataplane.base import ReadState
from epd.memory.tensors import device_digest
from epd.node import PrefillNode
from epd.observe.log import configure_logging
from epd.protocol.ids import SessionId
from epd.protocol.sources import seal_offset
from epd.request import Delivery, EmbeddingRequest, ImageItem

DEVICE = "cuda:0"
SIZES = (65_536, 19_300_000, 154_300_000)
DELIVERY_WAIT_S = 60.0
SAMPLE_S = 5.0


def spread(values_s: list[float]) -> dict[str, float]:
    """Of seconds, in microseconds."""
    us = sorted(value * 1e6 for value in values_s)
    return {"min": round(us[0], 1), "median": round(median(us), 1), "max": round(us[-1], 1)}


def timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def write(out: Path, found: dict[str, Any]) -> None:
    out.write_text(json.dumps(found, indent=1) + "\n")


class Timed:
    """One request at a time, and the moment at which it was delivered."""

    def __init__(self, node: PrefillNode) -> None:
        self._node = node
        self._next = 1

    async def deliver(self, item: ImageItem) -> tuple[float, float, Delivery]:
        """Submitted and delivered, monotonic seconds."""
        self._next += 1
        ended: asyncio.Future[tuple[float, Delivery]] = asyncio.get_running_loop().create_future()
        start_s = time.monotonic()
        request = EmbeddingRequest(f"m{self._next}", [item], DELIVERY_WAIT_S)
        self._node.submit(request, lambda delivery: ended.set_result((time.monotonic(), delivery)))
        end_s, delivery = await ended
        if delivery.error is not None:
            raise delivery.error
        return start_s, end_s, delivery


def read_beside_copy() -> list[dict[str, Any]]:
    """The plane's read, and a device-to-device copy of as many bytes, alternating."""
    largest, rows = 530_000_000, []
    source = Process("gpu_source.py", str(560 * MIB), str(largest), "still")
    reader = Reader(source, 560 * MIB)
    try:
        here = torch.zeros(largest, dtype=torch.uint8, device=DEVICE)
        there = torch.empty_like(here)

        def copy(nbytes: int) -> None:
            there[:nbytes].copy_(here[:nbytes], non_blocking=True)
            torch.cuda.current_stream().synchronize()

        def read(nbytes: int) -> None:
            assert reader.read(nbytes) is ReadState.DONE

        for nbytes in (65_536, 1_048_576, 19_300_000, 154_300_000, largest):
            reads, copies, seals = [], [], []
            for number in range(60):
                took = (timed(lambda: read(nbytes)), timed(lambda: copy(nbytes)))  # noqa: B023
                seal_s = timed(lambda: reader.seal(seal_offset(largest)))
                if number >= 10:
                    reads.append(took[0])
                    copies.append(took[1])
                    seals.append(seal_s)
            ratios = [copied / read_ for read_, copied in zip(reads, copies, strict=True)]
            rows.append(
                {
                    "size_bytes": nbytes,
                    "read_us": spread(reads),
                    "copy_us": spread(copies),
                    "seal_us": spread(seals),
                    "copy_over_read": round(median(ratios), 3),
                }
            )
    finally:
        source.close()
        reader.close()
    return rows


async def from_forward_to_delivery(repetitions: int) -> list[dict[str, Any]]:
    """From the forward's end to the delivery; and the same code with staging and pool on the host."""
    rows = []
    host: dict[str, Any] = {"device": "cpu", "data_plane": "shm"}
    with encoder() as device_side, encoder("STAGED", **host) as host_side:
        async with prefill([device_side]) as node, prefill([host_side], **host) as staged_node:
            device, staged = Timed(node), Timed(staged_node)
            for nbytes in SIZES:
                size = nbytes // 8 * 8
                ours: list[float] = []
                theirs: list[float] = []
                on_gpu: list[float] = []
                for number in range(repetitions):
                    _, end_s, delivery = await device.deliver(pattern_item(size, nbytes + number))
                    took_s = end_s - stamp_s(delivery.tensors[0])
                    assert check_pattern(delivery.tensors[0], nbytes + number)
                    delivery.release()
                    _, staged_s, delivery = await staged.deliver(pattern_item(size, nbytes + number))
                    arrived = delivery.tensors[0].to(DEVICE)
                    torch.cuda.synchronize()
                    arrived_s, made_s = time.monotonic(), stamp_s(delivery.tensors[0])
                    delivery.release()
                    assert check_pattern(arrived, nbytes + number)
                    if number >= 5:
                        ours.append(took_s)
                        theirs.append(staged_s - made_s)
                        on_gpu.append(arrived_s - made_s)
                    await asyncio.sleep(0.02)  # tidy: what the last one set going ends before the next
                rows.append(
                    {
                        "size_bytes": size,
                        "device_us": spread(ours),
                        "staged_delivered_us": spread(theirs),
                        "staged_on_gpu_us": spread(on_gpu),
                    }
                )
    return rows


async def cost_of_verify(repetitions: int) -> list[dict[str, Any]]:
    """From submit to delivered of a result that is there already, per kind of proof; alternating."""
    kinds = ("off", "seal", "checksum")
    rows: list[dict[str, Any]] = []
    with encoder(verify="off") as off, encoder(verify="seal") as seal, encoder(verify="checksum") as checksum:
        async with (
            prefill([off], verify="off") as off_node,
            prefill([seal], verify="seal") as seal_node,
            prefill([checksum], verify="checksum") as checksum_node,
        ):
            sides = dict(zip(kinds, map(Timed, (off_node, seal_node, checksum_node)), strict=True))
            for nbytes in SIZES:
                size = nbytes // 8 * 8
                took: dict[str, list[float]] = {kind: [] for kind in kinds}
                for number in range(repetitions + 5):
                    for kind, side in sides.items():
                        start_s, end_s, delivery = await side.deliver(pattern_item(size, 1))
                        delivery.release()
                        if number >= 5:
                            took[kind].append(end_s - start_s)
                payload = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
                device_digest(payload)
                digests = [timed(lambda: device_digest(payload)) for _ in range(20)]  # noqa: B023
                costs = {kind: spread(values) for kind, values in took.items()}
                rows.append({"size_bytes": size, "digest_alone_us": spread(digests)} | costs)
    return rows


async def copies_to_the_host(repetitions: int) -> dict[str, Any]:
    """Every copy that either process's GPU makes during transfers, by kind."""
    found: dict[str, Any] = {"transfers": repetitions}
    for verify in ("seal", "checksum"):
        with encoder(verify=verify) as process:
            async with prefill([process], verify=verify) as node:
                side = Timed(node)
                (await side.deliver(pattern_item(65_536, 1)))[2].release()
                copies = Copies()
                copies.start()
                process.ask("profile")
                for nonce in range(2, 2 + repetitions):
                    (await side.deliver(pattern_item(19_300_000 // 8 * 8, nonce)))[2].release()
                found[verify] = {"prefill": copies.stop(), "encoder": process.ask("copies")}
    return found


async def peak_memory(requests: int) -> dict[str, Any]:
    """The pool, beside an allocation per request of the same sizes held by as many at once."""
    held, chance = 8, random.Random(1)
    sizes = [int(2 ** chance.uniform(16, 26)) // 8 * 8 for _ in range(requests)]
    before = resources()["device_used_nbytes"]
    with encoder() as process:
        base = resources()["device_used_nbytes"]
        async with prefill([process], pool__regions=4, pool__region_nbytes=128 * MIB) as node:
            ready, peak, side = resources()["device_used_nbytes"], 0, Timed(node)
            forward_before = process.ask("memory")["torch_reserved_nbytes"]
            open_deliveries: list[Delivery] = []
            for number, nbytes in enumerate(sizes):
                if len(open_deliveries) == held:
                    open_deliveries.pop(0).release()
                open_deliveries.append((await side.deliver(pattern_item(nbytes, number)))[2])
                peak = max(peak, resources()["device_used_nbytes"])
            for delivery in open_deliveries:
                delivery.release()
            registrations = node.plane.registrations()
            forward_after = process.ask("memory")["torch_reserved_nbytes"]
            kernels_here = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    tensors: list[torch.Tensor] = []
    for nbytes in sizes:
        if len(tensors) == held:
            tensors.pop(0)
        tensors.append(torch.empty(nbytes, dtype=torch.uint8, device=DEVICE))
    statistics = torch.cuda.memory_stats()
    return {
        "requests": requests,
        "held_at_once": held,
        "pool_nbytes": 4 * 128 * MIB,
        "pool_used_when_ready_nbytes": ready - base,
        "grown_during_requests_nbytes": peak - ready,
        "grown_by_the_forward_nbytes": forward_after - forward_before,
        "reserved_by_torch_in_prefill_nbytes": kernels_here,
        "registrations": registrations,
        "encoder_with_staging_nbytes": base - before,
        "per_request_peak_reserved_nbytes": torch.cuda.max_memory_reserved(),
        "per_request_device_allocations": statistics["num_device_alloc"],
    }


async def after_restarts() -> list[dict[str, int]]:
    """GPU memory in use with one reader after each encoder that was killed and replaced."""
    rows = []
    source = Process("gpu_source.py", str(512 * MIB), "65536", "still")
    reader = Reader(source, 512 * MIB)
    rows.append({"killed": 0, "device_used_nbytes": resources()["device_used_nbytes"]})
    for killed in range(1, 4):
        source.kill()
        reader.plane.close_peer(SessionId(SESSION + killed - 1))
        source = Process("gpu_source.py", str(512 * MIB), "65536", "still")
        assert reader.open(source, SessionId(SESSION + killed)) is ReadState.DONE
        rows.append({"killed": killed, "device_used_nbytes": resources()["device_used_nbytes"]})
    source.close()
    reader.close()
    rows.append({"killed": 4, "device_used_nbytes": resources()["device_used_nbytes"]})
    return rows


async def figures(out: Path, wanted: list[str]) -> None:
    found: dict[str, Any] = {"machine": machine(), "gpu": torch.cuda.get_device_name(), "errors": {}}
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("read_beside_copy", lambda: asyncio.to_thread(read_beside_copy)),
        ("from_forward_to_delivery", lambda: from_forward_to_delivery(35)),
        ("cost_of_verify", lambda: cost_of_verify(30)),
        ("copies", lambda: copies_to_the_host(20)),
        ("peak_memory", lambda: peak_memory(300)),
        ("after_restarts", after_restarts),
    ]
    for name, step in steps:
        if wanted and name not in wanted:
            continue
        start_s = time.monotonic()
        try:
            found[name] = await step()
        except Exception as error:
            found["errors"][name] = f"{type(error).__name__}: {error}"
        print(name, round(time.monotonic() - start_s, 1), "s", found["errors"].get(name, ""), flush=True)  # noqa: T201
        write(out, found)


async def soak(seconds: float, out: Path) -> None:
    """Requests of all sizes, eight at a time, every byte compared; some are cancelled, some shared."""
    chance = random.Random(2)
    samples: list[dict[str, Any]] = []
    counts = {"delivered": 0, "cancelled": 0, "failed": 0, "wrong": 0, "bytes": 0}
    start_s, is_over = time.monotonic(), asyncio.Event()
    with encoder() as process:
        async with prefill([process], pool__regions=2, pool__region_nbytes=128 * MIB) as node:

            async def client(number: int) -> None:
                step = 0
                while time.monotonic() - start_s < seconds:
                    step += 1
                    nonce = chance.randrange(1 << 20)
                    nbytes = int(2 ** chance.uniform(16, 25)) // 8 * 8
                    if chance.random() < 0.2:  # one of a few, which others may be asking for now
                        nonce, nbytes = (shared := chance.randrange(8)), 65_536 << shared
                    name = f"s{number}-{step}"
                    ended: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
                    request = EmbeddingRequest(name, [pattern_item(nbytes, nonce)], DELIVERY_WAIT_S)
                    node.submit(request, ended.set_result)
                    if chance.random() < 0.05:
                        node.cancel(name)
                    delivery = await ended
                    if delivery.error is not None:
                        kind = "cancelled" if delivery.error.code == "cancelled" else "failed"
                        counts[kind] += 1
                        continue
                    counts["wrong"] += not check_pattern(delivery.tensors[0], nonce)
                    counts["delivered"] += 1
                    counts["bytes"] += nbytes
                    delivery.release()

            async def sampler() -> None:
                while not is_over.is_set():
                    there = await asyncio.to_thread(process.ask, "memory")
                    at_s = round(time.monotonic() - start_s, 1)
                    samples.append({"at_s": at_s, "prefill": resources(), "encoder": there} | counts)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(SAMPLE_S):
                            await is_over.wait()

            async def clients() -> None:
                await asyncio.gather(*(client(number) for number in range(8)))
                is_over.set()

            await asyncio.gather(sampler(), clients())
            await node.drain(10.0)
            left = {name: count for name, count in node.counts().items() if count}
    rates = [b["delivered"] - a["delivered"] for a, b in itertools.pairwise(samples)]
    summary = counts | {"seconds": seconds, "left": left, "per_sample_p5": quantiles(rates, n=20)[0]}
    write(out, {"machine": machine(), "summary": summary, "samples": samples})
    print(summary, flush=True)  # noqa: T201


if __name__ == "__main__":
    configure_logging("json", level=logging.WARNING)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if sys.argv[1] == "figures":
        uvloop.run(figures(Path(sys.argv[2]), sys.argv[3:]))
    else:
        uvloop.run(soak(float(sys.argv[2]), Path(sys.argv[3])))
