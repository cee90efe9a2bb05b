"""A way to a node's control lane that delays, drops, doubles and cuts.

It knows as much of ZMTP 3 (https://rfc.zeromq.org/spec/23/) as it takes to find where a message begins and
ends: a greeting of 64 bytes, then frames of flags, size and body. Messages are dropped and doubled whole;
handshake commands pass.
"""

import asyncio
import contextlib
from types import TracebackType
from typing import Final, Self

_GREETING_NBYTES: Final = 64
_LONG: Final = 0x02
_COMMAND: Final = 0x04


class Proxy:
    """Listens on a free loopback port and forwards to `target`, which may come and go."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._drops = self._doubles = 0
        self.delay_s = 0.0
        """Added to every message, both ways, from now on."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        await self._tasks.__aexit__(kind, error, trace)

    # -- faults ------------------------------------------------------------------------------

    def cut(self) -> None:
        """Lose every connection."""
        for writer in self._writers:
            writer.transport.abort()

    def drop_one(self) -> None:
        """The next message, whichever way it goes, is lost."""
        self._drops += 1

    def double_one(self) -> None:
        """The next message arrives twice."""
        self._doubles += 1

    # -- forwarding --------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there_writer}
        self._tasks.create_task(self._forward(reader, there_writer, writer))
        self._tasks.create_task(self._forward(there_reader, writer, there_writer))

    async def _forward(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        """One way, until either end is gone; then both."""
        try:
            await _forward_greeting(reader, to)
            while True:
                frame, is_message = await _frame(reader)
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if is_message and self._drops:
                    self._drops -= 1
                    continue
                to.write(frame)
                if is_message and self._doubles:
                    self._doubles -= 1
                    to.write(frame)
                await to.drain()
        except (OSError, asyncio.IncompleteReadError, RuntimeError):  # uvloop: the handle is closed
            pass
        finally:
            for writer in (to, back):
                writer.transport.abort()
                self._writers.discard(writer)
                with contextlib.suppress(OSError):
                    await writer.wait_closed()


async def _forward_greeting(reader: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    """As it comes: both ends send a part of it and wait for the other's."""
    missing = _GREETING_NBYTES
    while missing:
        part = await reader.read(missing)
        if not part:
            raise asyncio.IncompleteReadError(b"", missing)
        to.write(part)
        missing -= len(part)


async def _frame(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """One frame as it came, and whether it is (a part of) a message."""
    flags = await reader.readexactly(1)
    size = await reader.readexactly(8 if flags[0] & _LONG else 1)
    body = await reader.readexactly(int.from_bytes(size, "big"))
    return flags + size + body, not flags[0] & _COMMAND
