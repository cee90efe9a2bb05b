"""Frames and messages: limits, round trips, and that garbage is never anything but `Malformed`."""

import random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.protocol.errors import BY_CODE, MAX_MESSAGE_CHARS, EpdError, Malformed, error_from_value
from epd.protocol.ids import (
    Attempt,
    Incarnation,
    LeaseId,
    NodeId,
    Part,
    RegionId,
    Seal,
    SessionId,
    TransferId,
    WriteId,
)
from epd.protocol.messages import (
    AnyMessage,
    AuxTensor,
    BufferGrant,
    Cancel,
    Drained,
    EmbeddingMetadata,
    EmbeddingSpec,
    EmbeddingWritten,
    EncodeRequest,
    Failed,
    ForwardDone,
    Goodbye,
    Heartbeat,
    Hello,
    Inventory,
    InventoryRequest,
    Item,
    ItemOutcome,
    MediaChunk,
    MediaMissing,
    NeedMedia,
    Outcome,
    PeerLimits,
    Probe,
    PushWanted,
    ReadyItem,
    Receipt,
    Reconcile,
    RegionDescriptor,
    Regions,
    Rejected,
    Rows,
    Source,
    Submit,
    Welcome,
    Windows,
)
from epd.protocol.wire import (
    CONTROL_FRAME_NBYTES,
    FRAME_NBYTES,
    HEADER,
    HEADER_NBYTES,
    MAGIC,
    MAX_AUX_NBYTES,
    MAX_ITEMS_PER_PART,
    MEDIA_CHUNK_NBYTES,
    PROTOCOL_VERSION,
    Lane,
    build_frame,
    decode_body,
    encode_message,
    open_frame,
    split,
)

BIG = 2**64 - 1
SESSION = SessionId(BIG)
T, P, A, G = TransferId(BIG), Part(2**31), Attempt(2**31), LeaseId(BIG)
SHA = bytes(range(32))
AUX = (
    AuxTensor("grid_thw", "int64", (8, 3), b"\xff" * (MAX_AUX_NBYTES - 64)),
    AuxTensor("second_per_grid_ts", "float32", (16,), b"\xff" * 64),
)
SPEC = EmbeddingSpec(2**40, 2**20, "bfloat16", AUX)
SOURCE = Source(RegionId(2**31), 2**62, 2**62, Seal(BIG))
READY = ReadyItem(SOURCE, SPEC, b"\xff" * 16)
ITEM = Item(Probe("image", 2**20, 2**20, 2**20, 2**40), SHA, 2**50)
REASON = "ü" * MAX_MESSAGE_CHARS
MANY = range(MAX_ITEMS_PER_PART)
LIMITS = PeerLimits(128, 2**40, 2**40)
INCARNATION = Incarnation(BIG)
NODE = NodeId("encoder-host-1")
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

ABOUT_TRANSFERS: list[AnyMessage] = [
    EncodeRequest(T, P, A, tuple(ITEM for _ in MANY), "bfloat16", 2**50, TRACEPARENT),
    EmbeddingMetadata(T, P, A, tuple(SPEC for _ in MANY)),
    BufferGrant(T, P, A, G),
    ForwardDone(T, P, A, G, 0, tuple(READY for _ in MANY), last=True),
    Receipt(T, P, A, G, 0, 128, last=True),
    Cancel(T, P, A),
    Failed(T, P, A, "request_too_large", True, 127, REASON),
    Submit(BIG, tuple(ITEM for _ in MANY), "bfloat16", 2**50, rows=True),
    Outcome(BIG, tuple(ItemOutcome(SPEC, 2**60, SHA, True) for _ in MANY), None, ("buffer-registered",) * 7),
]
CONTROL: list[AnyMessage] = [
    *ABOUT_TRANSFERS,
    Hello(NODE, INCARNATION, "encoder", 1, 1, "f" * 64, "mooncake/tcp", "10.0.0.1:17000", LIMITS),
    Welcome(NODE, INCARNATION, "encoder", 1, 1, "f", "shm", "", LIMITS, "tcp://127.0.0.1:1"),
    Rejected("rejected", "protocol version 1, ours is 2"),
    Heartbeat(1, 2, 3),
    Regions((RegionDescriptor(RegionId(0), BIG, 2**40),)),
    Goodbye("draining"),
    Windows((RegionDescriptor(RegionId(0), BIG, 2**40),)),
    PushWanted(WriteId(BIG), SOURCE, RegionId(2**31), 2**62),
    EmbeddingWritten(WriteId(BIG), "unknown"),
    Reconcile((WriteId(BIG), WriteId(1))),
    Drained((WriteId(BIG),)),
    NeedMedia(SHA),
    MediaMissing(SHA),
    InventoryRequest(),
    Inventory({"slots": 1, "jobs": 0}, ("requested",)),
]
CHUNK = MediaChunk(SHA, 2**50, 2**51, memoryview(b"x" * MEDIA_CHUNK_NBYTES))
ROWS = Rows(1, 2, 3, memoryview(b"y" * MEDIA_CHUNK_NBYTES))


def frame_of(*messages: AnyMessage, lane: Lane = Lane.CONTROL, sequence: int = 5) -> bytes:
    return build_frame(lane, SESSION, sequence, [encode_message(message) for message in messages])


def read_frame(data: bytes, lane: Lane = Lane.CONTROL) -> list[AnyMessage]:
    return list(decode_body(open_frame(data, lane)))


# -- round trips and sizes ---------------------------------------------------------------------


def test_every_kind_of_message_is_tried_here() -> None:
    kinds = {kind for union in get_args(AnyMessage) for kind in (get_args(union) or (union,))}
    assert kinds == {type(message) for message in [*CONTROL, CHUNK, ROWS]}


@pytest.mark.parametrize("message", CONTROL, ids=lambda message: type(message).__name__)
def test_every_control_message_comes_back_as_it_was(message: AnyMessage) -> None:
    (back,) = read_frame(frame_of(message))
    assert back == message
    if not isinstance(back, Inventory):
        hash(back)


@pytest.mark.parametrize("message", [CHUNK, ROWS], ids=["MediaChunk", "Rows"])
def test_media_come_back_as_a_view_of_the_frame(message: MediaChunk | Rows) -> None:
    frame = frame_of(message, lane=Lane.MEDIA)
    assert len(frame) <= FRAME_NBYTES[Lane.MEDIA]
    (back,) = read_frame(frame, Lane.MEDIA)
    assert isinstance(back, MediaChunk | Rows)
    assert back.data == message.data
    assert isinstance(back.data, memoryview)
    assert back.data.obj is frame, "no copy"


@pytest.mark.parametrize("message", ABOUT_TRANSFERS, ids=lambda message: type(message).__name__)
def test_every_message_about_a_transfer_fits_a_frame(message: AnyMessage) -> None:
    assert len(frame_of(message)) <= CONTROL_FRAME_NBYTES


def test_transfer_part_attempt_and_grant_come_first() -> None:
    for message in ABOUT_TRANSFERS:
        if not isinstance(message, Submit | Outcome):
            fields = [field.name for field in msgspec.structs.fields(type(message))]
            assert fields[:3] == ["transfer", "part", "attempt"]
            assert "grant" not in fields[4:]


def test_unknown_trailing_fields_are_ignored() -> None:
    newer = msgspec.msgpack.encode(["Cancel", 1, 2, 3, "a field of the future"])
    (back,) = read_frame(build_frame(Lane.CONTROL, SESSION, 0, [newer]))
    assert back == Cancel(TransferId(1), Part(2), Attempt(3))


def test_the_header_says_lane_session_and_sequence() -> None:
    frame = open_frame(frame_of(Cancel(T, P, A), sequence=BIG), Lane.CONTROL)
    assert (frame.lane, frame.session, frame.sequence) == (Lane.CONTROL, SESSION, BIG)
    assert HEADER_NBYTES == 28


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300])
def test_a_frame_holds_any_number_of_messages_in_order(count: int) -> None:
    messages = [Cancel(TransferId(n), P, A) for n in range(count)]
    assert read_frame(frame_of(*messages)) == messages


@given(st.lists(st.integers(1, 30_000), max_size=30))
def test_split_keeps_the_order_and_the_limit_and_wastes_no_frame(sizes: list[int]) -> None:
    encoded = [bytes([n % 256]) * size for n, size in enumerate(sizes)]
    groups = split(encoded)
    assert [message for group in groups for message in group] == encoded
    nbytes = [len(build_frame(Lane.CONTROL, SESSION, 0, group)) for group in groups]
    assert all(n <= CONTROL_FRAME_NBYTES for n in nbytes)
    for n, following in zip(nbytes, groups[1:], strict=False):
        assert n + len(following[0]) + 2 > CONTROL_FRAME_NBYTES


def test_split_fills_a_frame_to_the_last_byte_and_refuses_one_more() -> None:
    room = CONTROL_FRAME_NBYTES - HEADER_NBYTES - 3
    assert split([b"x" * room]) == [[b"x" * room]]
    with pytest.raises(Malformed) as caught:
        split([b"x" * (room + 1)])
    assert caught.value.facts["reason"] == "size"


# -- what is refused ---------------------------------------------------------------------------

GOOD = frame_of(Cancel(T, P, A))


def header(**changes: Any) -> bytes:
    fields = {
        "magic": MAGIC,
        "version": PROTOCOL_VERSION,
        "lane": 0,
        "reserved": 0,
        "session": 1,
        "sequence": 0,
        "nbytes": 1,
    }
    return HEADER.pack(*(fields | changes).values()) + b"\x90"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "size"),
        (GOOD[: HEADER_NBYTES - 1], "size"),
        (GOOD + bytes(CONTROL_FRAME_NBYTES), "size"),
        (header(magic=b"EPDx"), "magic"),
        (header(version=PROTOCOL_VERSION + 1), "version"),
        (header(lane=1), "lane"),
        (header(lane=7), "lane"),
        (header(nbytes=0), "length"),
        (header(nbytes=2), "length"),
        (GOOD[:-1], "length"),
        (GOOD + b"x", "length"),
    ],
)
def test_a_wrong_header_is_refused_before_the_body_is_decoded(data: bytes, reason: str) -> None:
    with pytest.raises(Malformed) as caught:
        open_frame(data, Lane.CONTROL)
    assert caught.value.facts["reason"] == reason


def body(value: Any) -> bytes:
    encoded = msgspec.msgpack.encode(value)
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, 0, 0, 1, 0, len(encoded)) + encoded


@pytest.mark.parametrize(
    "value",
    [
        {},
        [None],
        [["NoSuchMessage"]],
        [["Cancel", 1, 2]],
        [["Cancel", 1, 2, "three"]],
        [["Cancel", 1, 2, 3.5]],
        [["MediaChunk", b"", 0, 0, b""]],
        [[1, 2, 3]],
        [["EncodeRequest", 1, 1, 1, [[["film"], b"", 1]], "float32", 1]],
    ],
)
def test_a_body_that_is_no_list_of_our_messages_is_refused(value: Any) -> None:
    with pytest.raises(Malformed) as caught:
        read_frame(body(value))
    assert caught.value.facts["reason"] == "body"


def test_a_control_message_is_refused_on_the_media_lane() -> None:
    with pytest.raises(Malformed):
        read_frame(frame_of(Cancel(T, P, A), lane=Lane.MEDIA), Lane.MEDIA)


@pytest.mark.parametrize(
    "nested", [b"\x91" * 5000, b"\x81\xa1x" * 5000, b"\xdf\xff\xff\xff\xff", b"\xc6" * 9]
)
def test_deep_nesting_and_lying_lengths_are_refused(nested: bytes) -> None:
    data = HEADER.pack(MAGIC, PROTOCOL_VERSION, 0, 0, 1, 0, len(nested)) + nested
    with pytest.raises(Malformed):
        read_frame(data)


def only_malformed(data: bytes, lane: Lane) -> bool:
    """Whether it was a frame; raises whatever is not `Malformed`."""
    try:
        messages = read_frame(data, lane)
    except Malformed as error:
        assert error.facts["reason"] in {"size", "magic", "version", "lane", "length", "body"}
        return False
    assert all(isinstance(message, msgspec.Struct) for message in messages)
    return True


@pytest.mark.slow
def test_twenty_thousand_garbled_frames_raise_nothing_but_malformed() -> None:
    chooser = random.Random(2)
    small = [frame_of(message) for message in CONTROL if len(encode_message(message)) < 4000]
    small.append(frame_of(EncodeRequest(T, P, A, (ITEM, ITEM), "model", 1, None)))
    small.append(frame_of(ForwardDone(T, P, A, G, 0, (READY, READY), last=True)))
    chunk = frame_of(MediaChunk(SHA, 0, 9, memoryview(b"123456789")), lane=Lane.MEDIA)
    good = 0
    for _ in range(20_000):
        lane = chooser.choice(list(Lane))
        data = bytearray(chunk if lane is Lane.MEDIA else chooser.choice(small))
        for _ in range(chooser.choice([0, 1, 1, 2, 8])):
            at = chooser.randrange(min(HEADER_NBYTES, len(data) - 1), len(data))
            how = chooser.randrange(4)
            if how == 0:
                data[at] = chooser.randrange(256)
            elif how == 1:
                data[at] ^= 1 << chooser.randrange(8)
            elif how == 2:
                data[at : at + chooser.randrange(9)] = chooser.randbytes(chooser.randrange(9))
            else:
                del data[at + 1 :]
        if (
            chooser.random() < 0.9 and len(data) >= HEADER_NBYTES
        ):  # a true length, so that the body is reached
            data[HEADER_NBYTES - 4 : HEADER_NBYTES] = (len(data) - HEADER_NBYTES).to_bytes(4, "little")
        good += only_malformed(bytes(data), lane)
    assert 4000 < good < 19_000, "both kinds were among them"


@settings(max_examples=500)
@given(st.binary(max_size=300), st.sampled_from(list(Lane)), st.booleans())
def test_random_bytes_raise_nothing_but_malformed(data: bytes, lane: Lane, dressed: bool) -> None:
    if dressed:
        data = HEADER.pack(MAGIC, PROTOCOL_VERSION, lane, 0, 1, 0, len(data)) + data
    only_malformed(data, lane)


# -- errors ------------------------------------------------------------------------------------


def test_every_error_has_a_code_of_its_own_and_survives_the_wire() -> None:
    kinds = set[type[EpdError]]()
    waiting = [EpdError]
    while waiting:
        kind = waiting.pop()
        kinds.add(kind)
        waiting.extend(kind.__subclasses__())
    assert {kind for kind in kinds if kind.__module__ == "epd.protocol.errors"} == set(BY_CODE.values())
    for code, kind in BY_CODE.items():
        value = kind("what happened", nbytes=5).as_value(3)
        back = error_from_value(value)
        assert (value.code, value.retryable, value.item) == (code, kind.retryable, 3)
        assert (type(back), back.message, back.facts) == (kind, "what happened", {"item": 3})


def test_a_long_message_of_an_error_is_cut_for_the_wire() -> None:
    error = EpdError("x" * 10**6)
    assert len(error.as_value().message) == MAX_MESSAGE_CHARS
    assert len(error.message) == 10**6
