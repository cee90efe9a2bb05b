"""`EmbeddingReceiver` in a synchronous loop: submit, poll, use, release, cancel, close."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from structlog.testing import capture_logs

from epd.config import Config, load_config
from epd.protocol.errors import Cancelled, ConfigError, RequestTooLarge
from epd.receiver import EmbeddingReceiver
from epd.request import Delivery, EmbeddingRequest
from epd.testing.processes import HeldProcess, held_encoder
from epd.testing.synthetic import pattern, synthetic_item

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def encoder() -> Iterator[HeldProcess]:
    settings = {"data_plane": "shm", "log_format": "json", "timeouts.dedup_retention_s": 0.2}
    with held_encoder(settings, encoder="synthetic") as process:
        yield process


def config(encoder: HeldProcess) -> Config:
    overrides = {
        "role": "prefill",
        "data_plane": "shm",
        "encoders": [encoder.listen],
        "pool.regions": 1,
        "pool.region_nbytes": 2 * MIB,
    }
    return load_config(None, overrides)


@pytest.fixture
def receiver(encoder: HeldProcess) -> Iterator[EmbeddingReceiver]:
    with EmbeddingReceiver.start(config(encoder)) as started:
        yield started


def poll_until(receiver: EmbeddingReceiver, count: int) -> list[Delivery]:
    """What a scheduler does: poll each step. Raises `TimeoutError`."""
    ended: list[Delivery] = []
    limit_s = time.monotonic() + 30
    while len(ended) < count:
        if time.monotonic() > limit_s:
            raise TimeoutError(f"{len(ended)} of {count} ended")
        ended += receiver.poll()
    return ended


def test_a_delivery_is_tensors_that_view_the_pool_until_it_is_released(receiver: EmbeddingReceiver) -> None:
    items = [synthetic_item(4096), synthetic_item(512)]
    receiver.submit(EmbeddingRequest("r", items, 20.0))
    (delivery,) = poll_until(receiver, 1)
    assert (delivery.request_id, delivery.error) == ("r", None)
    for item, tensor in zip(items, delivery.tensors, strict=True):
        assert tensor.dtype == torch.float32
        assert bytes(tensor.flatten().view(torch.uint8).numpy()) == pattern(item.media, tensor.nbytes)
    assert delivery.tensors[0].data_ptr() == delivery.tensors[0].data_ptr()
    del tensor
    delivery.release()
    delivery.release()
    assert delivery.views == ()


def test_polling_an_idle_receiver_gives_nothing(receiver: EmbeddingReceiver) -> None:
    assert receiver.poll() == []


def test_an_error_comes_out_of_poll_and_needs_no_release(receiver: EmbeddingReceiver) -> None:
    receiver.submit(EmbeddingRequest("large", [synthetic_item(3 * MIB)], 20.0))
    (delivery,) = poll_until(receiver, 1)
    assert isinstance(delivery.error, RequestTooLarge)
    with pytest.raises(RequestTooLarge):
        _ = delivery.tensors


def test_room_comes_back_by_release_and_by_nothing_else(receiver: EmbeddingReceiver) -> None:
    receiver.submit(EmbeddingRequest("first", [synthetic_item(2 * MIB)], 20.0))
    (first,) = poll_until(receiver, 1)
    receiver.submit(EmbeddingRequest("second", [synthetic_item(MIB)], 0.5))
    (second,) = poll_until(receiver, 1)
    assert second.error is not None
    assert second.error.code == "deadline"
    first.release()
    receiver.submit(EmbeddingRequest("third", [synthetic_item(MIB)], 20.0))
    (third,) = poll_until(receiver, 1)
    assert third.error is None
    third.release()


def test_a_cancelled_request_comes_out_cancelled_before_and_after_its_delivery(
    receiver: EmbeddingReceiver, encoder: HeldProcess
) -> None:
    encoder.hold("forward")
    receiver.submit(EmbeddingRequest("running", [synthetic_item(800)], 20.0))
    encoder.wait_reached("forward")
    receiver.cancel("running")
    (ended,) = poll_until(receiver, 1)
    assert isinstance(ended.error, Cancelled)
    encoder.release("forward")

    delivered = threading.Event()
    sink = receiver._sink

    def noting(delivery: Delivery) -> None:
        sink(delivery)
        delivered.set()

    receiver._sink = noting  # type: ignore[method-assign]  # to know that it lies in the queue
    receiver.submit(EmbeddingRequest("lying", [synthetic_item(1600)], 20.0))
    assert delivered.wait(30)
    receiver.cancel("lying")
    (ended,) = poll_until(receiver, 1)
    assert isinstance(ended.error, Cancelled)
    receiver.cancel("lying")  # ended: nothing more comes of it
    assert receiver.poll() == []


def test_a_delivery_that_is_dropped_is_reported_with_its_request(receiver: EmbeddingReceiver) -> None:
    receiver.submit(EmbeddingRequest("dropped", [synthetic_item(64)], 20.0))
    with capture_logs() as logs:
        deliveries = poll_until(receiver, 1)
        deliveries.clear()
    dropped = [entry for entry in logs if entry["event"] == "delivery dropped without release()"]
    assert [entry["request"] for entry in dropped] == ["dropped"]


def test_closing_with_open_requests_ends_the_thread(encoder: HeldProcess) -> None:
    before = threading.active_count()
    receiver = EmbeddingReceiver.start(config(encoder))
    for number in range(5):
        receiver.submit(EmbeddingRequest(f"{number}", [synthetic_item(4 * number)], 20.0))
    receiver.close()
    receiver.close()
    assert threading.active_count() == before


def test_what_keeps_the_node_from_starting_is_raised_by_start(encoder: HeldProcess) -> None:
    taken = load_config(
        None,
        {"role": "prefill", "data_plane": "shm", "encoders": ["tcp://127.0.0.1:9"], "listen": encoder.listen},
    )
    with pytest.raises(ConfigError, match="cannot bind"):
        EmbeddingReceiver.start(taken)
