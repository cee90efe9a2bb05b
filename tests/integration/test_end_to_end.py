"""Two encoder nodes, one prefill node, all of their own processes; a client in this one."""

import asyncio
import hashlib
import io
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from node_pairs import MODEL, PLANES, empty, expected_digests
from PIL import Image

from epd.client import NodeClient
from epd.data import photographs
from epd.request import ImageItem
from epd.testing.processes import NodeProcess, node_process

REQUESTS = 200
CONCURRENCY = 16
SETTINGS = {"log_format": "json", "model": MODEL, "worker.threads": 1, "timeouts.dedup_retention_s": 3.0}


class Nodes(NamedTuple):
    encoders: tuple[NodeProcess, NodeProcess]
    prefill: NodeProcess

    def all(self) -> tuple[NodeProcess, ...]:
        return (*self.encoders, self.prefill)


@pytest.fixture(scope="module", params=PLANES)
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    common = SETTINGS | {"data_plane": request.param}
    encoder = common | {"role": "encoder", "verify": "checksum"}
    with node_process(encoder) as first, node_process(encoder) as second:
        addresses = [first.listen, second.listen]
        with node_process(common | {"role": "prefill", "encoders": addresses}) as prefill:
            assert prefill.ready["data_plane"].startswith(request.param)
            yield Nodes((first, second), prefill)


@pytest.fixture(scope="module")
def pictures() -> list[ImageItem]:
    """Photographs as they are, and some of them again as PNG and as JPEG of another size."""
    items = [ImageItem.from_file(path) for path in photographs()]
    for path in photographs()[:3]:
        with Image.open(path) as image:
            small = image.convert("RGB").resize((180, 140))
        for form in ("PNG", "JPEG"):
            buffer = io.BytesIO()
            small.save(buffer, form)
            items.append(ImageItem.from_bytes(buffer.getvalue(), f"{path.name} as {form}"))
    return items


@pytest.fixture(scope="module")
def digests(pictures: list[ImageItem]) -> dict[bytes, bytes]:
    return expected_digests(pictures)


async def test_two_hundred_requests_are_bit_exact_and_leave_nothing_behind(
    nodes: Nodes, pictures: list[ImageItem], digests: dict[bytes, bytes]
) -> None:
    choose = random.Random(7)
    async with NodeClient(nodes.prefill.listen) as client:
        # Both encoders have answered before anything is counted from outside.
        warm = await client.submit(pictures, deadline_s=120)
        assert warm.outcome.error is None
        for node in nodes.all():
            await empty(node.listen)
        before = [node.held() for node in nodes.all()]
        groups = [choose.sample(pictures, choose.randint(1, 4)) for _ in range(REQUESTS)]
        turns = iter(groups)
        wrong: list[str] = []

        async def work() -> None:
            for group in turns:
                outcome = (await client.submit(group, deadline_s=120)).outcome
                if outcome.error is not None:
                    wrong.append(f"{outcome.error.code}: {outcome.error.message}")
                    continue
                for item, got in zip(group, outcome.items, strict=True):
                    if got.sha256 != digests[item.sha256] or not got.verified:
                        wrong.append(item.name)

        async with asyncio.TaskGroup() as workers:
            for _ in range(CONCURRENCY):
                workers.create_task(work())
        assert wrong == []
    for node in nodes.all():
        await empty(node.listen)
    # Mooncake opens up to four connections to a peer, each when it is first needed; the prefill node has
    # two peers. One descriptor lost per request would be two hundred.
    spare = 8 if nodes.prefill.ready["data_plane"].startswith("mooncake") else 0
    after = [node.held() for node in nodes.all()]
    for earlier, later in zip(before, after, strict=True):
        assert later.descriptors <= earlier.descriptors + spare
        assert later.threads <= earlier.threads
        assert later.shared_mappings == earlier.shared_mappings


async def test_bfloat16_is_bit_exact_too(nodes: Nodes, pictures: list[ImageItem]) -> None:
    expected = expected_digests(pictures[:2], "bfloat16")
    async with NodeClient(nodes.prefill.listen) as client:
        outcome = (await client.submit(pictures[:2], dtype="bfloat16")).outcome
    assert outcome.error is None
    assert [item.spec.dtype for item in outcome.items] == ["bfloat16", "bfloat16"]
    assert [item.sha256 for item in outcome.items] == [expected[item.sha256] for item in pictures[:2]]


async def test_a_bad_picture_fails_its_own_request_and_no_other(
    nodes: Nodes, pictures: list[ImageItem], digests: dict[bytes, bytes]
) -> None:
    """Cut in the middle: its header is good, so the node finds out only when it decodes."""
    cut = ImageItem.from_bytes(pictures[5].media[: len(pictures[5].media) // 2], "cut")
    async with NodeClient(nodes.prefill.listen) as client, asyncio.TaskGroup() as requests:
        good = [requests.create_task(client.submit([item])) for item in pictures[:4]]
        bad = requests.create_task(client.submit([pictures[0], cut, pictures[1]]))
    error = bad.result().outcome.error
    assert error is not None
    assert (error.code, error.item, error.retryable) == ("media_invalid", 1, False)
    for item, task in zip(pictures, good, strict=False):
        outcome = task.result().outcome
        assert outcome.error is None
        assert outcome.items[0].sha256 == digests[item.sha256]
    for node in nodes.all():
        await empty(node.listen)


async def test_rows_come_back_whole_if_asked_for(
    nodes: Nodes, pictures: list[ImageItem], digests: dict[bytes, bytes]
) -> None:
    async with NodeClient(nodes.prefill.listen) as client:
        result = await client.submit(pictures[6:9], rows=True)
    got = [hashlib.sha256(rows).digest() for rows in result.rows]
    assert got == [digests[item.sha256] for item in pictures[6:9]]


def test_sigterm_drains_and_exits_with_zero(nodes: Nodes) -> None:
    """The last test of this module: its nodes are gone after it."""
    assert [node.terminate() for node in reversed(nodes.all())] == [0, 0, 0]
