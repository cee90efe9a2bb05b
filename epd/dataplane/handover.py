"""Handing sealed memfds to readers of our own user, over a Unix socket with an unguessable name.

The socket's name is abstract: it is bound to the network namespace, has no file and no mode, and ends
with this process. What a reader gets can be mapped read-only and in no other way.
"""

import array
import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from epd.dataplane.mappings import OwnRegion, ReadOnlyMapping, is_sealed
from epd.protocol.errors import DataPlaneError

_log = structlog.get_logger()

OPEN_TIMEOUT_S: Final = 5.0
"""How long a peer may take to hand over its descriptors, and we to a reader that does not read."""
_FDS_PER_MESSAGE: Final = 128  # Linux allows 253
_HEAD: Final = struct.Struct("<II")  # regions in all, regions in this message
_REGION: Final = struct.Struct("<IQ")  # region, nbytes
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid of SO_PEERCRED


class Handover:
    """Our side: a thread that hands out `regions`. Raises `DataPlaneError` where there is no such socket."""

    def __init__(self) -> None:
        self.name = f"@epd-{secrets.token_hex(16)}"
        self.regions: Sequence[OwnRegion] = ()
        """What is handed out; set before anybody is told our name."""
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_address(self.name))
            self._listener.listen(64)
        except OSError as error:
            self._listener.close()
            raise DataPlaneError(f"shm: no abstract Unix socket: {error}") from error
        self._server = threading.Thread(target=self._serve, name="epd-shm-export", daemon=True)
        self._server.start()

    def close(self) -> bool:
        """End the thread; whether it was still to be ended."""
        if self._closing.is_set():
            return False
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._server.join()
        self._listener.close()
        return True

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
        regions = self.regions
        for first in range(0, max(1, len(regions)), _FDS_PER_MESSAGE):
            some = regions[first : first + _FDS_PER_MESSAGE]
            body = _HEAD.pack(len(regions), len(some))
            body += b"".join(_REGION.pack(r.region, r.nbytes) for r in some)
            with contextlib.ExitStack() as stack:
                fds = [r.reopen_read_only() for r in some]
                for fd in fds:
                    stack.callback(os.close, fd)
                socket.send_fds(reader, [body], fds)


def map_handed_over(name: str, announced: Mapping[int, int]) -> dict[int, ReadOnlyMapping]:
    """Map the memory that a peer hands out at `name`: exactly `announced`, region to bytes.

    Raises `OSError`, also for anything the peer says wrongly; then nothing stays mapped.
    """
    received: dict[int, tuple[int, int]] = {}
    mapped: dict[int, ReadOnlyMapping] = {}
    try:
        _receive(name, received)
        for region, nbytes in announced.items():
            fd, said_nbytes = received.get(region, (-1, -1))
            if said_nbytes != nbytes or not is_sealed(fd, nbytes):
                raise OSError(f"region {region} is not sealed memory of {nbytes} B")
            mapped[region] = ReadOnlyMapping(fd, nbytes)
    except OSError:
        for mapping in mapped.values():
            mapping.close()
        raise
    finally:
        for fd, _ in received.values():
            os.close(fd)
    return mapped


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
