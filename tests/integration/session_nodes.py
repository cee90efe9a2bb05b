"""Endpoints that write down what they are told, a raw peer that can lie, and nodes as processes."""

import asyncio
import contextlib
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from epd.protocol.ids import Incarnation, NodeId, SessionId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import AnyMessage, Goodbye, Heartbeat, Hello, PeerLimits, Rejected, Role, Welcome
from epd.protocol.session import OUTSIDE, SessionLimits
from epd.protocol.wire import (
    PROTOCOL_VERSION,
    Frame,
    Lane,
    build_frame,
    decode_body,
    encode_message,
    open_frame,
)
from epd.runtime.clock import MonotonicClock
from epd.runtime.endpoint import Endpoint, PeerInfo
from epd.runtime.lanes import LaneSocket
from epd.runtime.timers import Timers
from epd.runtime.zmq_lanes import ZmqLane

# 256 peers a node: what `epd-node` does for itself, and embedding programs for theirs.
_HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (_HARD, _HARD))


PATIENT = SessionLimits(3600.0, 3600.0, 3600.0, connect_s=30.0, drain_s=30.0)
"""Nothing is noticed by silence, and no heartbeat comes by itself: whatever is noticed was an event."""
FAIL_AFTER_S = 30.0


class Opened(NamedTuple):
    session: SessionId
    peer: PeerInfo


class Lost(NamedTuple):
    session: SessionId
    peer: PeerInfo | None
    code: str
    reason: str


class Batch(NamedTuple):
    session: SessionId
    messages: list[AnyMessage]


class Suspect(NamedTuple):
    session: SessionId
    suspect: bool


class Writable(NamedTuple):
    session: SessionId


Seen = Opened | Lost | Batch | Suspect | Writable


def hello(node: str, role: Role, **given: Any) -> Hello:
    values: dict[str, Any] = {
        "node": NodeId(node),
        "incarnation": Incarnation(secrets.randbits(64)),
        "role": role,
        "protocol_version": PROTOCOL_VERSION,
        "logic_version": 1,
        "fingerprint": "model-a" if role == "encoder" else "",
        "data_plane": "" if role == "client" else "shm",
        "segment": "" if role == "client" else f"segment-of-{node}",
        "limits": PeerLimits(128, 1 << 20, 1 << 20),
    }
    return Hello(**(values | given))


class TestNode:
    """One endpoint; `seen` is everything its handler was told, in order."""

    __test__ = False

    def __init__(
        self, ours: Hello, limits: SessionLimits = PATIENT, max_peers: int = 256, **given: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        self.hello = ours
        self.address = ""
        self.seen: list[Seen] = []
        self.steps: list[tuple[Hashable, Event, tuple[Effect, ...]]] = []
        self.errors: list[Exception] = []
        self.on_opened: Callable[[SessionId], object] = lambda session: None
        self.on_writable: Callable[[SessionId], None] = lambda session: None
        self._told = asyncio.Event()
        clock = MonotonicClock()
        self.timers = Timers(clock, loop.call_at, on_error=self.errors.append)
        self.endpoint = Endpoint(
            hello=lambda: self.hello,
            limits=limits,
            clock=clock,
            timers=self.timers,
            recorder=self,
            handler=self,
            max_peers=max_peers,
            on_error=self.errors.append,
            **given,
        )

    async def close(self, linger_s: float = 1.0) -> None:
        await self.endpoint.close_all(linger_s)
        self.check()

    def check(self) -> None:
        """After the close: nothing failed, nothing waits."""
        assert not self.errors
        assert len(self.timers) == 0

    async def turn(self) -> None:
        """Lets the loop's other work, and what other threads do, go on."""
        await asyncio.to_thread(int)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what the handler was told makes it true."""
        async with asyncio.timeout(FAIL_AFTER_S):
            while not condition():
                self._told.clear()
                await self._told.wait()
        assert not self.errors

    async def ended(self, session: SessionId) -> Lost:
        await self.until(lambda: any(lost.session == session for lost in self.lost))
        return next(lost for lost in self.lost if lost.session == session)

    async def opened(self, count: int = 1) -> list[Opened]:
        """The first `count` sessions that opened here."""
        await self.until(lambda: len(self.opens) >= count)
        return self.opens[:count]

    async def received(self, count: int) -> list[AnyMessage]:
        await self.until(lambda: len(self.messages_seen) >= count)
        return self.messages_seen

    @property
    def opens(self) -> list[Opened]:
        return [event for event in self.seen if isinstance(event, Opened)]

    @property
    def lost(self) -> list[Lost]:
        return [event for event in self.seen if isinstance(event, Lost)]

    @property
    def batches(self) -> list[Batch]:
        return [event for event in self.seen if isinstance(event, Batch)]

    @property
    def messages_seen(self) -> list[AnyMessage]:
        return [message for batch in self.batches for message in batch.messages]

    # -- SessionHandler

    def session_opened(self, session: SessionId, peer: PeerInfo) -> None:
        self._tell(Opened(session, peer))
        self.on_opened(session)

    def session_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None:
        self._tell(Lost(session, peer, code, reason))

    def session_suspect(self, session: SessionId, suspect: bool) -> None:
        self._tell(Suspect(session, suspect))

    def messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None:
        self._tell(Batch(session, list(messages)))

    def media_writable(self, session: SessionId) -> None:
        self._tell(Writable(session))
        self.on_writable(session)

    def load(self) -> Heartbeat:
        return Heartbeat(1, 2, 3)

    def _tell(self, event: Seen) -> None:
        self.seen.append(event)
        self._told.set()

    # -- StepRecorder

    def declare(self, kind: str, limits: Any) -> None:
        assert kind == "session"

    def record(
        self, kind: str, key: Hashable, event: Event, now_s: float, effects: tuple[Effect, ...]
    ) -> None:
        self.steps.append((key, event, effects))


class RawPeer:
    """Speaks the wire by hand, over plain sockets of its own context, one per lane."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def dial(self, address: str, session: int, routing_id: bytes | None = None) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, routing_id or session.to_bytes(8, "little"))
        socket.connect(address)
        return socket

    def listen(self) -> tuple[zmq.Socket[bytes], str]:
        socket = self._socket(zmq.ROUTER)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        return socket, f"tcp://127.0.0.1:{port}"

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        self.sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(FAIL_AFTER_S * 1000))
        return socket

    def close(self) -> None:
        for socket in self.sockets:
            socket.close(0)
        self.context.term()


async def parts_from(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The next message of a raw socket, while the loop goes on."""
    return await asyncio.to_thread(socket.recv_multipart)


async def frame_from(socket: zmq.Socket[bytes], lane: Lane = Lane.CONTROL) -> Frame:
    return open_frame((await parts_from(socket))[-1], lane)


@contextlib.contextmanager
def until_disconnected(listening: LaneSocket) -> Iterator[None]:
    """What happens inside ends a connection; afterwards the listener could know. The loop has no turn."""
    assert isinstance(listening, ZmqLane)
    socket = listening._socket
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    monitor.setsockopt(zmq.RCVTIMEO, int(FAIL_AFTER_S * 1000))
    try:
        yield
        monitor.recv_multipart()
    finally:
        socket.disable_monitor()
        monitor.close(0)


def frame(session: int, sequence: int, *messages: AnyMessage, lane: Lane = Lane.CONTROL) -> bytes:
    return build_frame(lane, SessionId(session), sequence, [encode_message(m) for m in messages])


async def word_from(socket: zmq.Socket[bytes]) -> AnyMessage:
    """The next message that is no heartbeat (those may come at any time, after a `Welcome` in its frame).

    A `Rejected` is outside the sequence, everything else is in it.
    """
    while True:
        received = await frame_from(socket)
        words = [message for message in decode_body(received) if not isinstance(message, Heartbeat)]
        assert len(words) <= 1
        for word in words:
            assert (received.sequence == OUTSIDE) == isinstance(word, Rejected)
            return word


async def last_word_from(socket: zmq.Socket[bytes]) -> tuple[str, str]:
    """Code and reason of the next word, which is a `Rejected`."""
    word = await word_from(socket)
    assert isinstance(word, Rejected)
    return word.code, word.reason


def welcome_of(ours: Hello, media_address: str) -> Welcome:
    values = {name: getattr(ours, name) for name in Hello.__struct_fields__ if name != "dial"}
    return Welcome(**values, media_address=media_address)


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# -- nodes as processes ----------------------------------------------------------------------


class Process:
    """An encoder node of this module in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        here = Path(__file__).resolve()
        path = os.pathsep.join(filter(None, [str(here.parents[2]), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, str(here), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )

    async def said(self) -> Any:
        """The next line it printed, as JSON."""
        assert self._process.stdout is not None
        return json.loads(await asyncio.to_thread(self._process.stdout.readline))

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _print(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def _listen(address: str) -> None:
    """Print the address, then the reason of every `Goodbye` that arrives."""
    node = TestNode(hello("child", "encoder"))
    _print(node.endpoint.bind(address))
    count = 0
    while True:
        count += 1
        messages = await node.received(count)
        assert isinstance(messages[count - 1], Goodbye)
        _print(messages[count - 1].reason)  # type: ignore[union-attr]  # asserted above


async def _dial(address: str, last_words: str) -> None:
    """Open a session, say it, and wait to be killed; or say many last words and end in order."""
    node = TestNode(hello("child", "prefill"))
    session = node.endpoint.dial(address)
    await node.opened()
    _print(session)
    if not last_words:
        await asyncio.Event().wait()
    for number in range(int(last_words)):
        node.endpoint.send(session, Goodbye(f"{number}"))
    await node.close()


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    asyncio.run(_listen(where) if what == "listen" else _dial(where, *rest))
