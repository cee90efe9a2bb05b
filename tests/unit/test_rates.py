"""Token buckets of one peer, on a clock of the test's."""

import pytest

from epd.protocol.ids import SessionId
from epd.protocol.messages import Goodbye, MediaChunk
from epd.protocol.rates import Meter, RateLimits, charge, count_records
from epd.protocol.wire import Frame, Lane, build_frame, encode_message, open_frame

LIMITS = RateLimits(frames=10, records=100, media_nbytes=1000)


def control(records: int) -> Frame:
    data = build_frame(Lane.CONTROL, SessionId(1), 0, [encode_message(Goodbye("x"))] * records)
    return open_frame(data, Lane.CONTROL)


def media(nbytes: int) -> Frame:
    chunk = encode_message(MediaChunk(b"h" * 32, 0, 0, memoryview(bytes(nbytes))))
    return open_frame(build_frame(Lane.MEDIA, SessionId(1), 0, [chunk]), Lane.MEDIA)


def test_a_second_brings_what_one_second_may_hold_and_no_more() -> None:
    meter = Meter()
    for _ in range(10):
        meter, excess = charge(meter, control(1), 5.0, LIMITS)
        assert not excess
    assert charge(meter, control(1), 5.0, LIMITS) == (meter, "more than 10 frames a second")
    meter, excess = charge(meter, control(1), 5.125, LIMITS)
    assert not excess
    assert charge(meter, control(1), 5.125, LIMITS)[1]
    for _ in range(10):  # an hour saves up one second's worth
        meter, excess = charge(meter, control(1), 3600.0, LIMITS)
        assert not excess
    assert charge(meter, control(1), 3600.0, LIMITS)[1]


def test_records_and_media_bytes_are_counted_before_anything_is_decoded() -> None:
    meter, excess = charge(Meter(), control(90), 0.0, LIMITS)
    assert not excess
    assert charge(meter, control(11), 0.0, LIMITS)[1] == "more than 100 records a second"
    meter, excess = charge(meter, media(800), 0.0, LIMITS)
    assert not excess
    assert charge(meter, media(200), 0.0, LIMITS)[1] == "more than 1000 bytes of media a second"
    assert not charge(meter, control(9), 0.0, LIMITS)[1]


def test_a_clock_that_stands_still_or_goes_back_brings_nothing() -> None:
    meter = Meter()
    for _ in range(10):
        meter, _ = charge(meter, control(1), 5.0, LIMITS)
    assert charge(meter, control(1), 4.0, LIMITS)[1]


@pytest.mark.parametrize("records", [0, 1, 15, 16, 3000])
def test_the_count_is_what_the_array_says(records: int) -> None:
    assert count_records(control(records).body) == records


@pytest.mark.parametrize(
    ("body", "count"), [(b"", 1), (b"\xdc\x01", 1), (b"\xdd\xff\xff\xff\xff", 2**32 - 1), (b"\xc0", 1)]
)
def test_what_is_no_array_counts_as_one(body: bytes, count: int) -> None:
    assert count_records(memoryview(body)) == count
