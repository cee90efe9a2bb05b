"""The trace format: what was fed to every machine of a node, and what came of it.

A trace is a sequence of records, each 4 bytes of length (little endian) and that much msgpack:

    1st record      TraceHeader, a map
    [kind, limits]  before the first step of that kind: the limits all its machines are stepped with
    [kind, key, now_s, event, effects]    one step of the machine `key` of that kind

A torn tail, from a node that died while writing, loses its last record and nothing else. Events and
effects never hold payload or media bytes, so a trace does not either.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from epd.protocol.errors import EpdError
from epd.protocol.ids import Incarnation, NodeId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import Role

MAGIC: Final = "epd-trace"
FORMAT_VERSION: Final = 1
"""Of the records: how they are framed and what they hold."""
LOGIC_VERSION: Final = 1
"""Of the machines: one more whenever the same events may give other effects."""
MAX_RECORD_NBYTES: Final = 16 * 1024 * 1024
"""Far above any step; what claims more is not a record."""

_PREFIX_NBYTES: Final = 4
_DECLARATION: Final = 0x92
"""First byte of a msgpack array of two."""

Key = int | str | tuple[int | str, ...]


class UnreadableTrace(EpdError):
    """Not a trace, of another version, or damaged.

    `reason` is one of: magic, format_version, logic_version, corrupt, kind, limits.
    """

    code = "trace_unreadable"


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote the trace. `started_unix_s` is wall-clock time; records have the node's own clock."""

    magic: str = MAGIC
    format_version: int = FORMAT_VERSION
    logic_version: int = LOGIC_VERSION
    node: NodeId
    role: Role
    incarnation: Incarnation
    started_unix_s: float


class LimitsRecord(NamedTuple):
    """The limits of one kind; still encoded."""

    kind: str
    limits: msgspec.Raw


class StepRecord(NamedTuple):
    """One step; event and effects still encoded, the registry knows their types."""

    kind: str
    key: Key
    now_s: float
    event: msgspec.Raw
    effects: msgspec.Raw


Record = LimitsRecord | StepRecord


class _Versions(msgspec.Struct, frozen=True):
    """Read before the rest of the header, which another version may have changed."""

    magic: str
    format_version: int
    logic_version: int


_encoder = msgspec.msgpack.Encoder()
_versions_decoder = msgspec.msgpack.Decoder(_Versions)
_header_decoder = msgspec.msgpack.Decoder(TraceHeader)
_limits_decoder = msgspec.msgpack.Decoder(LimitsRecord)
_step_decoder = msgspec.msgpack.Decoder(StepRecord)


def append_header(buffer: bytearray, header: TraceHeader) -> None:
    """Add the first record of a trace."""
    _append(buffer, header)


def append_limits(buffer: bytearray, kind: str, limits: Any) -> None:
    """Add the limits of a kind; once, before its first step."""
    _append(buffer, (kind, limits))


def append_step(
    buffer: bytearray, kind: str, key: Hashable, event: Event, now_s: float, effects: tuple[Effect, ...]
) -> None:
    """Add one step. Leaves `buffer` as it was if something in it cannot be encoded, and raises."""
    _append(buffer, (kind, key, now_s, event, effects))


def _append(buffer: bytearray, record: object) -> None:
    start = len(buffer)
    body = start + _PREFIX_NBYTES
    buffer += b"\0\0\0\0"
    try:
        _encoder.encode_into(record, buffer, body)
        buffer[start:body] = (len(buffer) - body).to_bytes(_PREFIX_NBYTES, "little")
    except BaseException:
        del buffer[start:]
        raise


class TraceReader:
    """Reads a trace from `read(nbytes)`, which gives fewer bytes only at the end (a buffered file's).

    Checks the header at once; iterate for the records. Both raise `UnreadableTrace`. `torn` is true
    after the end if the last record was incomplete.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self.torn = False
        self.header = self._read_header()

    def __iter__(self) -> Iterator[Record]:
        index = 0
        while body := self._next_body():
            try:
                if body[0] == _DECLARATION:
                    yield _limits_decoder.decode(body)
                else:
                    yield _step_decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise UnreadableTrace(f"record {index} is damaged: {error}", reason="corrupt") from None
            index += 1

    def _read_header(self) -> TraceHeader:
        try:
            body = self._next_body()
            versions = _versions_decoder.decode(body)
        except (msgspec.MsgspecError, UnreadableTrace):
            raise UnreadableTrace("not a trace of epd", reason="magic") from None
        if versions.magic != MAGIC:
            raise UnreadableTrace("not a trace of epd", reason="magic")
        for name, ours in (("format_version", FORMAT_VERSION), ("logic_version", LOGIC_VERSION)):
            theirs = getattr(versions, name)
            if theirs != ours:
                raise UnreadableTrace(
                    f"trace of {name} {theirs}, this program reads {ours}", reason=name, found=theirs
                )
        try:
            return _header_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise UnreadableTrace(f"the header is damaged: {error}", reason="corrupt") from None

    def _next_body(self) -> bytes:
        """The next record's bytes; none at the end, wherever the end is."""
        prefix = self._read(_PREFIX_NBYTES)
        nbytes = int.from_bytes(prefix, "little")
        if nbytes > MAX_RECORD_NBYTES:
            raise UnreadableTrace(f"a record of {nbytes} B: damaged before it", reason="corrupt")
        body = self._read(nbytes) if len(prefix) == _PREFIX_NBYTES else b""
        if len(body) == nbytes > 0:
            return body
        # A length of zero is a tail that the file system never got: torn as well.
        self.torn = len(prefix) > 0
        return b""
