"""Every message of the wire: one tagged union, encoded as msgpack arrays.

Rules of this file: the first fields of each message about a transfer are transfer, part, attempt
and, where memory is meant, grant. New fields go to the end and need defaults; unknown trailing
fields are ignored, which is what makes a rolling upgrade work. No pickle.
"""

from typing import Literal, dataclass_transform

import msgspec

from epd.protocol.ids import (
    Attempt,
    Incarnation,
    LeaseId,
    NodeId,
    Part,
    RegionId,
    Seal,
    TransferId,
    WriteId,
)

Role = Literal["encoder", "prefill", "client"]
MediaKind = Literal["image", "video", "audio"]
DType = Literal["float32", "bfloat16", "float16"]
WantedDType = Literal["model", "float32", "bfloat16", "float16"]
"""`model` is the model's own dtype; `EmbeddingMetadata` says which that is."""

WriteOutcome = Literal["written", "untouched", "unknown"]
"""Of a write into a window: acknowledged by the receiving engine; nothing was handed to an engine; failed,
and parts may still be on their way."""

ITEMSIZE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Struct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of nested wire values: positional, hashable."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages: positional, hashable, tagged with the class name."""


# -- values inside messages ------------------------------------------------------------------


class Probe(Struct):
    """What is known of an item without decoding it. `width` and `height` are after rotation."""

    kind: MediaKind
    width: int = 0
    height: int = 0
    frames: int = 1
    samples: int = 0


class Item(Struct):
    """One image, video or audio clip; `sha256` (32 bytes) names its media."""

    probe: Probe
    sha256: bytes
    media_nbytes: int


class AuxTensor(Struct):
    """A small typed tensor that travels along, e.g. `grid_thw`; `data` is little endian, C order."""

    name: str
    dtype: Literal["int64", "int32", "float32"]
    shape: tuple[int, ...]
    data: bytes


class EmbeddingSpec(Struct):
    """What one item will become: `rows` x `dim` of `dtype`, and its aux tensors."""

    rows: int
    dim: int
    dtype: DType
    aux: tuple[AuxTensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.rows * self.dim * ITEMSIZE_BYTES[self.dtype]


class Source(Struct):
    """Where one finished item lies in the encoder's staging pool, and the seal that proves it."""

    region: RegionId
    offset: int
    nbytes: int
    seal: Seal


class ReadyItem(Struct):
    """One item of a `ForwardDone`. `digest` is of the payload, if `verify = checksum`."""

    source: Source
    spec: EmbeddingSpec
    digest: bytes | None = None


class RegionDescriptor(Struct):
    """One staging region a reader may reach: `base` is its address where the plane has addresses."""

    region: RegionId
    base: int
    nbytes: int


class PeerLimits(Struct):
    """What a node accepts; the other side keeps below it or fails the request at once."""

    max_items_per_part: int
    max_region_nbytes: int
    max_media_nbytes: int


# -- sessions --------------------------------------------------------------------------------


class Hello(Message):
    """First frame of the dialler. Fingerprint, data plane and segment are empty from a client.

    `dial` counts the dials of this incarnation from 1 (0: not told): a `Hello` that was overtaken by
    that of a later dial is known by it.
    """

    node: NodeId
    incarnation: Incarnation
    role: Role
    protocol_version: int
    logic_version: int
    fingerprint: str
    data_plane: str
    segment: str
    limits: PeerLimits
    dial: int = 0


class Welcome(Message):
    """The listener's answer: the session is in force. `media_address` is `tcp://HOST:PORT`."""

    node: NodeId
    incarnation: Incarnation
    role: Role
    protocol_version: int
    logic_version: int
    fingerprint: str
    data_plane: str
    segment: str
    limits: PeerLimits
    media_address: str


class Rejected(Message):
    """Why there is no session (any more): a code of `errors.py` and a reason for people."""

    code: str
    reason: str


class Heartbeat(Message):
    """Liveness and load hints. Proves nothing about memory (I1)."""

    queued_items: int = 0
    queued_tokens: int = 0
    free_nbytes: int = 0


class Regions(Message):
    """The staging regions a reader of this incarnation may reach; sources are checked against it."""

    regions: tuple[RegionDescriptor, ...]


class Goodbye(Message):
    """Draining: no new work; every unstarted part gets `Failed(draining, retryable)`."""

    reason: str


# -- transfers -------------------------------------------------------------------------------


class EncodeRequest(Message):
    transfer: TransferId
    part: Part
    attempt: Attempt
    items: tuple[Item, ...]
    dtype: WantedDType
    remaining_ms: int
    traceparent: str | None = None


class EmbeddingMetadata(Message):
    transfer: TransferId
    part: Part
    attempt: Attempt
    specs: tuple[EmbeddingSpec, ...]


class BufferGrant(Message):
    """Room is reserved for all items of this part; `grant` is the lease's number."""

    transfer: TransferId
    part: Part
    attempt: Attempt
    grant: LeaseId


class ForwardDone(Message):
    """Items `first ..` of the request, as numbered in its `EncodeRequest`, may be read.

    Exactly one `ForwardDone` of an attempt is the `last`; ranges of one attempt do not overlap.
    """

    transfer: TransferId
    part: Part
    attempt: Attempt
    grant: LeaseId
    first: int
    items: tuple[ReadyItem, ...]
    last: bool


class Receipt(Message):
    """Items `first .. first + count` were read whole (or are not wanted): unpin."""

    transfer: TransferId
    part: Part
    attempt: Attempt
    grant: LeaseId
    first: int
    count: int
    last: bool


class Cancel(Message):
    """Unpin and forget this attempt."""

    transfer: TransferId
    part: Part
    attempt: Attempt


class Failed(Message):
    """The encoder ends the attempt. `item` is numbered as in the `EncodeRequest`."""

    transfer: TransferId
    part: Part
    attempt: Attempt
    code: str
    retryable: bool
    item: int | None
    reason: str


# -- push: only in sessions of two nodes with `direction = push` --------------------------------


class Windows(Message):
    """The prefill node's windows for this session, one per region of its pool; never told to another."""

    regions: tuple[RegionDescriptor, ...]


class PushWanted(Message):
    """Write `source`, and after it its seal's word, to `offset` of window `region`.

    A `write` that is not above all before it in the session is a repeat and is not done again.
    """

    write: WriteId
    source: Source
    region: RegionId
    offset: int


class EmbeddingWritten(Message):
    """The last word of a write; `unknown` stays the answer when it is asked about again."""

    write: WriteId
    outcome: WriteOutcome


class Reconcile(Message):
    """What is known of these writes? Those that were not begun are not to be begun."""

    writes: tuple[WriteId, ...]


class Drained(Message):
    """Nothing of these writes runs or is on its way."""

    writes: tuple[WriteId, ...]


# -- media -----------------------------------------------------------------------------------


class NeedMedia(Message):
    """Send the media of this key, from the start."""

    sha256: bytes


class MediaChunk(msgspec.Struct, frozen=True, array_like=True, tag=True, eq=False):
    """A piece of media on the media lane. `data` stays a view of the frame: no copy on decode."""

    sha256: bytes
    offset: int
    total_nbytes: int
    data: memoryview


class MediaMissing(Message):
    """The asked side no longer has the media of this key (its request has ended)."""

    sha256: bytes


# -- clients ---------------------------------------------------------------------------------


class Submit(Message):
    """A client's request: one transfer for all `items`. `rows` asks for the embeddings back."""

    request: int
    items: tuple[Item, ...]
    dtype: WantedDType
    remaining_ms: int
    rows: bool


class ErrorValue(Struct):
    """A typed error as a value: `item` is numbered as in the request."""

    code: str
    retryable: bool
    message: str
    item: int | None = None


class ItemOutcome(Struct):
    """What was delivered of one item: its shape, the SHA-256 of its bytes, its aux tensors.

    `verified`: the bytes were also compared with the digest the forward's worker computed.
    """

    spec: EmbeddingSpec
    nbytes: int
    sha256: bytes
    verified: bool = False


class Outcome(Message):
    """The one answer to a `Submit`: items, or an error. `states` are the state names seen."""

    request: int
    items: tuple[ItemOutcome, ...]
    error: ErrorValue | None
    states: tuple[str, ...] = ()


class Rows(msgspec.Struct, frozen=True, array_like=True, tag=True, eq=False):
    """A piece of one delivered item, on the media lane; they may come before or after its `Outcome`."""

    request: int
    item: int
    offset: int
    data: memoryview


class InventoryRequest(Message):
    """Asks a node for the counts of everything it holds (I4 seen from outside)."""


class Inventory(Message):
    """Counts by name, e.g. `slots`, `pins`, `jobs`, `timers`, `sockets`."""

    counts: dict[str, int]
    states: tuple[str, ...] = ()
    """State names that transfers have passed through on this node."""


ControlMessage = (
    Hello
    | Welcome
    | Rejected
    | Heartbeat
    | Regions
    | Goodbye
    | EncodeRequest
    | EmbeddingMetadata
    | BufferGrant
    | ForwardDone
    | Receipt
    | Cancel
    | Failed
    | Windows
    | PushWanted
    | EmbeddingWritten
    | Reconcile
    | Drained
    | NeedMedia
    | MediaMissing
    | Submit
    | Outcome
    | InventoryRequest
    | Inventory
)
MediaMessage = MediaChunk | Rows
AnyMessage = ControlMessage | MediaMessage
