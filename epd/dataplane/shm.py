"""The `shm` plane: same host, host memory, nothing but the standard library.

Staging regions are sealed memfds, handed to readers over a Unix socket with an unguessable abstract
name (our `segment`) and to nobody of another user; readers map them read-only. A read is one copy
by our own thread: synchronous, so it is never unknown, and nothing of it outlives a dead or stopped
peer. Its bytes are visible to this process when `post` returns.
"""

import array
import contextlib
import ctypes
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Final

import structlog

from epd.dataplane.base import Piece, Posted, ReadState
from epd.dataplane.mappings import (
    LocalMemory,
    OwnRegion,
    PeerMemory,
    ReadOnlyMapping,
    allocate_private,
    allocate_shared,
    is_sealed,
)
from epd.memory.region import Region
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import SessionId
from epd.protocol.messages import RegionDescriptor

_log = structlog.get_logger()

OPEN_TIMEOUT_S: Final = 5.0
"""How long a peer may take to hand over its descriptors, and we to a reader that does not read."""
_FDS_PER_MESSAGE: Final = 128  # Linux allows 253
_HEAD: Final = struct.Struct("<II")  # regions in all, regions in this message
_REGION: Final = struct.Struct("<IQ")  # region, nbytes
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid of SO_PEERCRED


class ShmPlane:
    """See `DataPlane`. Raises `DataPlaneError` where abstract Unix sockets cannot be had."""

    name = "shm"

    def __init__(self) -> None:
        self.segment = f"@epd-{secrets.token_hex(16)}"
        self._exported: list[OwnRegion] = []
        self._private: list[OwnRegion] = []
        self._local = LocalMemory()
        self._peers: dict[SessionId, PeerMemory] = {}
        self._mappings: dict[SessionId, list[ReadOnlyMapping]] = {}
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_address(self.segment))
            self._listener.listen(64)
        except OSError as error:
            self._listener.close()
            raise DataPlaneError(f"shm: no abstract Unix socket: {error}") from error
        self._server = threading.Thread(target=self._serve, name="epd-shm-export", daemon=True)
        self._server.start()

    # -- our regions -------------------------------------------------------------------------

    def allocate(self, count: int, region_nbytes: int, *, exported: bool) -> list[Region]:
        if exported and self._exported:
            raise DataPlaneError("shm: the staging pool was already allocated")
        if exported:
            regions = allocate_shared(count, region_nbytes)
            self._exported = regions
        else:
            regions = allocate_private(count, region_nbytes)
            self._private += regions
        self._local.add(regions)
        return list(regions)

    def export(self) -> tuple[RegionDescriptor, ...]:
        return tuple(RegionDescriptor(r.region, 0, r.nbytes) for r in self._exported)

    def _serve(self) -> None:
        """Hand the descriptors to every reader of our own user, until the listener is shut down."""
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                if self._closing.wait(0.1):  # out of descriptors, perhaps: do not spin
                    return
                continue
            with reader:
                try:
                    self._hand_over(reader)
                except OSError as error:
                    _log.warning("shm: descriptors not handed over", reason=str(error))

    def _hand_over(self, reader: socket.socket) -> None:
        if not _same_user(reader):
            _log.warning("shm: another user asked for our memory")
            return
        reader.settimeout(OPEN_TIMEOUT_S)
        regions = self._exported
        for first in range(0, max(1, len(regions)), _FDS_PER_MESSAGE):
            some = regions[first : first + _FDS_PER_MESSAGE]
            body = _HEAD.pack(len(regions), len(some))
            body += b"".join(_REGION.pack(r.region, r.nbytes) for r in some)
            with contextlib.ExitStack() as stack:
                fds = [r.reopen_read_only() for r in some]
                for fd in fds:
                    stack.callback(os.close, fd)
                socket.send_fds(reader, [body], fds)

    # -- peers -------------------------------------------------------------------------------

    def open_peer(self, session: SessionId, segment: str, regions: Sequence[RegionDescriptor]) -> ReadState:
        announced = {int(r.region): r.nbytes for r in regions}
        received: dict[int, tuple[int, int]] = {}
        mapped: dict[int, ReadOnlyMapping] = {}
        try:
            _receive(segment, received)
            for region, nbytes in announced.items():
                fd, said_nbytes = received.get(region, (-1, -1))
                if said_nbytes != nbytes or not is_sealed(fd, nbytes):
                    raise OSError(f"region {region} is not sealed memory of {nbytes} B")
                mapped[region] = ReadOnlyMapping(fd, nbytes)
        except OSError as error:
            _log.warning("shm: peer's memory cannot be mapped", segment=segment, reason=str(error))
            for mapping in mapped.values():
                mapping.close()
            return ReadState.FAILED
        finally:
            for fd, _ in received.values():
                os.close(fd)
        self._mappings[session] = list(mapped.values())
        self._peers[session] = PeerMemory([(r, m.address, m.nbytes) for r, m in mapped.items()])
        return ReadState.DONE

    def close_peer(self, session: SessionId) -> None:
        # Every read was over when its `post` returned: nothing still copies from these mappings.
        self._peers.pop(session, None)
        for mapping in self._mappings.pop(session, ()):
            mapping.close()

    # -- reads -------------------------------------------------------------------------------

    def post(self, session: SessionId, piece: Piece) -> Posted | ReadState:
        return self.read_now(session, piece)

    def read_now(self, session: SessionId, piece: Piece) -> ReadState:
        peer = self._peers.get(session)
        source = peer.address_of(piece) if peer is not None else None
        if source is None or not self._local.holds(piece.local_address, piece.nbytes):
            return ReadState.REFUSED
        ctypes.memmove(piece.local_address, source, piece.nbytes)
        return ReadState.DONE

    def poll(self, ticket: int) -> ReadState:
        raise DataPlaneError(f"shm: ticket {ticket} was never given; reads end in post()")

    def abort(self, session: SessionId) -> None:
        """Nothing to end: no read outlives its `post`."""

    def registrations(self) -> int:
        return 0

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._server.join()
        self._listener.close()
        for session in list(self._mappings):
            self.close_peer(session)
        for region in (*self._exported, *self._private):
            region.close()


def _address(segment: str) -> str:
    return "\0" + segment[1:]


def _same_user(peer: socket.socket) -> bool:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())


def _receive(segment: str, received: dict[int, tuple[int, int]]) -> None:
    """Fill `received` with `region -> (fd, nbytes)`; the caller closes them, whatever happens.

    Raises `OSError`, also for anything the peer says wrongly.
    """
    if not segment.startswith("@"):
        raise OSError(f"{segment!r} is not the segment of an shm plane")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(OPEN_TIMEOUT_S)
        peer.connect(_address(segment))
        if not _same_user(peer):
            raise OSError("the peer runs as another user")
        total = 1
        while len(received) < total:
            body, fds = _receive_message(peer)
            try:
                total, regions = _parse(body, len(fds))
                if any(region in received for region, _ in regions):
                    raise OSError("a region was handed over twice")
            except OSError:
                for fd in fds:
                    os.close(fd)
                raise
            for (region, nbytes), fd in zip(regions, fds, strict=True):
                received[region] = (fd, nbytes)


def _receive_message(peer: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    room = socket.CMSG_SPACE(_FDS_PER_MESSAGE * fds.itemsize)
    # Not socket.recv_fds: it ignores its flags in Python 3.11, the descriptors would be inherited.
    body, ancillary, flags, _ = peer.recvmsg(65536, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or not body:
        for fd in fds:
            os.close(fd)
        raise OSError("descriptors cut short" if body else "the peer hung up")
    return body, list(fds)


def _parse(body: bytes, count: int) -> tuple[int, list[tuple[int, int]]]:
    if len(body) < _HEAD.size or len(body) != _HEAD.size + count * _REGION.size:
        raise OSError("not a list of regions")
    total, here = _HEAD.unpack_from(body)
    if here != count or (count == 0 and total):
        raise OSError("not as many descriptors as regions")
    return total, [(r, n) for r, n in _REGION.iter_unpack(body[_HEAD.size :])]
