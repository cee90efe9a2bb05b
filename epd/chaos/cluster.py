"""The processes of a run and what is done to them: two encoders behind proxies, and another prefill node.

Everything here that waits for a process runs in a thread, so that the node of this process goes on.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from typing import IO, Any, Final

from epd.chaos.proxy import Proxy
from epd.chaos.schedule import ENCODERS, MAX_REQUEST_NBYTES, Fault
from epd.testing.processes import HeldProcess, held_encoder, toml_file

DEAD_AFTER_S: Final = 2.0
TIMEOUTS: Final[dict[str, Any]] = {
    "timeouts.heartbeat_s": 0.3,
    "timeouts.suspect_after_s": 0.8,
    "timeouts.dead_after_s": DEAD_AFTER_S,
    "timeouts.connect_s": 2.0,
    "timeouts.metadata_s": 3.0,
    "timeouts.read_base_s": 1.0,
    "timeouts.dedup_retention_s": 1.0,
    "limits.max_attempts": 64,
}
REGIONS: Final = 4
"""Of a pool, each for one of the largest requests; an encoder's are a page larger, for the seal."""
_PAGE_NBYTES: Final = 4096
_DELAY_S: Final = 0.02


class Encoder:
    """One encoder that is killed and comes back on its port, and the proxy through which it is dialled."""

    def __init__(self, settings: Mapping[str, Any], port: int, proxy: Proxy, log: IO[bytes]) -> None:
        self._settings = {**settings, "listen": f"tcp://127.0.0.1:{port}"}
        self._log = log
        self._stack = contextlib.ExitStack()
        self.address = f"tcp://127.0.0.1:{port}"
        self.proxy = proxy
        self.process: HeldProcess

    def start(self) -> None:
        encoder = held_encoder(self._settings, encoder="synthetic", stderr=self._log.fileno())
        self.process = self._stack.enter_context(encoder)

    def kill(self) -> None:
        self.process.kill()
        self._stack.close()

    def close(self) -> None:
        self._stack.close()


class Neighbour:
    """The other prefill node."""

    def __init__(self, settings: Mapping[str, Any], log: IO[bytes]) -> None:
        self._settings = settings
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with toml_file(self._settings) as path:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "epd.chaos.neighbour", path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log.fileno(),
            )
            assert self._process.stdout is not None
            self._process.stdout.readline()  # it has read its settings

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)


class Cluster:
    def __init__(self, encoders: list[Encoder], neighbour: Neighbour) -> None:
        self.encoders = encoders
        self.neighbour = neighbour
        self.done: dict[str, int] = {}
        """How often each kind of fault was done."""
        self.freed_early = 0

    async def do(self, fault: Fault) -> None:
        """One fault, to its end: what was killed runs again, what was stopped goes on."""
        self.done[fault.kind] = self.done.get(fault.kind, 0) + 1
        victim = self.neighbour if fault.victim == ENCODERS else self.encoders[fault.victim]
        match fault.kind, victim:
            case "sigkill", _:
                await asyncio.to_thread(victim.kill)
                await asyncio.to_thread(victim.start)
            case "sigstop", Neighbour():
                victim.stop()
                await asyncio.sleep(DEAD_AFTER_S + fault.seconds)
                victim.go_on()
            case "sigstop", Encoder():
                await asyncio.to_thread(victim.process.stop)
                await asyncio.sleep(DEAD_AFTER_S + fault.seconds)
                victim.process.go_on()
            case "early_reuse", Encoder():
                self.freed_early += await asyncio.to_thread(victim.process.free_early)
            case "cut", Encoder():
                victim.proxy.cut()
            case "drop", Encoder():
                victim.proxy.drop_one()
            case "duplicate", Encoder():
                victim.proxy.double_one()
            case "delay", Encoder():
                victim.proxy.delay_s = _DELAY_S
                await asyncio.sleep(fault.seconds)
                victim.proxy.delay_s = 0.0


@contextlib.asynccontextmanager
async def running(data_plane: str, log: IO[bytes]) -> AsyncIterator[Cluster]:
    """Started, and ended in whatever state they are."""
    common = {**TIMEOUTS, "data_plane": data_plane, "log_format": "json"}
    staging = {"staging.regions": REGIONS, "staging.region_nbytes": MAX_REQUEST_NBYTES + _PAGE_NBYTES}
    async with contextlib.AsyncExitStack() as stack:
        encoders = []
        for port in _free_ports(ENCODERS):
            proxy = await stack.enter_async_context(Proxy(port))
            encoder = Encoder({**common, **staging}, port, proxy, log)
            stack.push_async_callback(asyncio.to_thread, encoder.close)
            await asyncio.to_thread(encoder.start)
            encoders.append(encoder)
        neighbour = Neighbour(
            {**common, "role": "prefill", "encoders": [encoder.address for encoder in encoders]}, log
        )
        stack.push_async_callback(asyncio.to_thread, neighbour.kill)
        yield Cluster(encoders, neighbour)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has now; an encoder comes back on its own."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
