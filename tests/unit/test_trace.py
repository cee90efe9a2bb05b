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
    StepRecord,
    TraceHeader,
    TraceReader,
    UnreadableTrace,
    append_header,
    append_limits,
    append_step,
)

HEADER = TraceHeader(node=NodeId("node"), role="encoder", incarnation=Incarnation(7), started_unix_s=1.5)


def a_trace(steps: int = 3) -> bytes:
    buffer = bytearray()
    append_header(buffer, HEADER)
    append_limits(buffer, "door", door.Limits(4.0))
    for n in range(steps):
        append_step(buffer, "door", (n, "front"), door.Opened("ann"), n + 0.1, (door.Ring("ann"),))
    return bytes(buffer)


def header_with(**changes: object) -> bytes:
    buffer = bytearray()
    trace._append(buffer, msgspec.to_builtins(HEADER) | changes)
    return bytes(buffer)


def test_what_is_written_is_read() -> None:
    reader = TraceReader(BytesIO(a_trace()).read)
    assert reader.header == HEADER
    limits, *steps = reader
    assert isinstance(limits, LimitsRecord)
    assert msgspec.msgpack.decode(limits.limits, type=door.Limits) == door.Limits(4.0)
    assert [step[:3] for step in steps] == [("door", (n, "front"), n + 0.1) for n in range(3)]
    assert isinstance(steps[0], StepRecord)
    assert msgspec.msgpack.decode(steps[0].event, type=door.AnyEvent) == door.Opened("ann")
    assert not reader.torn


@pytest.mark.parametrize("key", [3, 2**64 - 1, "front", (1, "a", 2)])
def test_keys_come_back_as_they_were(key: trace.Key) -> None:
    buffer = bytearray()
    append_header(buffer, HEADER)
    append_step(buffer, "door", key, door.BrickedUp(), 1.0, ())
    [step] = TraceReader(BytesIO(buffer).read)
    assert isinstance(step, StepRecord)
    assert step.key == key


@given(st.integers(0, 10**6))
def test_a_torn_tail_loses_its_last_record_and_nothing_else(cut: int) -> None:
    whole = a_trace()
    start = len(a_trace(0))
    end = start + cut % (len(whole) - start + 1)
    one_step = (len(whole) - start) // 3
    reader = TraceReader(BytesIO(whole[:end]).read)
    steps = [record for record in reader if isinstance(record, StepRecord)]
    assert len(steps) == (end - start) // one_step
    assert reader.torn == ((end - start) % one_step != 0)


def test_a_tail_of_zeros_is_torn() -> None:
    reader = TraceReader(BytesIO(a_trace() + bytes(100)).read)
    assert len(list(reader)) == 4
    assert reader.torn


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
def test_another_version_is_refused_by_name_even_if_its_header_is_another(version: str) -> None:
    data = header_with(**{version: 99, "node": ["not", "a", "string"]})
    with pytest.raises(UnreadableTrace, match=f"{version} 99, this program reads 1") as caught:
        TraceReader(BytesIO(data).read)
    assert caught.value.facts == {"reason": version, "found": 99}


@pytest.mark.parametrize(
    "damage", [b"\x03\x00\x00\x00abc", b"\xff\xff\xff\x7f", b"\x03\x00\x00\x00\x92\x01\x02"]
)
def test_damage_is_an_error_that_says_so(damage: bytes) -> None:
    with pytest.raises(UnreadableTrace, match="damaged") as caught:
        list(TraceReader(BytesIO(a_trace() + damage + a_trace()).read))
    assert caught.value.facts["reason"] == "corrupt"


@given(st.binary(max_size=200))
def test_any_bytes_are_records_or_a_typed_error(data: bytes) -> None:
    try:
        list(TraceReader(BytesIO(a_trace(1) + data).read))
        list(TraceReader(BytesIO(data).read))
    except UnreadableTrace:
        pass


def test_a_step_that_cannot_be_encoded_leaves_the_buffer_as_it_was() -> None:
    buffer = bytearray(b"before")
    with pytest.raises(OverflowError):
        append_step(buffer, "door", 1, door.BrickedUp(), 1.0, (door.Slam(2**70),))
    assert buffer == b"before"
