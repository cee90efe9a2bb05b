"""Pools that are short on both sides, shared jobs, several parts, retries, consumers that keep what they
have: requests queue and end, each with its rows or with one typed error that says who holds what."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from epd.config import load_config
from epd.dataplane.faulty import FaultyPlane, Rates
from epd.dataplane.shm import ShmPlane
from epd.memory.tensors import host_bytes
from epd.node import EncoderNode, PrefillNode
from epd.protocol.errors import EpdError, PoolExhausted, RequestTooLarge
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.testing.residue import empty
from epd.testing.synthetic import PatternWorker, SyntheticEncoder, pattern, synthetic_item

MIB = 1024 * 1024
PAGE = 4096


@contextlib.asynccontextmanager
async def encoder(regions: int, **settings: Any) -> AsyncIterator[EncoderNode]:
    overrides = {
        "role": "encoder",
        "data_plane": "shm",
        "staging.regions": regions,
        "staging.region_nbytes": MIB + PAGE,
        "timeouts.dedup_retention_s": 0.5,
    }
    config = load_config(None, overrides | settings)
    async with EncoderNode(config, encoder=SyntheticEncoder(), worker=PatternWorker()) as node:
        yield node


@contextlib.asynccontextmanager
async def prefill(
    encoders: list[EncoderNode], regions: int, rates: Rates | None = None, room_s: float = 30.0
) -> AsyncIterator[PrefillNode]:
    overrides = {
        "role": "prefill",
        "data_plane": "shm",
        "encoders": [one.listen for one in encoders],
        "pool.regions": regions,
        "pool.region_nbytes": MIB,
        "timeouts.read_base_s": 0.3,
        "timeouts.room_s": room_s,
        "limits.max_attempts": 100,
    }
    plane = FaultyPlane(ShmPlane(), seed=3, rates=rates)
    node = PrefillNode(load_config(None, overrides), open_plane_with=lambda: plane)
    async with node:
        yield node


async def keep(turns: int) -> None:
    """What a consumer does with what it has got: for so many turns of the loop others go on."""
    for _ in range(turns):
        await asyncio.sleep(0)


def check(delivery: Delivery, items: list[ImageItem]) -> None:
    for item, view in zip(items, delivery.views, strict=True):
        assert bytes(host_bytes(view)) == pattern(item.media, view.nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_two_prefill_nodes_with_short_pools_and_two_encoders_with_short_staging(seed: int) -> None:
    """A pool holds four of the largest items, a staging pool two; both prefill nodes want the same items at
    the same time, in other orders, and keep what they get for a while; reads fail and hang. Everything is
    delivered."""
    rng = random.Random(seed)
    contents = [synthetic_item(4 * rng.randrange(1, MIB // 4)) for _ in range(24)]
    delivered: Counter[str] = Counter()

    async def ask(node: PrefillNode, name: str) -> None:
        items = rng.sample(contents, rng.randint(1, 3))
        delivery = await node.encode(EmbeddingRequest(name, items, 120.0))
        check(delivery, items)
        await keep(rng.randrange(200))
        check(delivery, items)
        delivery.release()
        delivered[name] += 1

    rates = Rates(delay=0.05, fail=0.02, stale=0.02, hang=0.002)
    async with (
        encoder(2) as one,
        encoder(2) as other,
        prefill([one, other], 4, rates) as first,
        prefill([other, one], 4, rates) as second,
    ):
        async with asyncio.TaskGroup() as tasks:
            for number in range(60):
                tasks.create_task(ask(first, f"first-{number}"))
                tasks.create_task(ask(second, f"second-{number}"))
        assert len(delivered) == 120
        assert set(delivered.values()) == {1}
        for node in (one, other, first, second):
            await empty(node.listen)


async def test_a_consumer_that_keeps_everything_is_named_and_others_wait_their_time() -> None:
    async with encoder(4) as one, prefill([one], 2, room_s=0.3) as node:
        kept = await node.encode(EmbeddingRequest("keeper", [synthetic_item(MIB)], 20.0))
        also = await node.encode(EmbeddingRequest("keeper too", [synthetic_item(MIB - 4096)], 20.0))
        with capture_logs() as logs, pytest.raises(PoolExhausted) as refused:
            await node.encode(EmbeddingRequest("late", [synthetic_item(MIB)], 20.0))
        message = refused.value.message
        assert f"no room for {MIB} B within 0.3 s" in message
        assert f"{2 * MIB - 4096} B consumed, of {2 * MIB} B; the largest free piece has 4096 B" in message
        assert "keeper" not in message  # another client's names are nobody's business
        (said,) = [log for log in logs if log["event"] == "pool exhausted"]
        assert [name for name, *_ in said["largest_holders"]] == ["keeper", "keeper too"]
        kept.release()
        delivery = await node.encode(EmbeddingRequest("after", [synthetic_item(MIB)], 20.0))
        for one_more in (delivery, also):
            one_more.release()
        await empty(node.listen)


async def test_what_can_never_fit_is_refused_at_once_and_holds_up_nobody() -> None:
    async with encoder(2) as one, prefill([one], 2) as node:
        kept = await node.encode(EmbeddingRequest("keeper", [synthetic_item(MIB)], 20.0))
        three = [synthetic_item(MIB - 4 * number) for number in range(3)]
        with pytest.raises(RequestTooLarge, match="the pool has 2097152 B in regions of 1048576 B"):
            await node.encode(EmbeddingRequest("never", three, 20.0))
        small = await node.encode(EmbeddingRequest("small", [synthetic_item(4096)], 20.0))
        small.release()
        kept.release()
        await empty(node.listen)


@pytest.mark.slow
async def test_a_large_request_is_not_starved_by_small_ones() -> None:
    """Small ones pass it only for a second; then the pool is kept for it."""
    async with encoder(4) as one, prefill([one], 2) as node:
        is_over = asyncio.Event()

        async def small(number: int) -> None:
            turn = 0
            while not is_over.is_set():
                turn += 1
                items = [synthetic_item(4 * (number * 1_000 + turn % 7 + 60_000))]
                delivery = await node.encode(EmbeddingRequest(f"small-{number}-{turn}", items, 30.0))
                await keep(100)
                delivery.release()

        async def large() -> None:
            items = [synthetic_item(MIB), synthetic_item(MIB - 4)]  # the whole pool
            delivery = await node.encode(EmbeddingRequest("large", items, 30.0))
            check(delivery, items)
            delivery.release()
            is_over.set()

        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(small(number))
            tasks.create_task(large())
        await empty(node.listen)


async def test_a_part_of_a_shared_job_that_waits_for_room_does_not_hold_up_the_other() -> None:
    """The first subscriber has no room and gets none; the second one has it, and is served."""
    async with (
        encoder(1) as one,
        prefill([one], 1, room_s=60.0) as full,
        prefill([one], 1) as free,
    ):
        kept = await full.encode(EmbeddingRequest("keeper", [synthetic_item(MIB)], 20.0))
        wanted = synthetic_item(MIB - 4)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(full.encode(EmbeddingRequest("waits", [wanted], 60.0)))
            for number in range(3):  # each needs the one staging slot that a waiting subscriber must not hold
                other = synthetic_item(MIB - 8 - 4 * number)
                for item in (wanted, other):
                    name = f"{item.name} {number}"
                    delivery = await free.encode(EmbeddingRequest(name, [item], 20.0))
                    check(delivery, [item])
                    delivery.release()
            assert not waiting.done()
            kept.release()
            delivery = await waiting
            check(delivery, [wanted])
            delivery.release()
        for node in (one, full, free):
            await empty(node.listen)


@pytest.mark.slow
async def test_deadlines_end_what_queues_for_room_that_never_comes() -> None:
    async with encoder(4) as one, prefill([one], 1) as node:
        kept = await node.encode(EmbeddingRequest("keeper", [synthetic_item(MIB)], 60.0))
        codes: Counter[str] = Counter()

        async def ask(number: int) -> None:
            try:
                await node.encode(EmbeddingRequest(f"{number}", [synthetic_item(4 * number + 4096)], 0.5))
            except EpdError as error:
                codes[error.code] += 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(50):
                tasks.create_task(ask(number))
        assert codes == {"deadline": 50}
        kept.release()
        await empty(node.listen)
        await empty(one.listen)
