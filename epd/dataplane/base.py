"""The data plane: regions, peers, reads. One small interface, several transports.

Threads: everything here except `allocate`, `export`, `open_peer` and `close` is called from one
thread, the poller's. `open_peer` may wait for its peer (seconds at most), so it runs in a thread of
its own, beside the poller's and other `open_peer`. A plane never raises for what a peer did; it
answers with a `ReadState`.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from epd.memory.region import Region
from epd.protocol.ids import SessionId
from epd.protocol.messages import RegionDescriptor


class ReadState(Enum):
    """What is known of a piece that was to be read."""

    DONE = "done"
    """Terminal: the bytes are in our memory and visible to our CPU."""
    REFUSED = "refused"
    """Nothing was posted, nothing will be written."""
    FAILED = "failed"
    """Terminal: no more bytes will arrive; what arrived is worthless."""
    UNKNOWN = "unknown"
    """Still running: our engine may write. Go on polling; only DONE or FAILED free the memory."""


class Piece(NamedTuple):
    """One contiguous read: `local_address` is ours, `offset` is within the peer's `region`."""

    local_address: int
    region: int
    offset: int
    nbytes: int


class Posted(NamedTuple):
    """A piece that was posted; `ticket` is the plane's own number, never reused."""

    ticket: int


class DataPlane(Protocol):
    name: str
    """`shm` or `mooncake/TRANSPORT`, with the transport really in use."""
    device: str
    """Whose memory `allocate` takes: `cpu` or `cuda:N`, N as this process counts."""
    pieces: int
    """In how many pieces a large read is best cut here."""
    segment: str
    """What a peer needs to reach us: Mooncake `ip:port`, or the Unix socket's address for shm."""

    def allocate(self, count: int, region_nbytes: int, *, exported: bool) -> list[Region]:
        """Allocate, pre-fault and, where the plane needs it, register `count` regions.

        `exported` regions (staging) may be read by peers, never written; the others (receive) are
        reachable by nobody. Raises `DataPlaneError` with sizes. Call once per pool, at start.
        """
        ...

    def words(self, nbytes: int) -> Region:
        """Host memory where seals land: reads into it are of one seal each. Call once, at start."""
        ...

    def digest(self, address: int, nbytes: int) -> bytes:
        """Of a payload in our memory: xxh3-128 on the host, `epd.memory.tensors` on a GPU."""
        ...

    def export(self) -> tuple[RegionDescriptor, ...]:
        """What peers need to name the exported regions."""
        ...

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> ReadState:
        """Make a peer's exported regions readable: DONE or FAILED (unreachable, or not what it says)."""
        ...

    def close_peer(self, session: SessionId) -> None:
        """Forget a peer. Its running reads stay pollable until terminal."""
        ...

    def post(self, session: SessionId, piece: Piece) -> Posted | ReadState:
        """Start one read. DONE and FAILED at once where the plane is synchronous; REFUSED if the
        peer is unknown or the piece lies outside its regions."""
        ...

    def poll(self, ticket: int) -> ReadState:
        """UNKNOWN, or DONE/FAILED exactly once; the ticket is forgotten then (never ask again)."""
        ...

    def read_now(self, session: SessionId, piece: Piece) -> ReadState:
        """Post, and wait for the engine's last word: DONE, FAILED or REFUSED. It waits as long as the
        peer is silent, so it is for probes and tests; the poller posts and polls."""
        ...

    def abort(self, session: SessionId) -> None:
        """End the running reads from this peer by our own side; they then poll FAILED (or DONE).
        Reads of other peers behind the same address may be hit too and are retried."""
        ...

    def registrations(self) -> int:
        """Calls of the engine's register function so far (constant in steady state)."""
        ...

    def close(self) -> None:
        """Release everything, idempotent. No read is running any more, or the process is ending."""
        ...
