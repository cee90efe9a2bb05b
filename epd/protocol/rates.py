"""What one peer may send in a second, so that it cannot take the loop from the others.

Three token buckets for each peer: frames, records (messages in them) and media bytes. Each holds what
one second brings, so a burst may be as large as that. They are charged before a body is decoded.
"""

import msgspec

from epd.protocol.wire import HEADER_NBYTES, Frame, Lane


class RateLimits(msgspec.Struct, frozen=True):
    """Per second and peer; also the largest burst."""

    frames: float = 20_000.0
    records: float = 50_000.0
    media_nbytes: float = 2e9


class Meter(msgspec.Struct, frozen=True):
    """What is left in each bucket of one peer, as of `at_s`. None: full."""

    at_s: float | None = None
    frames: float = 0.0
    records: float = 0.0
    media_nbytes: float = 0.0


def charge(meter: Meter, frame: Frame, now_s: float, limits: RateLimits) -> tuple[Meter, str]:
    """The meter after a frame, and what there was too much of (then the meter is as it was before)."""
    elapsed_s = 1.0 if meter.at_s is None else min(1.0, max(0.0, now_s - meter.at_s))
    media_nbytes = HEADER_NBYTES + len(frame.body) if frame.lane is Lane.MEDIA else 0
    after = Meter(
        now_s,
        min(limits.frames, meter.frames + elapsed_s * limits.frames) - 1,
        min(limits.records, meter.records + elapsed_s * limits.records) - count_records(frame.body),
        min(limits.media_nbytes, meter.media_nbytes + elapsed_s * limits.media_nbytes) - media_nbytes,
    )
    for name, allowed in (("frames", limits.frames), ("records", limits.records)):
        if getattr(after, name) < 0:
            return meter, f"more than {allowed:.0f} {name} a second"
    if after.media_nbytes < 0:
        return meter, f"more than {limits.media_nbytes:.0f} bytes of media a second"
    return after, ""


def count_records(body: memoryview) -> int:
    """Messages that a body says it holds, from the first bytes of its msgpack array; 1 if it is none."""
    first = body[0] if body else 0
    if first & 0xF0 == 0x90:
        return first & 0x0F
    if first == 0xDC and len(body) >= 3:
        return int.from_bytes(body[1:3], "big")
    if first == 0xDD and len(body) >= 5:
        return int.from_bytes(body[1:5], "big")
    return 1
