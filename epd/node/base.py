"""What a node of either role has: plane, endpoint, clients, recorder, metrics; its life from start to end."""

import asyncio
import contextlib
import itertools
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from epd.actors import clients
from epd.config import Config
from epd.dataplane.base import DataPlane
from epd.dataplane.push import PUSHED, PushPlane
from epd.dataplane.select import open_plane
from epd.memory.pool import Pool
from epd.node.host import THIS_HOST, Host
from epd.observe.families import Sample, samples
from epd.protocol.errors import Busy, ConfigError, spans_need_the_extra
from epd.protocol.ids import Incarnation, NodeId, SessionId
from epd.protocol.messages import (
    AnyMessage,
    Heartbeat,
    Hello,
    Inventory,
    InventoryRequest,
    MediaChunk,
    MediaMissing,
    PeerLimits,
    Role,
    Submit,
)
from epd.protocol.session import SessionLimits
from epd.protocol.trace import LOGIC_VERSION, StateWritten
from epd.protocol.wire import MAX_ITEMS_PER_PART, PROTOCOL_VERSION
from epd.runtime.actor import Actor
from epd.runtime.endpoint import Endpoint, PeerInfo
from epd.runtime.keys import Security, read_peers, read_secret_key
from epd.runtime.machines import Observe
from epd.runtime.mailbox import Mailbox
from epd.runtime.recorder import Recorder
from epd.runtime.runtime import Runtime
from epd.runtime.supervisor import Supervisor
from epd.runtime.timers import Timers

if TYPE_CHECKING:
    from epd.runtime.monitor import Monitor
    from epd.runtime.spans import Spans

PlaneFactory = Callable[[], DataPlane]


class Node(ABC):
    """One incarnation of either role."""

    role: ClassVar[Role]

    def __init__(
        self, config: Config, *, open_plane_with: PlaneFactory | None = None, host: Host = THIS_HOST
    ) -> None:
        self.config = config
        self.host = host
        self.incarnation = Incarnation(host.randbits(64))
        self.node_id = NodeId(config.node or "")
        self.listen = ""
        self._open_plane = open_plane_with or (
            lambda: (
                open_plane(config.data_plane, config.plane_host(), config.device)
                if config.direction == "pull"
                else PushPlane(config.plane_host())
            )
        )
        self.security = _load_security(config)
        self._exit = contextlib.AsyncExitStack()
        self._actors: list[Actor[Any]] = []
        self._client_sessions: set[SessionId] = set()
        self.failure: asyncio.Future[None]
        self.plane: DataPlane
        self.pool: Pool
        self.endpoint: Endpoint
        self.runtime: Runtime
        self.clients: clients.ClientActor
        self.monitor: Monitor | None = None
        """Metrics and health; None without `metrics_port`."""
        self._spans: Spans | None = None

    @property
    def data_plane(self) -> str:
        """`shm` or `mooncake/TRANSPORT`, the one really in use."""
        return self.plane.name

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exit.__aexit__(kind, error, trace)

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        self.plane = await asyncio.to_thread(self._open_plane)
        stack.push_async_callback(asyncio.to_thread, self.plane.close)
        host, clock = self.host, self.host.clock
        supervisor = Supervisor(self._actors)
        timers = Timers(clock, loop.call_at, supervisor.fail)
        stack.callback(timers.close)  # nothing of the node stays in the caller's loop
        self.runtime = Runtime(clock, timers, None, host.randbits)
        stack.callback(self._close_recorder)  # after the endpoint: the ends of sessions are steps too
        self.endpoint = Endpoint(
            hello=self._hello,
            limits=self._session_limits(),
            clock=clock,
            timers=timers,
            recorder=None,
            handler=self,
            max_peers=self.config.limits.max_peers,
            on_error=supervisor.fail,
            security=self.security,
            rates=self.config.limits.rates(),
            open_transport=host.open_transport,
            randbits=host.randbits,
        )
        stack.push_async_callback(self.endpoint.close_all, 1.0)
        self.listen = self.endpoint.bind(self.config.listen, self.config.media_listen, accept=False)
        if not self.node_id:
            port = self.listen.rpartition(":")[2]
            self.node_id = NodeId(f"{self.role}-{platform.node()}-{port}")
        if self.config.metrics_port is not None:
            await self._start_monitor(self.config.metrics_port, stack)
        if self.config.spans:
            self._start_spans(stack)
        self._watch_steps()
        if self.config.trace is not None:
            recorder = Recorder(
                self.config.trace,
                self.node_id,
                self.role,
                self.incarnation,
                timers,
                host.unix_s(),
                host.trace_writer,
                file_nbytes=self.config.trace_file_nbytes,
                files=self.config.trace_files,
            )
            recorder.live = self._live_machines
            self.runtime.recorder = self.endpoint.recorder = recorder
        await self._build(stack)
        self.failure = supervisor.start()
        stack.push_async_callback(supervisor.stop)
        self.endpoint.accept()
        if self.monitor is not None:
            self.monitor.started(self.pool)
            self.failure.add_done_callback(self._note_failure)

    def _live_machines(self) -> Iterator[StateWritten]:
        return itertools.chain(self.runtime.live(), self.endpoint.live())

    def _close_recorder(self) -> None:
        if self.runtime.recorder is not None:
            self.runtime.recorder.close()

    async def _start_monitor(self, port: int, stack: contextlib.AsyncExitStack) -> None:
        from epd.runtime.monitor import Monitor  # its exposition takes 50 ms to import

        monitor = Monitor(self.role, self.config.metrics_listen, port, self._can_serve, self._samples)
        self.monitor = monitor
        stack.push_async_callback(monitor.close)

    def _start_spans(self, stack: contextlib.AsyncExitStack) -> None:
        try:
            from epd.runtime.spans import Spans
        except ImportError as error:
            raise spans_need_the_extra(error) from error
        self._spans = Spans()
        stack.callback(self._spans.close)

    def _watch_steps(self) -> None:
        watchers: dict[str, tuple[Observe, ...]] = {}
        for observers in (
            {} if self.monitor is None else self.monitor.steps.observers,
            {} if self._spans is None else self._spans.observers,
        ):
            for kind, observe in observers.items():
                watchers[kind] = (*watchers.get(kind, ()), observe)
        self.runtime.observers = watchers
        self.endpoint.observe(watchers.get("session", ()))

    def _note_failure(self, failure: "asyncio.Future[None]") -> None:
        if self.monitor is not None and not failure.cancelled() and failure.exception() is not None:
            self.monitor.health.failed = True

    def _note_draining(self) -> None:
        if self.monitor is not None:
            self.monitor.health.draining = True

    @abstractmethod
    async def _build(self, stack: contextlib.AsyncExitStack) -> None:
        """Pool, actors and what else the role has."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Everything held, by name; all zero when nothing is open (I4), but for `*_free_nbytes`."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """The model's; empty from a prefill node that has not met an encoder."""

    # -- shared parts ------------------------------------------------------------------------

    def _mailbox(self, name: str) -> Mailbox[Any]:
        return Mailbox(f"{self.node_id}/{name}", self.config.mailbox_bound())

    def _add_clients(self, submit_to: Mailbox[Any] | None, stack: contextlib.AsyncExitStack) -> None:
        hasher = ThreadPoolExecutor(1, "epd-hasher")
        stack.callback(hasher.shutdown)
        self.clients = clients.ClientActor(
            self._mailbox("clients"),
            self.endpoint,
            submit_to,
            self.inventory,
            self.config.limits.media_nbytes,
            hasher,
        )
        self._actors.append(self.clients)

    def inventory(self) -> Inventory:
        """What `Inventory` answers: counts of everything held, and the state names seen."""
        return Inventory(self.counts(), tuple(sorted(self._states_seen())))

    @abstractmethod
    def _states_seen(self) -> set[str]: ...

    def _counts(self, *parts: dict[str, int]) -> dict[str, int]:
        counts: dict[str, int] = self.runtime.counts() | self.endpoint.counts() | self.clients.counts()
        counts["registrations"] = self.plane.registrations()
        counts["mail"] = sum(len(actor.mailbox) for actor in self._actors)
        for part in parts:
            counts |= part
        return counts

    @abstractmethod
    def _can_serve(self) -> bool:
        """A request that comes now would be worked on. For any thread."""

    def _samples(self) -> Iterator[Sample]:
        """What no machine's step tells, as it is now. For any thread."""
        roles: dict[str, int] = {"prefill": 0, "encoder": 0, "client": 0}
        for peer in self.endpoint.peers().values():
            roles[peer.role] += 1
        yield from samples("epd_sessions", roles)
        yield from samples("epd_rejected_frames", self.endpoint.rejected_frames)
        yield from samples("epd_mailbox_messages", {a.name: len(a.mailbox) for a in self._actors})

    def _hello(self) -> Hello:
        limits = PeerLimits(
            MAX_ITEMS_PER_PART,
            self._region_nbytes(),
            self.config.limits.max_item_media_nbytes,
        )
        return Hello(
            self.node_id,
            self.incarnation,
            self.role,
            PROTOCOL_VERSION,
            LOGIC_VERSION,
            self.fingerprint,
            PUSHED * (self.config.direction == "push") + self.plane.name,
            self.plane.segment,
            limits,
        )

    @abstractmethod
    def _region_nbytes(self) -> int: ...

    def _session_limits(self) -> SessionLimits:
        timeouts = self.config.timeouts
        return SessionLimits(
            heartbeat_s=timeouts.heartbeat_s,
            suspect_after_s=timeouts.suspect_after_s,
            dead_after_s=timeouts.dead_after_s,
            connect_s=timeouts.connect_s,
        )

    # -- SessionHandler: each message to the actor that owns it -------------------------------

    def session_opened(self, session: SessionId, peer: PeerInfo) -> None:
        if peer.role == "client":
            self._client_sessions.add(session)
        else:
            self._peer_opened(session, peer)

    def session_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None:
        if session in self._client_sessions:
            self._client_sessions.discard(session)
            self.clients.mailbox.tell(clients.ClientGone(session))
        else:
            self._peer_ended(session, peer, code, reason)

    def messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None:
        try:
            if session in self._client_sessions:
                self._client_messages(session, messages)
            else:
                self._peer_messages(session, messages)
        except Busy as error:  # more than its credits allow: a peer that floods loses its session
            self.endpoint.close(session, error.code, error.message)

    def _client_messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None:
        for message in messages:
            if isinstance(message, Submit | MediaChunk | MediaMissing | InventoryRequest):
                self.clients.mailbox.tell(clients.FromClient(session, message))

    def media_writable(self, session: SessionId) -> None:
        if session in self._client_sessions:
            self.clients.mailbox.tell(clients.MediaWritable(session))
        else:
            self._peer_writable(session)

    @abstractmethod
    def session_suspect(self, session: SessionId, suspect: bool) -> None: ...

    @abstractmethod
    def load(self) -> Heartbeat: ...

    @abstractmethod
    def _peer_opened(self, session: SessionId, peer: PeerInfo) -> None: ...

    @abstractmethod
    def _peer_ended(self, session: SessionId, peer: PeerInfo | None, code: str, reason: str) -> None: ...

    @abstractmethod
    def _peer_messages(self, session: SessionId, messages: Sequence[AnyMessage]) -> None: ...

    @abstractmethod
    def _peer_writable(self, session: SessionId) -> None: ...


def _load_security(config: Config) -> Security | None:
    """Raises `ConfigError` for a file that cannot be used, or an encoder without a key."""
    files = config.security
    if files.secret_key is None or files.peers is None:
        return None
    security = Security(read_secret_key(files.secret_key), read_peers(files.peers))
    for address in config.encoders:
        if security.peers.key_at(address) is None:
            message = f"security.peers: {files.peers}: no entry has {address} of encoders in its addresses"
            raise ConfigError(message, key="security.peers", given=address)
    return security


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
