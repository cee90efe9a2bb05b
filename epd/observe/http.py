"""A small HTTP server for probes and scrapes: GET only, in a thread and a loop of its own.

So that it answers while the node's loop does not. A request may be 8 KiB and take 5 s, each
connection carries one, and of more than 32 the oldest is closed: nobody can occupy it for long.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from epd.protocol.errors import ConfigError

MAX_REQUEST_NBYTES: Final = 8 * 1024
REQUEST_S: Final = 5.0
MAX_CONNECTIONS: Final = 32

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Page(NamedTuple):
    status: int
    content_type: str
    body: bytes


def text_page(status: int, text: str) -> Page:
    return Page(status, "text/plain; charset=utf-8", f"{text}\n".encode())


class HttpServer:
    """Listens at once and answers `pages` by path, each made in the server's thread.

    Raises `ConfigError` naming `metrics_port` if it cannot listen there.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._pages = pages
        self._connections: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._socket = _bind(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._stopped = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="epd-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end the thread. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._socket, limit=MAX_REQUEST_NBYTES)
        await self._stopped
        server.close()
        for writer in list(self._connections):
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[writer] = None
        try:
            async with asyncio.timeout(REQUEST_S):
                page = await self._page(reader)
                writer.write(_response(page))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # gone, or too slow: nothing is owed to it
        finally:
            writer.transport.abort()
            self._connections.pop(writer, None)

    async def _page(self, reader: asyncio.StreamReader) -> Page:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return text_page(431, "request too large")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return text_page(400, "not HTTP/1")
        if words[0] != b"GET":
            return text_page(405, "only GET")
        make = self._pages.get(words[1].partition(b"?")[0].decode("latin-1"))
        if make is None:
            return text_page(404, f"there is {', '.join(self._pages)}")
        try:
            return make()
        except Exception as error:  # our own bug: shown to whoever asks, and the server goes on
            return text_page(500, f"{type(error).__name__}: {error}")


def _bind(host: str, port: int) -> socket.socket:
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound = socket.socket(family, kind, protocol)
        try:
            # A port in TIME_WAIT may be taken, one that is listened on may not.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(MAX_CONNECTIONS)
            bound.setblocking(False)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        message = f"metrics_port: cannot listen on {host} port {port}: {error.strerror or error}"
        raise ConfigError(message, key="metrics_port", given=f"{host}:{port}") from error
    return bound


def _response(page: Page) -> bytes:
    lines = [
        f"HTTP/1.1 {page.status} {_REASONS[page.status]}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if page.status == 405:
        lines.append("Allow: GET")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + page.body
