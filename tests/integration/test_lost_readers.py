"""The other way round: the reader, its client, or the worker is lost, and nothing stays behind."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_pairs import empty

from epd.client import NodeClient
from epd.data import photographs
from epd.protocol.errors import EpdError, SessionLost
from epd.request import ImageItem
from epd.testing.processes import HeldProcess, NodeProcess, held_encoder, node_process
from epd.testing.synthetic import synthetic_item

COMMON = {
    "data_plane": "shm",
    "log_format": "json",
    "timeouts.heartbeat_s": 0.1,
    "timeouts.suspect_after_s": 0.3,
    "timeouts.dead_after_s": 2.5,  # a client's heartbeat comes every second
    "timeouts.dedup_retention_s": 0.2,
}


@pytest.fixture
def encoder() -> Iterator[HeldProcess]:
    with held_encoder(COMMON, encoder="synthetic") as process:
        yield process


@pytest.fixture
def prefill(encoder: HeldProcess) -> Iterator[NodeProcess]:
    with node_process(COMMON | {"role": "prefill", "encoders": [encoder.listen]}) as process:
        yield process


def child_of(node: NodeProcess) -> int:
    """The process id of its one child: the forward worker."""
    (worker,) = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    return int(worker)


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_an_encoder_forgets_a_prefill_node_that_is_lost(
    encoder: HeldProcess, prefill: NodeProcess, how: str
) -> None:
    encoder.hold("forward")
    async with NodeClient(prefill.listen) as client:
        pending = asyncio.ensure_future(client.submit([synthetic_item(4096), synthetic_item(8192)]))
        await asyncio.to_thread(encoder.wait_reached, "forward")
        prefill.kill() if how == "kill" else prefill.stop()
        encoder.release("forward")
        await empty(encoder.listen)
        if how == "kill":
            with pytest.raises(SessionLost):
                await pending
        else:
            # It goes on with a new session and a retry in it; unless its own clock comes first and
            # tells it that the client has been silent for as long as it stood still itself.
            prefill.go_on()
            await asyncio.wait((pending,))
            lost = pending.exception()
            assert isinstance(lost, SessionLost) or pending.result().outcome.error is None


async def test_a_prefill_node_forgets_a_client_that_is_lost(
    encoder: HeldProcess, prefill: NodeProcess
) -> None:
    encoder.hold("forward")
    client = NodeClient(prefill.listen)
    await client.__aenter__()
    pending = asyncio.ensure_future(client.submit([synthetic_item(4096)]))
    await asyncio.to_thread(encoder.wait_reached, "forward")
    await client._endpoint.close_all(0.0)
    with pytest.raises(EpdError):
        await pending
    await empty(prefill.listen)
    encoder.release("forward")
    await empty(encoder.listen)


async def test_a_worker_that_is_killed_fails_its_forward_and_the_request_is_retried() -> None:
    """The worker comes back by itself; the retry finds it."""
    settings = COMMON | {"role": "encoder", "worker.threads": 1}
    with (
        node_process(settings) as encoder,
        node_process(COMMON | {"role": "prefill", "encoders": [encoder.listen]}) as prefill,
    ):
        items = [ImageItem.from_file(path) for path in photographs()]
        async with NodeClient(prefill.listen) as client:
            first = (await client.submit(items[:1])).outcome
            assert first.error is None
            pending = asyncio.ensure_future(client.submit(items))
            os.kill(child_of(encoder), signal.SIGKILL)
            outcome = (await pending).outcome
            assert outcome.error is None, outcome.error
            assert outcome.items[0].sha256 == first.items[0].sha256
        await empty(encoder.listen)
        await empty(prefill.listen)
