"""What the forward worker does with a batch: groups, failures, and the place of each result."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import xxhash

from epd.encoders.base import MediaItem
from epd.encoders.callables import CallableEncoder
from epd.forward import messages as m
from epd.forward.batches import BatchRunner
from epd.forward.worker import MappedStore, run_batch
from epd.protocol.errors import MediaInvalid
from epd.protocol.messages import DType, EmbeddingSpec, Probe

DIM = 2


@pytest.fixture
def region() -> Iterator[bytearray]:
    yield bytearray(b"\xaa" * 4096)


class Runner:
    """What the worker's process does with the batches of its node."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner

    def run(self, batch: m.Batch, media_fd: int) -> tuple[m.ItemAnswer, ...]:
        return run_batch(self._runner, batch, media_fd)


class Recorder:
    """An encoder that keeps the batches it was given; a media byte is an item's value."""

    def __init__(self, result: Callable[[bytes], Any]) -> None:
        self.batches: list[list[bytes]] = []
        self._result = result

    def forward(self, batch: list[bytes]) -> list[Any]:
        self.batches.append(batch)
        return [self._result(media) for media in batch if media != b"lost"]

    def preprocess(self, item: MediaItem) -> bytes:
        media = bytes(item.media)
        if media == b"bad":
            raise MediaInvalid("bad " + "x" * 5000)
        return media

    def runner(self, region: bytearray, batch_items: int) -> Runner:
        encoder = CallableEncoder(
            name="recorder",
            fingerprint="",
            default_dtype="float32",
            plan=lambda probe, dtype: EmbeddingSpec(probe.width, DIM, dtype),
            preprocess=self.preprocess,
            forward=self.forward,
        )
        return Runner(BatchRunner(encoder, MappedStore({7: memoryview(region)}), batch_items))


def ones(media: bytes) -> Any:
    if media == b"raise":
        raise RuntimeError("as told")
    return numpy.full((1, DIM), media[0], dtype=numpy.float32)


def batch(
    *media: bytes, rows: int = 1, dtype: DType = "float32", region: int = 7, step: int = 16
) -> tuple[m.Batch, int]:
    fd = os.memfd_create("epd-test")
    os.write(fd, b"".join(media))
    tasks = []
    offset = 0
    for number, one in enumerate(media):
        spec = EmbeddingSpec(rows, DIM, dtype)
        probe = Probe("image", width=rows)
        tasks.append(m.ItemTask(probe, dtype, spec, offset, len(one), region, step * number))
        offset += len(one)
    return m.Batch(1, tuple(tasks), digest=True), fd


def codes(answers: tuple[m.ItemAnswer, ...]) -> list[str | None]:
    return [answer.error.code if answer.error else None for answer in answers]


@pytest.mark.parametrize(
    ("batch_items", "groups"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (8, [3])], ids=str
)
def test_a_forward_takes_as_many_items_as_was_said(
    region: bytearray, batch_items: int, groups: list[int]
) -> None:
    recorder = Recorder(ones)
    answers = recorder.runner(region, batch_items).run(*batch(b"a", b"b", b"c"))
    assert [len(group) for group in recorder.batches] == groups
    for number, (answer, media) in enumerate(zip(answers, (b"a", b"b", b"c"), strict=True)):
        payload = ones(media).tobytes()
        assert region[16 * number : 16 * number + 8] == payload
        assert region[16 * number + 8 : 16 * number + 16] == b"\xaa" * 8
        assert answer == m.ItemAnswer(None, xxhash.xxh3_128_digest(payload))


@pytest.mark.parametrize("batch_items", [1, 2, 5])
@pytest.mark.parametrize(
    ("media", "code"),
    [(b"bad", "media_invalid"), (b"raise", "forward_failed"), (b"lost", "forward_failed")],
)
def test_whoever_spoils_a_common_forward_fails_alone(
    region: bytearray, batch_items: int, media: bytes, code: str
) -> None:
    answers = Recorder(ones).runner(region, batch_items).run(*batch(b"a", media, b"c"))
    assert codes(answers) == [None, code, None]
    assert region[16:32] == b"\xaa" * 16
    assert (region[0:8], region[32:40]) == (ones(b"a").tobytes(), ones(b"c").tobytes())


def test_an_error_text_is_cut_so_that_a_batch_of_errors_fits_a_message(region: bytearray) -> None:
    answers = Recorder(ones).runner(region, 1).run(*batch(*[b"bad"] * 128, step=0))
    assert len(m.encode(m.BatchEnded(1, answers))) < m.MESSAGE_NBYTES


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (numpy.zeros((2, DIM), numpy.float32), "media_mismatch"),
        (numpy.zeros((1, DIM + 1), numpy.float32), "media_mismatch"),
        (numpy.zeros(DIM, numpy.float32), "media_mismatch"),
        (numpy.zeros((1, DIM), numpy.float64), "forward_failed"),
        (numpy.zeros((1, DIM), numpy.float16), "forward_failed"),
        (None, "forward_failed"),
    ],
    ids=["rows", "dim", "shape", "wider-dtype", "narrower-dtype", "nothing"],
)
def test_a_result_other_than_announced_is_not_written(region: bytearray, result: Any, code: str) -> None:
    answers = Recorder(lambda media: result).runner(region, 1).run(*batch(b"a"))
    assert codes(answers) == [code]
    assert region == b"\xaa" * 4096


@pytest.mark.parametrize(("number", "step"), [(8, 0), (7, 4096 - 4)], ids=["region", "end"])
def test_a_place_outside_the_regions_is_not_written(region: bytearray, number: int, step: int) -> None:
    answers = Recorder(ones).runner(region, 1).run(*batch(b"a", b"b", region=number, step=step))
    assert codes(answers)[1] == "forward_failed"
    assert region[8:] == b"\xaa" * 4088


def test_rows_that_are_not_contiguous_are_written_in_their_order(region: bytearray) -> None:
    rows = numpy.arange(6, dtype=numpy.float32).reshape(DIM, 3).T
    answers = Recorder(lambda media: rows).runner(region, 1).run(*batch(b"a", rows=3))
    assert codes(answers) == [None]
    assert bytes(region[:24]) == rows.tobytes(order="C")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_of_each_dtype_are_written_as_they_are(region: bytearray, dtype: DType) -> None:
    import torch

    rows = torch.arange(6).reshape(DIM, 3).T.to(getattr(torch, dtype)).requires_grad_()
    answers = Recorder(lambda media: rows).runner(region, 1).run(*batch(b"a", rows=3, dtype=dtype))
    assert codes(answers) == [None]
    written = torch.frombuffer(region, dtype=rows.dtype, count=6).reshape(3, DIM)
    assert torch.equal(written, rows.detach())
