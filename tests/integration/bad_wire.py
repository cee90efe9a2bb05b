"""A way to a Mooncake engine that goes bad when it is told to: between two real engines, over TCP.

It answers for the engine's descriptor with its own port for data, and forwards what comes there. `mode`:
- `good`: everything passes;
- `stalled`: nothing passes any more, the connections stay;
- `dropped`: every packet that arrives is lost before TCP sees it (a filter on the sockets), new connections
  included: a host that has gone, or a cable;
- `slow`: the engine's bytes come one a second;
- `garbage`: other bytes than the engine's, of a seed;
- `cut`: connections end after some of the engine's bytes.
"""

import contextlib
import ctypes
import json
import random
import selectors
import socket
import struct
import threading
from types import TracebackType
from typing import Literal, Self

Mode = Literal["good", "stalled", "dropped", "slow", "garbage", "cut"]
MODES: tuple[Mode, ...] = ("stalled", "dropped", "slow", "garbage", "cut")

_LENGTH = struct.Struct("<Q")
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0
_CHUNK_NBYTES = 65_536
_CUT_AFTER_NBYTES = 300_000


class BadWire:
    def __init__(self, segment: str, seed: int = 1) -> None:
        self._engine = _address(segment)
        self._random = random.Random(seed)
        self._mode: Mode = "good"
        self._rpc = socket.create_server(("127.0.0.1", 0))
        self._data = socket.create_server(("127.0.0.1", 0))
        self.segment = f"127.0.0.1:{self._rpc.getsockname()[1]}"
        """What a reader is told instead of the engine's own."""
        self._sockets: set[socket.socket] = set()
        self._changed = threading.Event()
        self._closing = False

    def __enter__(self) -> Self:
        for serve in (self._serve_descriptor, self._serve_data):
            threading.Thread(target=serve, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._changed.set()
        for one in (self._rpc, self._data, *list(self._sockets)):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def go(self, mode: Mode) -> None:
        """Be like this from now on."""
        self._mode = mode
        if mode == "dropped":
            for one in (self._data, *list(self._sockets)):
                _lose_all_packets(one)
        self._changed.set()

    # -- the descriptor ------------------------------------------------------------------------

    def _serve_descriptor(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._rpc.accept()
                threading.Thread(target=self._answer, args=(reader,), daemon=True).start()

    def _answer(self, reader: socket.socket) -> None:
        """Requests and answers are a length and so many bytes, the first of which is a kind."""
        with (
            contextlib.suppress(OSError, ValueError),
            reader,
            socket.create_connection(self._engine) as engine,
        ):
            while True:
                engine.sendall(_message(reader))
                answer = _message(engine)
                kind, body = answer[8:9], answer[9:]
                with contextlib.suppress(ValueError):
                    descriptor = json.loads(body)
                    if "tcp_data_port" in descriptor:
                        self._data_port = descriptor["tcp_data_port"]
                        descriptor["tcp_data_port"] = self._data.getsockname()[1]
                        body = json.dumps(descriptor).encode()
                reader.sendall(_LENGTH.pack(len(body) + 1) + kind + body)

    # -- the data ------------------------------------------------------------------------------

    def _serve_data(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._data.accept()
                engine = socket.create_connection((self._engine[0], self._data_port))
                self._sockets |= {reader, engine}
                threading.Thread(target=self._forward, args=(reader, engine), daemon=True).start()

    def _forward(self, reader: socket.socket, engine: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError), reader, engine, selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ, engine)
            selector.register(engine, selectors.EVENT_READ, reader)
            while not self._closing:
                if self._mode == "stalled":
                    self._pause(None)
                for key, _ in selector.select(0.05):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    data = source.recv(1 if self._mode == "slow" and source is engine else _CHUNK_NBYTES)
                    if not data:
                        return
                    if source is engine:
                        passed += len(data)
                        data = self._spoil(data)
                        if self._mode == "cut" and passed > _CUT_AFTER_NBYTES:
                            return
                    key.data.sendall(data)
        self._sockets -= {reader, engine}

    def _spoil(self, data: bytes) -> bytes:
        if self._mode == "slow":
            self._pause(1.0)
        if self._mode == "garbage":
            return self._random.randbytes(len(data))
        return data

    def _pause(self, seconds: float | None) -> None:
        """Until the mode changes, at most so long."""
        self._changed.clear()
        self._changed.wait(seconds)


def _address(segment: str) -> tuple[str, int]:
    host, _, port = segment.rpartition(":")
    return host, int(port)


def _message(peer: socket.socket) -> bytes:
    """One message with its length. Raises `OSError` at the end."""
    head = _exactly(peer, _LENGTH.size)
    return head + _exactly(peer, *_LENGTH.unpack(head))


def _exactly(peer: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        some = peer.recv(nbytes - len(received))
        if not some:
            raise OSError("the end")
        received += some
    return received


def _lose_all_packets(one: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    with contextlib.suppress(OSError):  # closed meanwhile
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
