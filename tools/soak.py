"""A soak: nodes that work for a long time, and what they hold meanwhile.

    python tools/soak.py --minutes 30 [--data-plane mooncake] --out docs/benchmarks/soak.json

A prefill node in this process and two encoder processes; requests of all sizes, some shared and some
cancelled, every delivered byte compared twice. What each process holds is read from /proc every ten seconds.
Writes the samples, and beside them a plot (`.svg`).
"""

import argparse
import asyncio
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from epd.bench.report import machine
from epd.chaos import schedule
from epd.chaos.oracle import Oracle, embedding_request
from epd.chaos.schedule import MAX_REQUEST_NBYTES, Request
from epd.config import load_config
from epd.node import PrefillNode
from epd.observe.log import configure_logging
from epd.request import Delivery
from epd.testing.processes import HeldProcess, held_by, held_encoder
from epd.testing.residue import empty, held

CONCURRENCY: Final = 8
BATCH: Final = 2_000
"""Requests drawn at a time, each batch from the next seed."""
SAMPLE_S: Final = 10.0
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c")


def sizes(pid: int) -> dict[str, int]:
    """Resident bytes, and what else a process holds."""
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"resident_bytes": resident, **held_by(pid)._asdict()}


class Soak:
    def __init__(self, node: PrefillNode, encoders: Sequence[HeldProcess], seconds: float) -> None:
        self._node = node
        self._pids = {"prefill": os.getpid()} | {f"encoder {n}": one.pid for n, one in enumerate(encoders)}
        self._start_s = time.monotonic()
        self._seconds = seconds
        self.oracle = Oracle()
        self.samples: list[dict[str, Any]] = []
        self._turns = self._requests()

    def _requests(self) -> Iterator[tuple[int, Request]]:
        seed = 0
        while True:
            for request in schedule.requests(seed, BATCH):
                yield seed, request._replace(number=seed * BATCH + request.number)
            seed += 1

    def _is_over(self) -> bool:
        return time.monotonic() - self._start_s >= self._seconds

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sample())
            for _ in range(CONCURRENCY):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_over():
            seed, request = next(self._turns)
            wanted = embedding_request(seed, request)
            ended: asyncio.Future[Delivery] = loop.create_future()
            self._node.submit(wanted, ended.set_result)
            if request.cancel_s is not None:
                loop.call_later(request.cancel_s, self._node.cancel, wanted.request_id)
            delivery = await ended
            if delivery.error is not None:
                self.oracle.failed[delivery.error.code] += 1
                continue
            await self.oracle.consume(wanted, delivery, request.hold_s)

    async def _sample(self) -> None:
        while not self._is_over():
            sample = {name: sizes(pid) for name, pid in self._pids.items()}
            at_s = round(time.monotonic() - self._start_s, 1)
            self.samples.append({"at_s": at_s, "delivered": self.oracle.delivered} | sample)
            await asyncio.sleep(SAMPLE_S)


async def soak(seconds: float, data_plane: str) -> dict[str, Any]:
    settings = {
        "data_plane": data_plane,
        "log_format": "json",
        "staging.region_nbytes": MAX_REQUEST_NBYTES + 4096,
    }
    with (
        held_encoder(settings, encoder="synthetic", stderr=subprocess.DEVNULL) as one,
        held_encoder(settings, encoder="synthetic", stderr=subprocess.DEVNULL) as other,
    ):
        prefill = {
            "role": "prefill",
            "data_plane": data_plane,
            "encoders": [one.ready["listen"], other.ready["listen"]],
            "pool.region_nbytes": MAX_REQUEST_NBYTES,
        }
        async with PrefillNode(load_config(None, prefill)) as node:
            this = Soak(node, (one, other), seconds)
            await this.run()
            await node.drain(60.0)
            for encoder in (one, other):
                await empty(encoder.listen, 60.0)
            left = held(node.counts())
            plane = node.data_plane
    oracle = this.oracle
    return {
        "machine": machine(),
        "data_plane": plane,
        "seconds": seconds,
        "delivered": oracle.delivered,
        "delivered_bytes": oracle.delivered_nbytes,
        "failed": dict(oracle.failed),
        "corrupted_bytes": oracle.corrupted_nbytes,
        "left": left,
        "samples": this.samples,
    }


def plot(report: dict[str, Any]) -> str:
    """Resident MiB of each process over minutes, as SVG."""
    samples = report["samples"]
    names = [name for name in samples[0] if isinstance(samples[0][name], dict)]
    top = max(sample[name]["resident_bytes"] for sample in samples for name in names) * 1.1
    width, height, left = 720, 320, 60
    end_s = max(samples[-1]["at_s"], 1.0)

    def point(at_s: float, nbytes: float) -> str:
        right, up = at_s / end_s * (width - left - 20), nbytes / top * (height - 60)
        return f"{left + right:.1f},{height - 30 - up:.1f}"

    lines = []
    for name, colour, row in zip(names, _COLOURS, range(9), strict=False):
        points = " ".join(point(sample["at_s"], sample[name]["resident_bytes"]) for sample in samples)
        lines.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
        lines.append(f'<text x="{left + 10}" y="{20 + 16 * row}" fill="{colour}">{name}</text>')
    for step in range(5):
        nbytes = top * step / 4
        y = point(0, nbytes).split(",")[1]
        lines.append(f'<text x="4" y="{y}">{nbytes / 2**20:.0f} MiB</text>')
    lines.append(f'<text x="{width - 120}" y="{height - 8}">{end_s / 60:.0f} minutes</text>')
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        f' font-size="12"><rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--data-plane", choices=("mooncake", "shm"), default="mooncake")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    configure_logging("json", level=logging.ERROR)
    report = uvloop.run(soak(arguments.minutes * 60, arguments.data_plane))
    arguments.out.write_text(json.dumps(report) + "\n")
    arguments.out.with_suffix(".svg").write_text(plot(report))
    shown = {key: value for key, value in report.items() if key != "samples"}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
