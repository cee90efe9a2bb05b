"""Addresses `tcp://HOST:PORT`: parsed, checked and resolved here, never by ZeroMQ.

ZeroMQ resolves names in its I/O thread, where one bad name stalls every socket of the context, and
takes a port modulo 65,536.
"""

import asyncio
import ipaddress
import socket
from typing import Final, NamedTuple

from epd.protocol.errors import ConfigError, PeerUnreachable

_SCHEME: Final = "tcp://"
_MAX_PORT: Final = 65535


class Address(NamedTuple):
    """A host (a name, or a number without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        """`tcp://HOST:PORT`, as ZeroMQ takes it; a port 0 is for the system to choose."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_SCHEME}{host}:{self.port}"


def parse_address(text: str, *, key: str = "address", to_bind: bool = False) -> Address:
    """Parse `tcp://HOST:PORT`, `tcp://[IPV6]:PORT` too. Port 0 is allowed `to_bind`, not to dial.

    Raises `ConfigError` with `key`, what was given and what is allowed.
    """
    lowest = 0 if to_bind else 1
    allowed = f"tcp://HOST:PORT with a port of {lowest} to {_MAX_PORT}"
    wrong = ConfigError(f"{key}: {text!r} given, allowed is {allowed}", key=key, given=text, allowed=allowed)
    if not text.startswith(_SCHEME):
        raise wrong
    host, colon, port = text[len(_SCHEME) :].rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    good_host = host.isascii() and host.isprintable() and not any(c in "[]/?#@;* " for c in host)
    if not colon or not host or not good_host or bracketed != (":" in host):
        raise wrong
    # int() would take signs, spaces, underscores and other scripts' digits
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and lowest <= int(port) <= _MAX_PORT):
        raise wrong
    if bracketed and not is_numeric(host):
        raise wrong
    return Address(host, int(port))


def is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this host can reach it; a name other than `localhost` may mean anything."""
    return host == "localhost" or (is_numeric(host) and ipaddress.ip_address(host).is_loopback)


def is_wildcard(host: str) -> bool:
    """Whether the host means every interface, which nobody can dial."""
    return is_numeric(host) and ipaddress.ip_address(host).is_unspecified


async def resolve(address: Address) -> list[Address]:
    """Numeric addresses of a host, best first, without duplicates; never empty.

    Resolved in the loop's executor. Raises `PeerUnreachable` with the name and the resolver's word.
    """
    if is_numeric(address.host):
        return [address]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _unresolvable(address, error) from error
    return _numbers(address, [str(info[4][0]) for info in found])


def resolve_to_bind(address: Address, *, key: str = "listen") -> Address:
    """The first numeric address of a host that we are to bind. Blocks: for the start of a node only.

    Raises `ConfigError` with `key` and the resolver's word.
    """
    if is_numeric(address.host):
        return address
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{key}: {address}: {error}", key=key, given=str(address)) from error
    return _numbers(address, [str(info[4][0]) for info in found])[0]


def _numbers(address: Address, hosts: list[str]) -> list[Address]:
    unique = dict.fromkeys(host for host in hosts if is_numeric(host))
    if not unique:
        raise _unresolvable(address, OSError("no address"))
    return [Address(host, address.port) for host in unique]


def _unresolvable(address: Address, error: Exception) -> PeerUnreachable:
    return PeerUnreachable(f"cannot resolve {address.host!r}: {error}", address=str(address))
