"""A thousand requests, two encoders, one killed and started again: replayed identically, file by file."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from epd.check.traces.check import check_traces
from epd.config import load_config
from epd.dataplane.faulty import FaultyPlane, Rates
from epd.dataplane.select import open_plane
from epd.node import PrefillNode
from epd.observe.timeline.load import load
from epd.observe.timeline.merge import merge
from epd.observe.timeline.transfers import transfers_of
from epd.protocol import reads
from epd.request import Delivery, EmbeddingRequest
from epd.testing.processes import HeldProcess, held_encoder
from epd.testing.synthetic import synthetic_item

REQUESTS = 1_000
AT_ONCE = 16
FAULTS = Rates(delay=0.02, fail=0.01, stale=0.01)
"""So that there are retries, and reads that wait for others."""
KILLED_AFTER, RESTARTED_AFTER = 300, 500
SETTINGS = {
    "data_plane": "shm",
    "log_format": "json",
    "timeouts.dedup_retention_s": 0.3,
    "trace_file_nbytes": 65_536,
    "trace_files": 1_000,
}


class Run:
    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._started = 0

    def encoder(self, name: str, listen: str | None = None) -> HeldProcess:
        self._started += 1
        settings = SETTINGS | {"node": name, "trace": str(self._folder / f"{name}-{self._started}.trace")}
        settings |= {} if listen is None else {"listen": listen}
        return self._stack.enter_context(held_encoder(settings, encoder="synthetic"))


@contextlib.asynccontextmanager
async def prefill_node(
    folder: Path, encoders: list[HeldProcess], rates: Rates
) -> AsyncIterator[tuple[PrefillNode, FaultyPlane]]:
    overrides = SETTINGS | {
        "role": "prefill",
        "node": "prefill",
        "encoders": [encoder.listen for encoder in encoders],
        "pool.regions": 2,
        "trace": str(folder / "prefill.trace"),
    }
    plane = FaultyPlane(open_plane("shm", "127.0.0.1"), seed=1, rates=rates)
    async with PrefillNode(load_config(None, overrides), open_plane_with=lambda: plane) as node:
        yield node, plane


async def one_request(node: PrefillNode, number: int) -> Delivery:
    items = [synthetic_item(4 * (number % 97 + 1)), *[synthetic_item(40_000)] * (number % 3)]
    delivery = await node.encode(EmbeddingRequest(f"request-{number}", items, 30.0))
    delivery.release()
    return delivery


async def load_them(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack)
        encoders = [await asyncio.to_thread(run.encoder, f"encoder-{n}") for n in (1, 2)]
        async with prefill_node(tmp_path, encoders, FAULTS) as (node, _):
            numbers = iter(range(REQUESTS))
            ended, again = 0, asyncio.Event()

            async def work() -> None:
                nonlocal ended
                for number in numbers:
                    if number > RESTARTED_AFTER + AT_ONCE:
                        await again.wait()  # the rest is for both again
                    await one_request(node, number)
                    ended += 1
                    if ended == KILLED_AFTER:
                        encoders[0].kill()
                    elif ended == RESTARTED_AFTER:
                        listen = encoders[0].listen
                        encoders.append(await asyncio.to_thread(run.encoder, "encoder-1", listen))
                        while len(node.prefill.encoders.loads()) < 2:
                            await one_request(node, REQUESTS)
                        again.set()

            async with asyncio.TaskGroup() as tasks:
                for _ in range(AT_ONCE):
                    tasks.create_task(work())
        for encoder in encoders[1:]:
            encoder.close()
            await asyncio.to_thread(encoder.process.wait, 30)


@pytest.mark.slow
def test_a_thousand_requests_with_an_encoder_killed_and_restarted(tmp_path: Path) -> None:
    asyncio.run(load_them(tmp_path))
    paths = sorted(tmp_path.glob("*.trace*"))
    assert len(list(tmp_path.glob("prefill.trace*"))) > 2  # it went on in further files
    checked = check_traces(paths)
    assert checked.ok, (checked.findings[:5], [one for one in checked.replayed if one.divergence])
    assert sum(one.steps for one in checked.replayed) > 20 * REQUESTS
    loaded = load(paths)
    assert not loaded.damages
    assert len(loaded.nodes) == 4  # one encoder twice
    merged = merge(loaded.nodes)
    transfers = [transfer for transfer in transfers_of(merged) if transfer.node == "prefill"]
    assert len(transfers) >= REQUESTS
    assert {transfer.outcome for transfer in transfers} == {"freed"}
    assert sum(transfer.attempts for transfer in transfers) > REQUESTS + 10
    assert {name for transfer in transfers for name in transfer.encoders} >= {"encoder-1", "encoder-2"}


async def read_through_a_change_of_files(tmp_path: Path) -> None:
    """A read stands still while other requests, which have no bytes to read, fill a file and the next."""
    with contextlib.ExitStack() as stack:
        encoder = await asyncio.to_thread(Run(tmp_path, stack).encoder, "encoder")
        async with prefill_node(tmp_path, [encoder], Rates()) as (node, plane):
            held = plane.hold("payload")
            slow = asyncio.ensure_future(
                node.encode(EmbeddingRequest("slow", [synthetic_item(1024 * 1024)], 60.0))
            )
            await asyncio.to_thread(held.wait, 30)
            empty = synthetic_item(0)
            for number in range(40):
                many = [EmbeddingRequest(f"{number}-{n}", [empty], 60.0) for n in range(32)]
                for delivery in await asyncio.gather(*map(node.encode, many)):
                    delivery.release()
            plane.release("payload")
            (await slow).release()
        encoder.close()
        await asyncio.to_thread(encoder.process.wait, 30)


@pytest.mark.slow
def test_a_read_that_goes_on_through_a_change_of_files_replays_in_both(tmp_path: Path) -> None:
    asyncio.run(read_through_a_change_of_files(tmp_path))
    paths = sorted(tmp_path.glob("prefill.trace*"))
    assert len(paths) > 2
    alone = [load([path]).nodes[0] for path in paths]
    middle = [node for node in alone if not node.whole]
    over = [step for node in middle for step in node.steps if step.kind == "reads" and step.after.final]
    assert any(isinstance(step.before, reads.Sealing) for step in over)
    checked = check_traces(paths)
    assert checked.ok, [one for one in checked.replayed if one.divergence]
