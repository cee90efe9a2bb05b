"""Bad input at everything that takes input from outside: frames, an endpoint, pictures, HTTP.

    fuzz.py [--seed N] [--inputs N]    exit 1 if anything but a refusal came of an input, or memory grew

Inputs are good ones, damaged, and noise. The same seed makes the same inputs. What counts as a refusal is
the typed error (or the HTTP status) that is documented; everything else is a finding and is printed.
"""

import argparse
import asyncio
import io
import itertools
import json
import logging
import random
import secrets
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from PIL import Image

from epd.encoders.media import PictureRules, open_image, probe_image
from epd.observe.http import HttpServer, text_page
from epd.protocol.errors import Malformed, MediaInvalid
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
)
from epd.protocol.messages import (
    AnyMessage,
    BufferGrant,
    Cancel,
    EmbeddingSpec,
    EncodeRequest,
    ForwardDone,
    Goodbye,
    Heartbeat,
    Hello,
    Item,
    MediaChunk,
    PeerLimits,
    Probe,
    ReadyItem,
    Receipt,
    RegionDescriptor,
    Regions,
    Source,
    Submit,
)
from epd.protocol.session import SessionLimits
from epd.protocol.trace import LOGIC_VERSION
from epd.protocol.wire import (
    HEADER,
    MAGIC,
    PROTOCOL_VERSION,
    Lane,
    build_frame,
    decode_body,
    encode_message,
    open_frame,
)
from epd.runtime.clock import MonotonicClock
from epd.runtime.endpoint import Endpoint
from epd.runtime.lanes import routing_id_of
from epd.runtime.timers import Timers

GROWTH_NBYTES: Final = 48 * 1024 * 1024
_NUMBERS: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_WHERE: Final = (TransferId(1), Part(0), Attempt(1))


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, cut, doubled or put in; now and then nothing but noise."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.choice((0, 1, 27, 28, 29, 64, 400)))
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(result) + 1)
        match rng.randrange(6):
            case 0:
                result[at : at + 1] = rng.randbytes(1)
            case 1:
                del result[at:]
            case 2:
                result[at:at] = result[at : at + rng.randint(1, 64)] * rng.randint(1, 4)
            case 3:
                width = rng.choice((1, 2, 4, 8))
                order = rng.choice(("little", "big"))
                number = rng.choice(_NUMBERS) % 2 ** (8 * width)
                result[at : at + width] = number.to_bytes(width, order)
            case 4:
                del result[at : at + rng.randint(1, 16)]
            case _:
                result[at:at] = rng.randbytes(rng.randint(1, 16))
    return bytes(result)


def hello(node: str = "fuzz") -> Hello:
    limits = PeerLimits(128, 1 << 20, 1 << 20)
    return Hello(
        NodeId(node), Incarnation(7), "prefill", PROTOCOL_VERSION, LOGIC_VERSION, "", "shm", "x", limits
    )


def messages() -> list[AnyMessage]:
    item = Item(Probe("image", 64, 48), b"h" * 32, 4096)
    ready = ReadyItem(Source(RegionId(1), 256, 4096, Seal(9)), EmbeddingSpec(16, 64, "float32"))
    return [
        hello(),
        Heartbeat(1, 2, 3),
        EncodeRequest(*_WHERE, (item,) * 3, "model", 1000),
        BufferGrant(*_WHERE, LeaseId(3)),
        ForwardDone(*_WHERE, LeaseId(3), 0, (ready,) * 2, True),
        Receipt(*_WHERE, LeaseId(3), 0, 2, True),
        Regions((RegionDescriptor(RegionId(1), 4096, 1 << 20),)),
        Submit(1, (item,), "model", 1000, True),
        Cancel(*_WHERE),
        Goodbye("bye"),
    ]


def bodies(rng: random.Random) -> Iterator[tuple[Lane, bytes]]:
    """Frames whose header is good and whose body is damaged, or the reverse, or both."""
    good = [encode_message(message) for message in messages()]
    chunk = encode_message(MediaChunk(b"h" * 32, 0, 0, memoryview(b"d" * 100)))
    while True:
        lane = rng.choice((Lane.CONTROL, Lane.CONTROL, Lane.CONTROL, Lane.MEDIA))
        parts = [chunk] if lane is Lane.MEDIA else rng.choices(good, k=rng.randint(0, 4))
        session, sequence = SessionId(rng.randrange(4)), rng.choice((0, 0, 1, 2**64 - 1))
        data = build_frame(lane, session, sequence, parts)
        if rng.random() < 0.7:  # a body that gets as far as the decoder
            body = damaged(rng, data[HEADER.size :])
            header = HEADER.pack(MAGIC, PROTOCOL_VERSION, lane, 0, session, sequence, len(body))
            yield lane, header + body
        else:
            yield lane, damaged(rng, data)


def fuzz_frames(rng: random.Random, count: int, seen: Counter[str]) -> None:
    for lane, data in itertools.islice(bodies(rng), count):
        try:
            decode_body(open_frame(data, lane))
            seen["frame taken"] += 1
        except Malformed as error:
            seen[f"frame refused: {error.facts['reason']}"] += 1


class _Handler:
    """Takes everything and answers nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given: Heartbeat() if name == "load" else None


async def fuzz_endpoint(rng: random.Random, count: int, seen: Counter[str]) -> None:
    """As if the frames had come in by a listener: real sessions begin and end."""
    loop, clock = asyncio.get_running_loop(), MonotonicClock()
    failures: list[Exception] = []
    endpoint = Endpoint(
        hello=lambda: msgspec.structs.replace(hello("ours"), role="encoder", fingerprint="m"),
        limits=SessionLimits(),
        clock=clock,
        timers=Timers(clock, loop.call_at),
        recorder=None,
        handler=_Handler(),
        max_peers=16,
        on_error=failures.append,
    )
    endpoint.bind("tcp://127.0.0.1:0")
    lanes = endpoint._listening
    greeting = [encode_message(hello())]
    for number, (given, data) in enumerate(itertools.islice(bodies(rng), count)):
        lane = given
        # As a rule the routing id is that of the header, wherever it came from.
        routing_id = data[8:16] if rng.random() < 0.9 else rng.randbytes(rng.randint(1, 9))
        parts = [routing_id, data] if rng.random() < 0.97 else [data] * rng.randrange(4)
        if number % 5 == 0:
            lane = Lane.CONTROL
            session = SessionId(rng.randrange(4))
            parts = [routing_id_of(session), build_frame(lane, session, 0, greeting)]
        endpoint.lane_received(lanes[lane], parts)
        if number % 200 == 0:
            await asyncio.sleep(0)
    seen.update({f"endpoint: {reason}": n for reason, n in endpoint.rejected_frames.items()})
    seen["endpoint: taken"] = count - sum(endpoint.rejected_frames.values())
    await endpoint.close_all(0.1)
    if failures:
        raise failures[0]


def pictures(rng: random.Random) -> list[bytes]:
    made = []
    image = Image.frombytes("RGB", (40, 24), rng.randbytes(40 * 24 * 3))
    for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"):
        for one in (image, image.convert("L"), image.convert("P")):
            if (kind, one.mode) in {("JPEG", "P"), ("WEBP", "P")}:
                continue
            file = io.BytesIO()
            one.save(file, kind)
            made.append(file.getvalue())
    return made


def fuzz_pictures(rng: random.Random, count: int, seen: Counter[str]) -> None:
    rules = PictureRules(max_pixels=1_000_000)
    good = pictures(rng)
    for _ in range(count):
        data = damaged(rng, rng.choice(good))
        try:
            probe_image(data, "fuzz", rules)
            open_image(data, "fuzz", rules)
            seen["picture taken"] += 1
        except MediaInvalid:
            seen["picture refused"] += 1


def fuzz_http(rng: random.Random, count: int, seen: Counter[str]) -> None:
    server = HttpServer("127.0.0.1", 0, {"/metrics": lambda: text_page(200, "fine")})
    port = int(server.url.rpartition(":")[2])
    get = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    good = (get, b"POST /metrics HTTP/1.1\r\n\r\n", b"GET /" + b"a" * 9000)
    try:
        for _ in range(count):
            with socket.create_connection(("127.0.0.1", port), 20) as client:
                try:
                    client.sendall(damaged(rng, rng.choice(good)))
                    client.shutdown(socket.SHUT_WR)
                    answer = client.recv(4096)
                except OSError:  # it may hang up on us in the middle
                    answer = b""
            seen[f"http: {answer[9:12].decode() or 'closed'}"] += 1
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            client.sendall(get)
            if b" 200 " not in client.recv(4096):
                raise AssertionError("the HTTP server serves nobody any more")
    finally:
        server.close()


class _Complaints(logging.Handler):
    """Whatever is logged as an error, or dies in a thread or in a destructor."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        logging.getLogger().addHandler(self)
        threading.excepthook = lambda given: self.found.append(f"thread: {given.exc_value!r}")
        sys.unraisablehook = lambda given: self.found.append(f"destructor: {given.exc_value!r}")

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("PIL"):  # it complains of a picture before it refuses it
            self.found.append(record.getMessage())


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(seed: int, inputs: int) -> dict[str, Any]:
    """`inputs` over all: most are frames, which cost least."""
    complaints = _Complaints()
    warnings.simplefilter("ignore")  # Pillow's, about what it then decodes or refuses
    shares = {"frames": 0.70, "endpoint": 0.22, "pictures": 0.07, "http": 0.01}
    seen: Counter[str] = Counter()
    start_s = time.monotonic()

    def all_of(round_seed: str, total: int) -> None:
        rng = random.Random(round_seed)  # the same inputs for the same seed
        fuzz_frames(rng, int(total * shares["frames"]), seen)
        asyncio.run(fuzz_endpoint(rng, int(total * shares["endpoint"]), seen))
        fuzz_pictures(rng, int(total * shares["pictures"]), seen)
        fuzz_http(rng, int(total * shares["http"]), seen)

    warm = inputs // 4
    all_of(f"{seed}/warm", warm)
    before_nbytes = resident_nbytes()
    all_of(f"{seed}", inputs - warm)
    grown_nbytes = resident_nbytes() - before_nbytes
    return {
        "ok": not complaints.found and grown_nbytes < GROWTH_NBYTES,
        "seed": seed,
        "inputs": inputs,
        "seconds": round(time.monotonic() - start_s, 1),
        "grown_nbytes": grown_nbytes,
        "complaints": complaints.found[:20],
        "outcomes": dict(sorted(seen.items())),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32))
    parser.add_argument("--inputs", type=int, default=200_000)
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    report = run(given.seed, given.inputs)
    print(json.dumps(report, indent=1))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
