"""CURVE keys in files: this node's own, and the allow-list that says whose key may be whom.

A key is text in Z85, 40 characters. A secret key stands alone in a file that only its owner can read;
the public one follows from it. The allow-list is TOML:

    [[peer]]
    key = "PUBLIC KEY"
    role = "prefill"                       # what its Hello or Welcome must say
    node = "prefill-a"                     # likewise; without it any name that is no other entry's
    addresses = ["tcp://10.0.0.7:7101"]    # where it is dialled: encoders only
"""

import os
import stat
import struct
import tomllib
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from epd.protocol.errors import ConfigError
from epd.protocol.messages import Role
from epd.runtime.addresses import parse_address

_Z85_CHARS: Final = 40
_MAX_SECRET_FILE_NBYTES: Final = 256
_MAX_PEERS_FILE_NBYTES: Final = 4 * 1024 * 1024


class KeyPair(NamedTuple):
    """Both in Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


class PeerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one key may be. `role` and `node` None: anything."""

    key: str
    role: Role | None = None
    node: str | None = None
    addresses: tuple[str, ...] = ()


class Peers:
    """The allow-list: keys, whom each may be, and whose key is expected at an address."""

    def __init__(self, entries: Sequence[PeerEntry]) -> None:
        self._by_key = {entry.key: entry for entry in entries}
        self._named = {entry.node: entry.key for entry in entries if entry.node is not None}
        self._by_address = {
            str(parse_address(address, key="security.peers")): entry.key
            for entry in entries
            for address in entry.addresses
        }

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def key_at(self, address: str) -> str | None:
        """The key of whoever listens at `tcp://HOST:PORT`; None: nobody is expected there."""
        return self._by_address.get(str(parse_address(address)))

    def refusal(self, key: str, role: Role, node: str) -> str:
        """Why the holder of `key` is not this node in this role; empty: it is."""
        entry = self._by_key.get(key)
        if entry is None:
            return "this key is not in the list of peers"
        if entry.role is not None and entry.role != role:
            return f"this key is one of role {entry.role!r}, not {role!r}"
        if entry.node is not None and entry.node != node:
            return f"this key is node {entry.node!r}'s, not {node!r}'s"
        if entry.node is None and self._named.get(node, key) != key:
            return f"node {node!r} has another key"
        return ""


class Security(NamedTuple):
    """What makes an endpoint speak CURVE on both lanes, and nothing else."""

    keys: KeyPair
    peers: Peers


def security_for(keys: KeyPair, address: str, server_key: str) -> Security:
    """A client's: whoever listens at `address` holds `server_key`, and may be any node."""
    return Security(keys, Peers([PeerEntry(server_key, addresses=(address,))]))


def new_keys() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def write_keys(path: str, keys: KeyPair) -> None:
    """The secret key to `path`, which only the owner may read, and the public one to `path`.pub.

    Raises `ConfigError` if either is there already, or cannot be written.
    """
    for name, text, mode in ((path, keys.secret, 0o600), (f"{path}.pub", keys.public, 0o644)):
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except OSError as error:
            raise ConfigError(f"{name}: cannot be written: {error.strerror}", key="file") from None
        with open(descriptor, "w") as file:
            os.fchmod(descriptor, mode)  # whatever the umask is
            file.write(f"{text}\n")


def read_secret_key(path: str, *, key: str = "security.secret_key") -> KeyPair:
    """Raises `ConfigError` naming `key` if anybody but the owner may read the file, or it is no key."""
    text = _read(path, key, 0o077, "chmod 600 it", _MAX_SECRET_FILE_NBYTES)
    if not is_key(text.strip()):
        raise ConfigError(f"{key}: {path}: not a key; make one with: epd keygen FILE", key=key, given=path)
    secret = text.strip()
    return KeyPair(zmq.curve_public(secret.encode()).decode(), secret)


def read_public_key(text: str, *, key: str) -> str:
    """A public key, given as itself or as the name of a file that holds it. Raises `ConfigError`."""
    if is_key(text):
        return text
    found = _read(text, key, 0o022, "chmod 644 it", _MAX_SECRET_FILE_NBYTES).strip()
    if not is_key(found):
        raise ConfigError(f"{key}: {text}: not a key", key=key, given=text)
    return found


def read_peers(path: str, *, key: str = "security.peers") -> Peers:
    """Raises `ConfigError` naming `key` if others may write the file, or an entry is wrong."""
    text = _read(path, key, 0o022, "chmod 644 it", _MAX_PEERS_FILE_NBYTES)
    try:
        tables = tomllib.loads(text)
        entries = msgspec.convert(tables.pop("peer", []), list[PeerEntry])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{key}: {path}: {error}", key=key, given=path) from None
    if tables:
        raise ConfigError(f"{key}: {path}: {next(iter(tables))!r} given, allowed is [[peer]]", key=key)
    for wrong in _wrongs(entries):
        raise ConfigError(f"{key}: {path}: {wrong}", key=key, given=path)
    return Peers(entries)


def is_key(text: str) -> bool:
    if len(text) != _Z85_CHARS or not text.isascii():
        return False
    try:
        return z85.encode(z85.decode(text.encode())).decode() == text
    except (KeyError, ValueError, struct.error):
        return False


def _wrongs(entries: Sequence[PeerEntry]) -> list[str]:
    wrongs = []
    keys = [entry.key for entry in entries]
    names = [entry.node for entry in entries if entry.node is not None]
    addresses = [address for entry in entries for address in entry.addresses]
    for number, entry in enumerate(entries, 1):
        if not is_key(entry.key):
            wrongs.append(f"peer {number}: key {entry.key!r} given, allowed is a public key of epd keygen")
        if entry.role is None:
            wrongs.append(f"peer {number}: role missing, allowed is encoder, prefill or client")
        for address in entry.addresses:
            parse_address(address, key="security.peers")
    for what, values in (("key", keys), ("node", names), ("address", addresses)):
        twice = sorted({value for value in values if values.count(value) > 1})
        wrongs += [f"{what} {value!r} given twice, allowed is once" for value in twice]
    return wrongs


def _read(path: str, key: str, forbidden: int, remedy: str, limit: int) -> str:
    """Text of a regular file that has none of the mode bits `forbidden`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error.strerror}", key=key, given=path) from None
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise ConfigError(f"{key}: {path}: not a file", key=key, given=path)
    with open(descriptor, "rb") as file:
        mode = stat.S_IMODE(facts.st_mode)
        if mode & forbidden:
            doing = "read" if forbidden & 0o044 else "change"
            raise ConfigError(
                f"{key}: {path}: others may {doing} it (mode {mode:04o}); {remedy}", key=key, given=path
            )
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ConfigError(f"{key}: {path}: more than {limit} bytes", key=key, given=path)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path}: not text", key=key, given=path) from None
