"""Whole nodes in one loop, over real sockets and real planes: refusals, sharing, draining, restarts."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from node_pairs import PLANES, empty

from epd.client import NodeClient
from epd.config import load_config
from epd.encoders.media import DEFAULT_RULES
from epd.memory.tensors import host_bytes
from epd.node import EncoderNode, PrefillNode
from epd.node.encoder import make_worker
from epd.protocol.errors import Cancelled, DeadlineExceeded, Draining, RequestTooLarge, UnsupportedItem
from epd.protocol.messages import AuxTensor, Cancel, DType, EmbeddingSpec, Probe
from epd.protocol.session import Dialling
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.runtime import dialler
from epd.runtime.addresses import Address, resolve
from epd.testing.hold_points import HeldWorker, HoldPoints
from epd.testing.synthetic import PatternWorker, SyntheticEncoder, pattern, synthetic_item

MIB = 1024 * 1024


def encoder_node(worker: Any = None, **settings: Any) -> EncoderNode:
    overrides = {"role": "encoder", "data_plane": "shm", "timeouts.dedup_retention_s": 0.2}
    config = load_config(None, overrides | {key.replace("__", "."): value for key, value in settings.items()})
    return EncoderNode(config, encoder=SyntheticEncoder(), worker=worker or PatternWorker())


class OddPlans(SyntheticEncoder):
    """Has a bug for each odd width below 8."""

    def plan(self, probe: Probe, dtype: DType) -> EmbeddingSpec:
        match probe.width:
            case 1:
                raise ZeroDivisionError("a user's bug")
            case 3:
                return EmbeddingSpec(-1, 1, dtype)
            case 5:
                return EmbeddingSpec(5, 1, dtype, (AuxTensor("a", "int32", (64,), b"\0" * 256),))
            case _:
                return super().plan(probe, dtype)


def prefill_node(*encoders: str, **settings: Any) -> PrefillNode:
    overrides = {"role": "prefill", "data_plane": "shm", "encoders": encoders}
    config = load_config(None, overrides | {key.replace("__", "."): value for key, value in settings.items()})
    return PrefillNode(config)


@contextlib.asynccontextmanager
async def pair(plane: str = "shm", **settings: Any) -> AsyncIterator[tuple[EncoderNode, PrefillNode]]:
    async with (
        encoder_node(data_plane=plane) as encoder,
        prefill_node(encoder.listen, data_plane=plane, **settings) as prefill,
    ):
        yield encoder, prefill


def request(name: str, *items: ImageItem, deadline_s: float = 20.0) -> EmbeddingRequest:
    return EmbeddingRequest(name, items, deadline_s)


def check(delivery: Delivery, *items: ImageItem) -> None:
    for item, view in zip(items, delivery.views, strict=True):
        assert bytes(host_bytes(view)) == pattern(item.media, view.nbytes)


async def test_a_request_larger_than_the_pool_is_refused_at_once_with_sizes() -> None:
    async with pair(pool__regions=2, pool__region_nbytes=MIB) as (_, prefill):
        items = [synthetic_item(MIB - 256 * n) for n in range(3)]
        with pytest.raises(RequestTooLarge, match=r"3 items of 3144960 B .* 2097152 B in regions"):
            await prefill.encode(request("large", *items))
        delivery = await prefill.encode(request("fits", items[0]))
        check(delivery, items[0])
        delivery.release()


async def test_a_result_that_is_given_up_for_room_leaves_nothing_behind() -> None:
    """Retained, and wanted by nobody any more: its end has no effect that anybody would hear of."""
    settings = {"staging__regions": 1, "staging__region_nbytes": MIB, "timeouts__dedup_retention_s": 600.0}
    async with encoder_node(**settings) as encoder, prefill_node(encoder.listen) as prefill:
        for nbytes in (600_000, 600_004, 600_008):
            (await prefill.encode(request(f"{nbytes}", synthetic_item(nbytes)))).release()
        async with NodeClient(encoder.listen) as client:
            while (counts := (await client.inventory()).counts)["parts"]:
                pass  # the last receipt is on its way
        assert counts["jobs"] == 1


async def test_an_item_larger_than_a_region_of_either_side_is_refused_at_once_with_sizes() -> None:
    async with pair(pool__regions=2, pool__region_nbytes=MIB) as (_, prefill):
        with pytest.raises(RequestTooLarge, match="the largest 2097152 B"):
            await prefill.encode(request("receive", synthetic_item(2 * MIB)))
        with pytest.raises(RequestTooLarge, match="a staging region has 67108864 B"):
            await prefill.encode(request("staging", synthetic_item(64 * MIB)))
        await empty(prefill.listen)


@pytest.mark.parametrize("plane", PLANES)
async def test_nothing_is_registered_per_request(plane: str) -> None:
    async with pair(plane) as (encoder, prefill):
        item = synthetic_item(2 * MIB)
        (await prefill.encode(request("first", item))).release()
        before = (encoder.plane.registrations(), prefill.plane.registrations())
        for number in range(20):
            (await prefill.encode(request(f"{number}", item, synthetic_item(4 * number)))).release()
        assert (encoder.plane.registrations(), prefill.plane.registrations()) == before
        # Over Mooncake TCP the receive pool is never registered: nobody could write it anyway.
        assert before == ((4, 0) if plane == "mooncake" else (0, 0))


async def test_equal_pictures_in_flight_share_one_forward() -> None:
    points = HoldPoints()
    points.hold("forward")
    worker = HeldWorker(PatternWorker(), points)
    async with encoder_node(worker) as encoder, prefill_node(encoder.listen) as prefill:
        item = synthetic_item(4096)
        async with asyncio.TaskGroup() as requests:
            asked = [requests.create_task(prefill.encode(request(f"{n}", item, item))) for n in range(5)]
            await asyncio.to_thread(points.wait_reached, "forward")
            points.release("forward")
            worker.resume()
        for task in asked:
            check(task.result(), item, item)
            task.result().release()
        assert encoder.dedup.forwards == 1
        await empty(encoder.listen)


async def test_a_draining_encoder_hands_unstarted_parts_back_and_they_go_elsewhere() -> None:
    """All room is taken, so no part has a grant yet when the encoder drains."""
    async with (
        encoder_node() as first,
        encoder_node() as second,
        prefill_node(first.listen, second.listen, pool__regions=1, pool__region_nbytes=MIB) as prefill,
    ):
        item = synthetic_item(MIB)
        blocker = await prefill.encode(request("blocker", item))
        for node in (first, second):
            await empty(node.listen)  # its part is over, so what is open from here on is not granted
        async with asyncio.TaskGroup() as requests:
            items = [synthetic_item(MIB - 4 * n) for n in range(1, 7)]
            asked = [requests.create_task(_encode_and_release(prefill, it)) for it in items]
            while sum(len(node.encode._parts) for node in (first, second)) < len(items):
                await asyncio.to_thread(int)  # lets the loop's other work go on
            assert len(first.encode._parts) > 0
            assert await first.drain(10.0)
            blocker.release()
        assert all(task.done() for task in asked)
        assert first.encode.outcomes.get("draining", 0) > 0


async def _encode_and_release(prefill: PrefillNode, item: ImageItem) -> None:
    delivery = await prefill.encode(request(f"{item.name}", item))
    check(delivery, item)
    delivery.release()


async def test_a_draining_prefill_node_takes_no_new_requests_and_ends_the_running_ones() -> None:
    async with pair() as (_, prefill):
        held = await prefill.encode(request("held", synthetic_item(4096)))
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(prefill.drain(10.0))
            await asyncio.to_thread(int)
            with pytest.raises(Draining):
                await prefill.encode(request("late", synthetic_item(4)))
            assert not draining.done()
            held.release()
        assert draining.result()


async def test_an_encoder_that_restarts_on_its_port_is_met_again_and_requests_go_on() -> None:
    async with encoder_node() as first:
        address = first.listen
        async with prefill_node(address) as prefill:
            item = synthetic_item(70_000)
            (await prefill.encode(request("before", item))).release()
            await first.__aexit__(None, None, None)
            pending = asyncio.ensure_future(prefill.encode(request("after", item)))
            async with encoder_node(listen=address) as second:
                assert second.incarnation != first.incarnation
                delivery = await pending
                check(delivery, item)
                delivery.release()


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["does not answer", "does not resolve"])
async def test_an_address_without_an_encoder_delays_no_request_that_another_can_serve(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dial is undecided from before the first request until after the last one."""
    nobody = asyncio.Event()

    async def resolve_others(address: Address) -> list[Address]:
        if address.host == "nobody.invalid":
            await nobody.wait()
        return await resolve(address)

    monkeypatch.setattr(dialler, "resolve", resolve_others)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}" if absent == "does not answer" else "tcp://nobody.invalid:7101"
        async with (
            encoder_node() as encoder,
            prefill_node(address, encoder.listen, timeouts__connect_s=60.0) as prefill,
        ):
            for number in range(3):
                items = [synthetic_item(4096 + 4 * number + n) for n in range(4)]
                delivery = await prefill.encode(request(f"{number}", *items))
                check(delivery, *items)
                delivery.release()
            dials = [state for _, _, state in prefill.endpoint.live() if isinstance(state, Dialling)]
            assert len(dials) == 1
            assert len(prefill.endpoint.peers()) == 1


async def test_a_cancelled_request_ends_with_cancelled_and_leaves_nothing() -> None:
    points = HoldPoints()
    points.hold("forward")
    worker = HeldWorker(PatternWorker(), points)
    async with encoder_node(worker) as encoder, prefill_node(encoder.listen) as prefill:
        ended: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        prefill.submit(request("r", synthetic_item(4096)), ended.set_result)
        await asyncio.to_thread(points.wait_reached, "forward")
        prefill.cancel("r")
        assert isinstance((await ended).error, Cancelled)
        points.release("forward")
        worker.resume()
        await empty(prefill.listen)
        await empty(encoder.listen)


async def test_a_part_that_ends_by_the_encoders_own_deadline_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cancel of the other side comes later, or never."""
    points = HoldPoints()
    points.hold("forward")
    worker = HeldWorker(PatternWorker(), points)
    async with encoder_node(worker) as encoder, prefill_node(encoder.listen) as prefill:
        send = prefill.endpoint.send
        monkeypatch.setattr(
            prefill.endpoint, "send", lambda to, message: isinstance(message, Cancel) or send(to, message)
        )
        with pytest.raises(DeadlineExceeded):
            await prefill.encode(request("r", synthetic_item(4096), deadline_s=0.2))
        points.release("forward")
        worker.resume()
        await empty(encoder.listen)
        assert not encoder.encode._of_session
        assert not encoder.encode._phases_s


async def test_names_are_compared_whole_so_that_cancelling_one_request_leaves_its_namesake() -> None:
    """SGLang W20: an abort of `req1` also hit `req10`."""
    points = HoldPoints()
    points.hold("forward")
    worker = HeldWorker(PatternWorker(), points)
    async with encoder_node(worker) as encoder, prefill_node(encoder.listen) as prefill:
        async with asyncio.TaskGroup() as requests:
            kept = requests.create_task(prefill.encode(request("req10", synthetic_item(64))))
            await asyncio.to_thread(points.wait_reached, "forward")
            prefill.cancel("req1")
            points.release("forward")
            worker.resume()
        kept.result().release()


async def test_a_pool_that_is_full_serves_the_rest_as_it_is_released() -> None:
    async with pair(pool__regions=1, pool__region_nbytes=MIB) as (encoder, prefill):
        items = [synthetic_item(MIB // 2 - 4 * n) for n in range(12)]
        async with asyncio.TaskGroup() as requests:
            for item in items:
                requests.create_task(_encode_and_release(prefill, item))
        await empty(prefill.listen)
        await empty(encoder.listen)


async def test_staging_that_is_full_evicts_what_nobody_reads() -> None:
    async with (
        encoder_node(
            staging__regions=1, staging__region_nbytes=MIB, timeouts__dedup_retention_s=600.0
        ) as encoder,
        prefill_node(encoder.listen) as prefill,
    ):
        for number in range(8):
            await _encode_and_release(prefill, synthetic_item(MIB // 2 - 4 * number))
        assert encoder.dedup.forwards == 8
        assert encoder.buffers.counts()["staged"] <= 2


async def test_a_result_is_not_evicted_before_those_who_wait_for_it_could_pin_it() -> None:
    """Else two jobs that wait for the one slot evict each other's results for ever."""
    async with (
        encoder_node(staging__regions=1, staging__region_nbytes=MIB) as encoder,
        prefill_node(encoder.listen) as prefill,
    ):
        both = [synthetic_item(MIB - 1024 - 4 * number) for number in range(2)]
        delivery = await prefill.encode(request("both", *both, deadline_s=10.0))
        delivery.release()
        assert encoder.dedup.forwards == 2


async def test_a_plan_that_raises_or_cannot_be_fails_its_item_and_the_encoder_goes_on() -> None:
    config = load_config(None, {"role": "encoder", "data_plane": "shm"})
    async with (
        EncoderNode(config, encoder=OddPlans(), worker=PatternWorker()) as encoder,
        prefill_node(encoder.listen) as prefill,
    ):
        for rows, why in ((1, "ZeroDivisionError: a user's bug"), (3, "plans -1x1"), (5, "257 B")):
            with pytest.raises(UnsupportedItem, match=why):
                await prefill.encode(request(f"{rows}", synthetic_item(4 * rows)))
        await _encode_and_release(prefill, synthetic_item(4 * 8))


async def test_a_node_that_has_ended_leaves_no_timer_in_the_callers_loop() -> None:
    async with encoder_node(timeouts__dedup_retention_s=600.0) as encoder:
        async with prefill_node(encoder.listen) as prefill:
            await _encode_and_release(prefill, synthetic_item(64))
            prefill.submit(request("open", synthetic_item(4)), lambda _: None)
            assert len(prefill.runtime.timers) > 0
        assert len(encoder.runtime.timers) > 0  # the result's retention, for one
    assert len(prefill.runtime.timers) == len(encoder.runtime.timers) == 0


@pytest.mark.parametrize(
    ("device", "form", "given"),
    [
        ("cpu", "ProcessWorker", ("builtin:qwen2-vl", 2, 3, DEFAULT_RULES)),
        ("cuda:1", "ThreadWorker", ("builtin:qwen2-vl", "cuda:1", 2, 3, DEFAULT_RULES)),
    ],
)
def test_the_forward_worker_has_the_form_of_the_device_and_the_settings(
    monkeypatch: pytest.MonkeyPatch, device: str, form: str, given: tuple[object, ...]
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(f"epd.node.encoder.{form}", lambda *arguments: made.append(arguments))
    make_worker(load_config(None, {"role": "encoder", "worker.threads": 2, "worker.batch_items": 3}), device)
    assert made == [given]


class Gate:
    """What a consumer has queued on a GPU: done when it says so."""

    done = False

    def query(self) -> bool:
        return self.done


async def test_a_slot_is_leased_again_only_after_what_the_consumer_has_queued() -> None:
    async with pair(pool__regions=1, pool__region_nbytes=MIB) as (_, prefill):
        first = await prefill.encode(request("first", synthetic_item(MIB)))
        gate = Gate()
        assert first._notify is not None
        first._notify("released", gate)
        ended: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        prefill.submit(request("second", synthetic_item(MIB - 256)), ended.set_result)
        for _ in range(3):  # each is a round through every actor and back
            with pytest.raises(RequestTooLarge):
                await prefill.encode(request("large", synthetic_item(2 * MIB)))
        assert not ended.done()
        assert prefill.counts()["slots"] == 1
        gate.done = True
        async with asyncio.timeout(20.0):
            second = await ended
        assert second.error is None
        second.release()
        first.release()
