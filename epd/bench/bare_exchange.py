"""The reference of `throughput`: the five messages of a transfer over bare ZeroMQ, nothing else.

Two processes, one DEALER and one ROUTER, drained from their descriptors; no sessions, no machines, no
sequence numbers, no memory. `batched`: the messages of one turn go out as one frame.

    python -m epd.bench.bare_exchange        (prints its address, ends with its standard input)
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import zmq

from epd.protocol.ids import Attempt, LeaseId, Part, RegionId, Seal, TransferId
from epd.protocol.messages import (
    BufferGrant,
    EmbeddingMetadata,
    EmbeddingSpec,
    EncodeRequest,
    ForwardDone,
    Item,
    Probe,
    ReadyItem,
    Receipt,
    Source,
)

_ITEM = Item(Probe("image", 640, 480), b"\0" * 32, 1)
_SPEC = EmbeddingSpec(0, 128, "float32")
_READY = ReadyItem(Source(RegionId(0), 0, 0, Seal(1)), _SPEC)
Five = EncodeRequest | EmbeddingMetadata | BufferGrant | ForwardDone | Receipt
_decoder = msgspec.msgpack.Decoder(list[Five])
_encoder = msgspec.msgpack.Encoder()
_ONE = Part(0), Attempt(1)


class Exchanged(NamedTuple):
    """Wall and CPU seconds (this process) for `transfers` exchanges."""

    transfers: int
    wall_s: float
    cpu_s: float


def answer(message: Five) -> Five | None:
    """The other side's next message of the same transfer."""
    transfer = message.transfer
    match message:
        case EncodeRequest():
            return EmbeddingMetadata(transfer, *_ONE, (_SPEC,))
        case EmbeddingMetadata():
            return BufferGrant(transfer, *_ONE, LeaseId(1))
        case BufferGrant():
            return ForwardDone(transfer, *_ONE, LeaseId(1), 0, (_READY,), True)
        case ForwardDone():
            return Receipt(transfer, *_ONE, LeaseId(1), 0, 1, True)
        case Receipt():
            return None


def _drain(socket: zmq.Socket[bytes], handle: Callable[[list[bytes]], None]) -> None:
    """Block for one message, then take all that are there."""
    handle(socket.recv_multipart())
    try:
        while True:
            handle(socket.recv_multipart(zmq.DONTWAIT))
    except zmq.Again:
        return


def serve() -> None:
    """The encoder's half, until standard input closes."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    sys.stdout.write(f"tcp://127.0.0.1:{port}\n")
    sys.stdout.flush()
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    outgoing: dict[bytes, list[Five]] = {}

    def handle(frames: list[bytes]) -> None:
        peer, batched, body = frames
        answers = [reply for message in _decoder.decode(body) if (reply := answer(message)) is not None]
        if batched == b"1":
            outgoing.setdefault(peer, []).extend(answers)
        else:
            for reply in answers:
                socket.send_multipart([peer, batched, _encoder.encode([reply])])

    try:
        while sys.stdin.fileno() not in dict(poller.poll()):
            _drain(socket, handle)
            for peer, replies in outgoing.items():
                if replies:
                    socket.send_multipart([peer, b"1", _encoder.encode(replies)])
            outgoing.clear()
    finally:
        context.destroy(linger=0)


def exchange(address: str, transfers: int, concurrency: int, *, batched: bool) -> Exchanged:
    """Run `transfers` exchanges, `concurrency` at a time, against `serve` at `address`."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    flag = b"1" if batched else b"0"
    started = ended = 0
    outgoing: list[Five] = []

    def request() -> EncodeRequest:
        nonlocal started
        started += 1
        return EncodeRequest(TransferId(started), *_ONE, (_ITEM,), "float32", 60_000)

    def handle(frames: list[bytes]) -> None:
        nonlocal ended
        for message in _decoder.decode(frames[1]):
            reply = answer(message)
            if reply is not None:
                outgoing.append(reply)
            if isinstance(message, ForwardDone):
                ended += 1
                if started < transfers:
                    outgoing.append(request())

    try:
        cpu_s, wall_s = _cpu_s(), time.perf_counter()
        outgoing.extend(request() for _ in range(min(concurrency, transfers)))
        while ended < transfers:
            if batched and outgoing:
                socket.send_multipart([flag, _encoder.encode(outgoing)])
            elif outgoing:
                for message in outgoing:
                    socket.send_multipart([flag, _encoder.encode([message])])
            outgoing.clear()
            _drain(socket, handle)
        return Exchanged(transfers, time.perf_counter() - wall_s, _cpu_s() - cpu_s)
    finally:
        context.destroy(linger=0)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    serve()
