import contextlib
import zlib
from io import BytesIO

import msgspec
import pytest
import toy_door as door
from hypothesis import given
from hypothesis import strategies as st

from epd.protocol import trace
from epd.protocol.ids import Incarnation, NodeId
from epd.protocol.trace import (
    LimitsRecord,
    StateRecord,
    StepRecord,
    TraceHeader,
    TraceReader,
    UnreadableTrace,
    encode_block,
    encode_header,
)

HEADER = TraceHeader(node=NodeId("node"), role="encoder", incarnation=Incarnation(7), started_unix_s=1.5)


def a_trace(steps: int = 3) -> bytes:
    data = encode_header(HEADER) + encode_block([("door", door.Limits(4.0))])
    return data + encode_block([a_step(n) for n in range(steps)]) if steps else data


def a_step(n: int) -> trace.StepWritten:
    return "door", (n, "front"), n + 0.1, door.Opened("ann"), (door.Ring("ann"),)


def of_format_1(steps: int = 3) -> bytes:
    """As 0.1.0 wrote it: every record with its length before it."""
    header = msgspec.structs.replace(HEADER, format_version=1)
    records: list[object] = [header, ("door", door.Limits(4.0)), *map(a_step, range(steps))]
    bodies = [msgspec.msgpack.encode(record) for record in records]
    return b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


def header_with(**changes: object) -> bytes:
    body = msgspec.msgpack.encode(msgspec.to_builtins(HEADER) | changes)
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(("data", "version"), [(a_trace(), 2), (of_format_1(), 1)])
def test_what_is_written_is_read(data: bytes, version: int) -> None:
    reader = TraceReader(BytesIO(data).read)
    assert reader.header == msgspec.structs.replace(HEADER, format_version=version)
    limits, *steps = reader
    assert isinstance(limits, LimitsRecord)
    assert msgspec.msgpack.decode(limits.limits, type=door.Limits) == door.Limits(4.0)
    assert [step[:3] for step in steps] == [("door", (n, "front"), n + 0.1) for n in range(3)]
    assert isinstance(steps[0], StepRecord)
    assert msgspec.msgpack.decode(steps[0].event, type=door.AnyEvent) == door.Opened("ann")
    assert not reader.torn


@pytest.mark.parametrize("key", [3, 2**64 - 1, "front", (1, "a", 2)])
def test_keys_come_back_as_they_were(key: trace.Key) -> None:
    step_block = encode_block([("door", key, 1.0, door.BrickedUp(), ())])
    state_block = encode_block([("door", key, door.Open(3.5, 2))])
    [step, state] = TraceReader(BytesIO(encode_header(HEADER) + step_block + state_block).read)
    assert isinstance(step, StepRecord)
    assert isinstance(state, StateRecord)
    assert step.key == state.key == key
    assert msgspec.msgpack.decode(state.state, type=door.AnyState) == door.Open(3.5, 2)


@given(st.integers(0, 10**6))
def test_a_torn_tail_of_format_1_loses_its_last_record_and_nothing_else(cut: int) -> None:
    whole = of_format_1()
    start = len(of_format_1(0))
    end = start + cut % (len(whole) - start + 1)
    one_step = (len(whole) - start) // 3
    reader = TraceReader(BytesIO(whole[:end]).read)
    steps = [record for record in reader if isinstance(record, StepRecord)]
    assert len(steps) == (end - start) // one_step
    assert reader.torn == ((end - start) % one_step != 0)


def test_a_torn_block_can_be_read_up_to_where_it_ends() -> None:
    """The more there is of it, the more records come; a cut after the data's last byte loses none."""
    whole = a_trace(200)
    start = len(a_trace(0))
    all_records = list(TraceReader(BytesIO(whole).read))
    read = []
    for end in range(start, len(whole)):
        reader = TraceReader(BytesIO(whole[:end]).read)
        records = list(reader)
        assert records == all_records[: len(records)]
        assert reader.torn == (end > start)
        read.append(len(records))
    assert read == sorted(read)
    assert read[0] == 1  # the limits, of the block before
    assert read[-5:] == [201] * 5  # without its own checksum, which zlib puts behind the data
    assert len(set(read)) > 100


def test_a_torn_block_of_one_record_keeps_the_blocks_before_it() -> None:
    data = a_trace() + encode_block([a_step(7)])[:-9]
    reader = TraceReader(BytesIO(data).read)
    assert len(list(reader)) == 4
    assert reader.torn


@pytest.mark.parametrize("data", [a_trace(), of_format_1()])
def test_a_tail_of_zeros_is_torn(data: bytes) -> None:
    reader = TraceReader(BytesIO(data + bytes(100)).read)
    assert len(list(reader)) == 4
    assert reader.torn


def test_any_flipped_bit_of_a_block_is_damage() -> None:
    whole = a_trace()
    for at in range(len(a_trace(0)), len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(UnreadableTrace, match="block 1 is damaged") as caught:
            list(TraceReader(BytesIO(bytes(damaged)).read))
        assert caught.value.facts["reason"] == "corrupt"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"ep",
        b"\xff\xd8\xff\xe0 a picture, say",
        a_trace()[4:],
        a_trace()[:20],
        header_with(magic="epd-other"),
        bytes(64),
    ],
)
def test_what_is_not_a_trace_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(UnreadableTrace, match="not a trace of epd") as caught:
        TraceReader(BytesIO(data).read)
    assert caught.value.facts["reason"] == "magic"


@pytest.mark.parametrize("version", ["format_version", "logic_version"])
def test_a_newer_version_is_refused_by_name_even_if_its_header_is_another(version: str) -> None:
    ours = getattr(trace, version.upper())
    data = header_with(**{version: 99, "node": ["not", "a", "string"]})
    with pytest.raises(UnreadableTrace, match=f"{version} 99, this program reads up to {ours}") as caught:
        TraceReader(BytesIO(data).read)
    assert caught.value.facts == {"reason": version, "found": 99}


@pytest.mark.parametrize(
    "damage", [b"\x03\x00\x00\x00abc", b"\xff\xff\xff\x7f", b"\x03\x00\x00\x00\x92\x01\x02"]
)
def test_damage_is_an_error_that_says_so(damage: bytes) -> None:
    with pytest.raises(UnreadableTrace, match="damaged") as caught:
        list(TraceReader(BytesIO(of_format_1() + damage + of_format_1()).read))
    assert caught.value.facts["reason"] == "corrupt"


@given(st.binary(max_size=200))
def test_any_bytes_are_records_or_a_typed_error(data: bytes) -> None:
    try:
        list(TraceReader(BytesIO(a_trace(1) + data).read))
        list(TraceReader(BytesIO(of_format_1(1) + data).read))
        list(TraceReader(BytesIO(data).read))
    except UnreadableTrace:
        pass


@given(st.binary(max_size=200))
def test_any_records_in_a_whole_block_are_records_or_a_typed_error(data: bytes) -> None:
    packed = zlib.compress(data)
    prefix = len(packed).to_bytes(4, "little") + zlib.crc32(packed).to_bytes(4, "little")
    prefix += zlib.crc32(prefix).to_bytes(4, "little")
    for block in (prefix + packed, prefix + packed[:-1]):
        with contextlib.suppress(UnreadableTrace):
            list(TraceReader(BytesIO(encode_header(HEADER) + block).read))
