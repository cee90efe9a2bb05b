"""Push through whole nodes over Mooncake's TCP: what arrives, and what a late writer can do."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_pairs import empty

from epd.config import load_config
from epd.dataplane.push import PushPlane
from epd.node import PrefillNode
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.testing.processes import NodeProcess
from epd.testing.synthetic import pattern, synthetic_item

MIB = 1024 * 1024
REGION_NBYTES = 32 * MIB
PREFILL = {"role": "prefill", "data_plane": "mooncake", "direction": "push", "pool.regions": 1}


@contextlib.contextmanager
def push_source(regions: int = 2) -> Iterator[NodeProcess]:
    command = [sys.executable, str(Path(__file__).with_name("push_source.py")), str(regions)]
    process = subprocess.Popen(
        [*command, str(REGION_NBYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield NodeProcess(process, json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@contextlib.asynccontextmanager
async def prefill(
    *encoders: str, settings: dict[str, Any] | None = None, plane: Callable[[], PushPlane] | None = None
) -> AsyncIterator[PrefillNode]:
    given = PREFILL | {"encoders": list(encoders), "pool.region_nbytes": REGION_NBYTES} | (settings or {})
    async with PrefillNode(load_config(None, given), open_plane_with=plane) as node:
        yield node


def wrong_bytes(delivery: Delivery, items: list[ImageItem]) -> int:
    wrong = 0
    for view, item in zip(delivery.views, items, strict=True):
        assert isinstance(view, memoryview)
        expected = pattern(item.media, view.nbytes)
        if bytes(view) != expected:
            wrong += sum(got != wanted for got, wanted in zip(bytes(view), expected, strict=True))
    return wrong


@pytest.mark.slow
async def test_what_an_encoder_writes_arrives_whole_and_leaves_nothing() -> None:
    with push_source() as source:
        async with prefill(source.listen, settings={"pool.regions": 2}) as node:
            assert node.data_plane == "mooncake/tcp"
            for nbytes in (4, 1000, 65_536, MIB, REGION_NBYTES - 8):
                item = synthetic_item(nbytes)
                delivery = await node.encode(EmbeddingRequest(f"{nbytes} B", [item], 20.0))
                assert wrong_bytes(delivery, [item]) == 0, nbytes
                delivery.release()
            many = [synthetic_item(4000 + 4 * number) for number in range(40)]
            delivery = await node.encode(EmbeddingRequest("many", many, 20.0))
            assert wrong_bytes(delivery, many) == 0
            delivery.release()
            await empty(node.listen)
            await empty(source.listen)
