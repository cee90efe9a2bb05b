"""CURVE on sockets, and who is let in: a ZAP handler in the loop that owns the sockets.

Options count only before `bind` and `connect`. `ZAP_ENFORCE_DOMAIN` makes a listener without a handler
refuse everybody; without it, it would let everybody in who knows its public key. pyzmq's own
authenticators need a thread, or sockets of `zmq.asyncio`; what is needed of them is one reply.
"""

import asyncio
from collections.abc import Callable, Container
from typing import Any, Final

import zmq
from zmq.utils import z85

from epd.runtime.keys import KeyPair

ZAP_DOMAIN: Final = b"epd"
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"


def apply_listener(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Before `bind`."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def apply_dialler(socket: zmq.Socket[bytes], keys: KeyPair, server_key: str) -> None:
    """Before `connect`. Nobody but the holder of `server_key` can answer."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def peer_key(frame: Any) -> str:
    """Whose connection a frame (received without copying) came by; empty if nobody was asked."""
    try:
        return str(frame.get("User-Id"))
    except (zmq.ZMQError, AttributeError):
        return ""


class Authenticator:
    """Answers for one context whose key is let in, before any of its listeners binds."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allowed: Container[str],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._allowed = allowed
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._wake)

    def close(self) -> None:
        """Idempotent; listeners refuse everybody from now on."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(0)

    def _wake(self) -> None:
        try:
            while True:
                try:
                    asked = self._socket.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    return
                self._socket.send_multipart(self._answer(asked), zmq.DONTWAIT)
        except Exception as error:
            self._on_error(error)

    def _answer(self, asked: list[bytes]) -> list[bytes]:
        """Of version, request, domain, address, routing id, mechanism, key: by the key alone."""
        version, request, domain, mechanism = asked[0], asked[1], asked[2], asked[5]
        if mechanism == b"CURVE" and domain == ZAP_DOMAIN and len(asked) == 7 and len(asked[6]) == 32:
            key = z85.encode(asked[6]).decode()
            if key in self._allowed:
                return [version, request, b"200", b"OK", key.encode(), b""]
        return [version, request, b"400", b"not in the list of peers", b"", b""]
