"""Encoders without a model, for tests of the forward worker; the worker imports them by name.

What an item does is said by its media, see `forward`.
"""

import os
from typing import Any

from epd.encoders.base import MediaItem
from epd.encoders.callables import CallableEncoder
from epd.protocol.errors import MediaInvalid
from epd.protocol.messages import DType, EmbeddingSpec, Probe

DIM = 4


def plan(probe: Probe, dtype: DType) -> EmbeddingSpec:
    return EmbeddingSpec(probe.width, DIM, dtype)


def preprocess(item: MediaItem) -> tuple[Probe, bytes]:
    media = bytes(item.media)
    if media == b"bad":
        raise MediaInvalid("bad media")
    return item.probe, media


def expected(probe: Probe, media: bytes) -> Any:
    """The rows of an item that does nothing special."""
    import numpy

    return numpy.arange(probe.width * DIM, dtype=numpy.float32).reshape(-1, DIM) + sum(media)


def forward(batch: list[tuple[Probe, bytes]]) -> list[Any]:
    results = []
    for probe, media in batch:
        word, _, argument = media.partition(b":")
        match word:
            case b"raise":
                raise RuntimeError("as told")
            case b"die":
                os._exit(7)
            case b"hang":  # says so through a FIFO, then never gives up the interpreter by itself
                with open(argument, "wb", buffering=0) as told:
                    told.write(b"!")
                while True:
                    pass
            case b"print":
                print("chatter of a model")  # noqa: T201 (to see where it goes)
        rows = expected(probe, media)
        results.append(rows[:-1] if word == b"short" else rows)
    return results


def forward_threads(batch: list[tuple[Probe, bytes]]) -> list[Any]:
    import torch

    return [
        torch.full((probe.width, DIM), torch.get_num_threads(), dtype=torch.bfloat16) for probe, _ in batch
    ]


def load_torch(num_threads: int, device: str) -> None:
    import torch  # noqa: F401 (only its default number of threads matters)


def fail_to_load(num_threads: int, device: str) -> None:
    raise RuntimeError("no such weights")


ECHO = CallableEncoder(
    name="echo",
    fingerprint="1",
    default_dtype="float32",
    plan=plan,
    preprocess=preprocess,
    forward=forward,
)
THREADS = CallableEncoder(
    name="threads",
    fingerprint="1",
    default_dtype="bfloat16",
    plan=plan,
    preprocess=preprocess,
    forward=forward_threads,
    load=load_torch,
)
UNLOADABLE = CallableEncoder(
    name="unloadable",
    fingerprint="1",
    default_dtype="float32",
    plan=plan,
    preprocess=preprocess,
    forward=forward,
    load=fail_to_load,
)
