"""An encoder node in a process of its own with named hold points; for tests, never for operators.

    python -m epd.testing.held_node FD TOML [synthetic]

FD is an inherited SOCK_SEQPACKET socket that carries JSON objects. To the node: `{"hold": NAME}`,
`{"release": NAME}`, `{"reuse": true}` (misbehave: overwrite every staged result and its seal),
`{"free": true}` (misbehave: free what is being read). From the node: `{"ready": {...}}`,
`{"reached": NAME}`, `{"reused": N}`, `{"freed": N}`.
"""

import asyncio
import json
import secrets
import socket
import sys
from typing import Any

import uvloop

from epd.config import Config, load_config
from epd.encoders.base import Encoder, MediaItem
from epd.encoders.registry import load_encoder
from epd.forward.base import ForwardWorker
from epd.forward.process import ProcessWorker
from epd.node import EncoderNode
from epd.observe.log import configure_logging
from epd.protocol import sources
from epd.protocol.messages import DType, EmbeddingSpec, Probe
from epd.protocol.sources import SEAL_WORD, seal_offset
from epd.testing.hold_points import HeldWorker, HoldPoints
from epd.testing.synthetic import PatternWorker, SyntheticEncoder


class HeldEncoder:
    """Plans wait while `plan` is held: the node has the request and has not answered."""

    def __init__(self, inner: Encoder, points: HoldPoints) -> None:
        self._inner = inner
        self._points = points
        self.name = inner.name
        self.fingerprint = inner.fingerprint
        self.default_dtype: DType = inner.default_dtype

    def plan(self, probe: Probe, dtype: DType) -> EmbeddingSpec:
        self._points.pass_by("plan")
        return self._inner.plan(probe, dtype)

    def load(self, num_threads: int, device: str) -> None:
        self._inner.load(num_threads, device)

    def preprocess(self, item: MediaItem) -> Any:
        return self._inner.preprocess(item)

    def forward(self, batch: list[Any]) -> Any:
        return self._inner.forward(batch)


def reuse_early(node: EncoderNode) -> int:
    """What an encoder must never do: give every staged slot to somebody else, pinned or not."""
    staged = node.buffers.staged()
    for extent, nbytes in staged:
        view = node.pool.view(extent)
        SEAL_WORD.pack_into(view, seal_offset(nbytes), secrets.randbits(64) | 1)
        view[:nbytes] = b"\xee" * nbytes
    return len(staged)


def free_early(node: EncoderNode) -> int:
    """As if the receipts had come: free every slot that somebody reads. The real machines change the seal;
    then the bytes are another's."""
    buffers, freed = node.buffers, 0
    for staged, entry in list(buffers._staged.items()):
        state = buffers._sources.state(staged)
        if not isinstance(state, sources.Stable) or not state.pins:
            continue
        for pin in state.pins:
            buffers._sources.feed(staged, sources.Unpinned(pin))
        buffers._sources.feed(staged, sources.EvictWanted())
        node.pool.view(entry.extent)[: entry.nbytes] = b"\xee" * entry.nbytes
        freed += 1
    return freed


async def serve(control: socket.socket, config: Config, inner: Encoder, form: ForwardWorker) -> None:
    """Run the node until the other end of `control` closes."""
    loop = asyncio.get_running_loop()
    closed = loop.create_future()

    def say(message: dict[str, Any]) -> None:
        control.send(json.dumps(message).encode())

    points = HoldPoints(lambda name: say({"reached": name}))
    worker = HeldWorker(form, points)
    encoder = HeldEncoder(inner, points)
    async with EncoderNode(config, encoder=encoder, worker=worker) as node:

        def obey() -> None:
            """In a thread: the loop itself may be waiting at a hold point."""
            while data := control.recv(65536):
                match json.loads(data):
                    case {"hold": str(name)}:
                        points.hold(name)
                        say({"held": name})
                    case {"release": str(name)}:
                        points.release(name)
                        loop.call_soon_threadsafe(worker.resume)
                    case {"free": True}:
                        loop.call_soon_threadsafe(lambda: say({"freed": free_early(node)}))
                    case {"reuse": True}:
                        loop.call_soon_threadsafe(lambda: say({"reused": reuse_early(node)}))
            loop.call_soon_threadsafe(closed.set_result, None)

        say({"ready": {"listen": node.listen, "node": node.node_id, "data_plane": node.data_plane}})
        obeying = loop.run_in_executor(None, obey)
        await closed
        await obeying


def main() -> None:
    descriptor, toml, kind = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    config = load_config(toml, {})
    configure_logging(config.log_format)
    if kind == "synthetic":
        uvloop.run(serve(control, config, SyntheticEncoder(), PatternWorker()))
    else:
        worker = ProcessWorker(config.model, config.worker_threads())
        uvloop.run(serve(control, config, load_encoder(config.model), worker))


if __name__ == "__main__":
    main()
