"""What is learned about a Mooncake engine from outside of it: its descriptor, and our connections.

Every engine answers a metadata request on its RPC port with its segment's descriptor. We ask for
ourselves what the engine would ask as well, for two reasons. The engine asks while it holds the lock
that every read takes, and waits up to a minute for a stopped process; our question has a short time
limit and comes first. And the descriptor holds what the bindings do not tell: the transport really
in use, and the port to which our connections for data go, which is how they are found to be aborted.
"""

import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Final

import msgspec

_METADATA_REQUEST: Final = 1
_LENGTH: Final = struct.Struct("<Q")
_MAX_DESCRIPTOR_NBYTES: Final = 16 * 1024 * 1024


class Buffer(msgspec.Struct, frozen=True):
    """A range the engine has registered."""

    addr: int
    length: int


class Descriptor(msgspec.Struct, frozen=True):
    """The part of a segment's descriptor that we use; unknown fields are ignored."""

    protocol: str
    buffers: tuple[Buffer, ...] = ()
    tcp_data_host: str = ""
    tcp_data_port: int = 0


def ask_descriptor(segment: str, timeout_s: float) -> Descriptor:
    """The descriptor of the engine at `segment` (`HOST:PORT`).

    Raises `OSError`: refused, silent for longer than `timeout_s`, or not an engine.
    """
    host, _, port = segment.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise OSError(f"{segment!r} is not HOST:PORT")
    with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as engine:
        engine.sendall(_LENGTH.pack(3) + bytes([_METADATA_REQUEST]) + b"{}")
        (nbytes,) = _LENGTH.unpack(_receive_exactly(engine, _LENGTH.size))
        if not 1 < nbytes <= _MAX_DESCRIPTOR_NBYTES:
            raise OSError(f"{segment} answers with {nbytes} B: not a Mooncake engine")
        answer = _receive_exactly(engine, nbytes)
    try:
        return msgspec.json.decode(answer[1:], type=Descriptor)
    except msgspec.MsgspecError as error:
        raise OSError(f"{segment} answers with something else than a descriptor: {error}") from None


def _receive_exactly(peer: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        some = peer.recv(nbytes - len(received))
        if not some:
            raise OSError("the engine hung up")
        received += some
    return bytes(received)


def shut_connections(host: str, port: int) -> set[str]:
    """Shut down this process's TCP connections to `host:port`; their inodes.

    They are looked up by inode now, not remembered: descriptor numbers are reused. `host` is an
    address or a name.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    wanted = {(_plain(str(address[0])), port) for *_, address in found}
    inodes = {inode for inode, remote in _connections() if remote in wanted}
    shut = set()
    for fd, inode in _own_sockets():
        if inode in inodes:
            # A copy of the descriptor: the engine keeps its own and sees the end on it.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                shut.add(inode)
                connection.shutdown(socket.SHUT_RDWR)  # raises if the peer has gone before us
    return shut


def still_open(inodes: set[str]) -> set[str]:
    """Those of these sockets that this process still has, in whatever state."""
    return inodes & {inode for _, inode in _own_sockets()}


def _own_sockets() -> list[tuple[int, str]]:
    """`(descriptor, inode)` of this process's sockets."""
    sockets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            sockets.append((int(entry.name), target[8:-1]))
    return sockets


def _connections() -> list[tuple[str, tuple[str, int]]]:
    """`(inode, (remote address, remote port))` of the TCP connections of this network namespace."""
    connections = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                address, _, port = fields[2].partition(":")
                connections.append((fields[9], (_decode(address), int(port, 16))))
    return connections


def _decode(text: str) -> str:
    """The kernel's hexadecimal address: 32-bit words in the machine's own order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(text), 8)]
    return _plain(str(ipaddress.ip_address(b"".join(words))))


def _plain(address: str) -> str:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip)
