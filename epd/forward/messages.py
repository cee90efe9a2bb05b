"""What node and worker process say to each other: one msgpack message per SEQPACKET datagram.

Media do not travel in messages: the memfd that comes with a `Batch` holds them, one after another.
"""

from typing import Final

import msgspec

from epd.encoders.media import PictureRules
from epd.protocol.messages import DType, EmbeddingSpec, ErrorValue, Message, Probe, Struct

MESSAGE_NBYTES: Final = 128 * 1024
"""Of one datagram; below the kernel's send buffer, so that one message always fits an empty socket."""


class RegionFd(Struct):
    """A staging region: its memfd's number in the worker, and its size."""

    region: int
    fd: int
    nbytes: int


class ItemTask(Struct):
    probe: Probe
    dtype: DType
    spec: EmbeddingSpec
    media_offset: int
    media_nbytes: int
    region: int
    offset: int


class ItemAnswer(Struct):
    error: ErrorValue | None
    digest: bytes | None


class Start(Message):
    """First message of the node. `batch_items` is how many items one forward takes at most."""

    encoder: str
    num_threads: int
    batch_items: int
    regions: tuple[RegionFd, ...]
    pictures: PictureRules


class Batch(Message):
    batch: int
    items: tuple[ItemTask, ...]
    digest: bool


class Ready(Message):
    """The model is loaded."""


class LoadFailed(Message):
    """The encoder cannot be had; the worker ends after this."""

    reason: str


class BatchEnded(Message):
    batch: int
    answers: tuple[ItemAnswer, ...]


encode: Final = msgspec.msgpack.Encoder().encode
decode_from_node: Final = msgspec.msgpack.Decoder(Start | Batch).decode
decode_from_worker: Final = msgspec.msgpack.Decoder(Ready | LoadFailed | BatchEnded).decode
