"""The trace format: what was fed to every machine of a node, and what came of it.

A file begins with its header: 4 bytes of length (little endian) and that much msgpack, a map. Then
blocks follow, each for itself:

    length u32, CRC-32 of the data u32, CRC-32 of these 8 bytes u32, data: zlib of a msgpack array

The array holds records of one sort, flat; its first value says how many values make one of them:

    2  kind, limits    before the first step of that kind: the limits all its machines are stepped with
    3  kind, key, state    in a file that goes on from another: where the machine `key` stands
    5  kind, key, now_s, event, effects    one step of the machine `key` of that kind

A torn tail, from a node that died while writing, loses its last record and nothing else: what was
written of a block can be read up to where it ends. Anything else that is wrong is `corrupt`. Every file
can be replayed alone: one that goes on from another has the states of all machines that had one, before
its first step. Events, effects and states never hold payload or media bytes, so a trace does not either.

Format 1 has no blocks: each record is an array, with 4 bytes of length before it as the header has. It
is read as well.
"""

import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from epd.protocol.errors import EpdError
from epd.protocol.ids import Incarnation, NodeId
from epd.protocol.machine import Effect, Event, State
from epd.protocol.messages import Role

MAGIC: Final = "epd-trace"
FORMAT_VERSION: Final = 2
"""Of the records: how they are framed and what they hold. All from 1 are read."""
LOGIC_VERSION: Final = 1
"""Of the machines: one more whenever the same events may give other effects. Traces of all from 1 are
replayed, by the machines that a version had (see `epd.protocol.registry.machines_of`)."""
MAX_RECORD_NBYTES: Final = 16 * 1024 * 1024
"""Far above any step, and any block as it is written; what claims more is neither."""
MAX_BLOCK_NBYTES: Final = 256 * 1024 * 1024
"""Of the records of one block; what unpacks to more is no block of ours."""

_PREFIX_NBYTES: Final = 4
_BLOCK_PREFIX_NBYTES: Final = 12

Key = int | str | tuple[int | str, ...]


class UnreadableTrace(EpdError):
    """Not a trace, of another version, or damaged.

    `reason` is one of: magic, format_version, logic_version, corrupt, kind, limits.
    """

    code = "trace_unreadable"


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote the trace. `started_unix_s` is wall-clock time; records have the node's own clock.

    `file` counts the files of one recording from 0; one that is not the first begins with states.
    """

    magic: str = MAGIC
    format_version: int = FORMAT_VERSION
    logic_version: int = LOGIC_VERSION
    node: NodeId
    role: Role
    incarnation: Incarnation
    started_unix_s: float
    file: int = 0


class LimitsRecord(NamedTuple):
    """The limits of one kind; still encoded."""

    kind: str
    limits: msgspec.Raw


class StateRecord(NamedTuple):
    """Where one machine stands at the beginning of a file; still encoded."""

    kind: str
    key: Key
    state: msgspec.Raw


class StepRecord(NamedTuple):
    """One step; event and effects still encoded, the registry knows their types."""

    kind: str
    key: Key
    now_s: float
    event: msgspec.Raw
    effects: msgspec.Raw


Record = LimitsRecord | StateRecord | StepRecord

LimitsWritten = tuple[str, Any]
StateWritten = tuple[str, Hashable, State]
StepWritten = tuple[str, Hashable, float, Event, tuple[Effect, ...]]
"""Records as they are written."""
Width = Literal[2, 3, 5]
"""How many values make one record: of limits, of a state, of a step."""
LIMITS: Final = 2
STATE: Final = 3
STEP: Final = 5


class _Versions(msgspec.Struct, frozen=True):
    """Read before the rest of the header, which another version may have changed."""

    magic: str
    format_version: int
    logic_version: int


_encoder = msgspec.msgpack.Encoder()
_versions_decoder = msgspec.msgpack.Decoder(_Versions)
_header_decoder = msgspec.msgpack.Decoder(TraceHeader)
_block_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_limits_decoder = msgspec.msgpack.Decoder(LimitsRecord)
_state_decoder = msgspec.msgpack.Decoder(StateRecord)
_step_decoder = msgspec.msgpack.Decoder(StepRecord)


def encode_header(header: TraceHeader) -> bytes:
    """The beginning of a file."""
    body = _encoder.encode(header)
    return len(body).to_bytes(_PREFIX_NBYTES, "little") + body


class RecordEncoder:
    """Encodes records for blocks. It keeps its memory, which makes it cost half as much."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def encode(self, width: Width, values: list[Any]) -> bytes:
        """`len(values) / width` records, their values one after another; to be compressed for `frame_block`.

        Raises what msgspec does if something in it cannot be encoded.
        """
        values.insert(0, width)
        try:
            _encoder.encode_into(values, self._buffer)
        finally:
            del values[0]
        return bytes(self._buffer)


def encode_block(
    records: Sequence[LimitsWritten] | Sequence[StateWritten] | Sequence[StepWritten],
) -> bytes:
    """One block of records of one sort, at least one."""
    width: Any = len(records[0])
    values = [value for record in records for value in record]
    return frame_block(zlib.compress(RecordEncoder().encode(width, values)))


def frame_block(data: bytes) -> bytes:
    """The block of compressed records."""
    prefix = len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little")
    return prefix + zlib.crc32(prefix).to_bytes(4, "little") + data


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
        bodies = self._bodies_of_1() if self.header.format_version == 1 else self._bodies()
        for index, body in enumerate(bodies):
            try:
                yield _decode(body)
            except msgspec.MsgspecError as error:
                raise UnreadableTrace(f"record {index} is damaged: {error}", reason="corrupt") from None

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
            if not 1 <= theirs <= ours:
                raise UnreadableTrace(
                    f"trace of {name} {theirs}, this program reads up to {ours}", reason=name, found=theirs
                )
        try:
            return _header_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise UnreadableTrace(f"the header is damaged: {error}", reason="corrupt") from None

    def _bodies_of_1(self) -> Iterator[bytes]:
        while body := self._next_body():
            yield body

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

    def _bodies(self) -> Iterator[bytes]:
        block = 0
        while prefix := self._read(_BLOCK_PREFIX_NBYTES):
            if len(prefix) < _BLOCK_PREFIX_NBYTES or not any(prefix):
                self.torn = True
                return
            nbytes = int.from_bytes(prefix[:4], "little")
            if zlib.crc32(prefix[:8]) != int.from_bytes(prefix[8:], "little") or nbytes > MAX_RECORD_NBYTES:
                raise UnreadableTrace(f"block {block} is damaged: its prefix", reason="corrupt")
            data = self._read(nbytes)
            if len(data) < nbytes:
                self.torn = True
                yield from _records(list(_whole_values(_unpack(data, block))), block, torn=True)
                return
            if zlib.crc32(data) != int.from_bytes(prefix[4:8], "little"):
                raise UnreadableTrace(f"block {block} is damaged: its checksum", reason="corrupt")
            try:
                values = _block_decoder.decode(_unpack(data, block))
            except msgspec.MsgspecError as error:
                raise UnreadableTrace(f"block {block} is damaged: {error}", reason="corrupt") from None
            yield from _records(values, block, torn=False)
            block += 1


def _decode(body: bytes) -> Record:
    match body[0] & ~_ARRAY:
        case 2:
            return _limits_decoder.decode(body)
        case 3:
            return _state_decoder.decode(body)
        case _:
            return _step_decoder.decode(body)


def _unpack(data: bytes, block: int) -> bytes:
    """As much as there is of it: of a block that was cut, up to the cut."""
    try:
        return zlib.decompressobj().decompress(data, MAX_BLOCK_NBYTES)
    except zlib.error as error:
        raise UnreadableTrace(f"block {block} is damaged: {error}", reason="corrupt") from None


def _records(values: Sequence[bytes | msgspec.Raw], block: int, *, torn: bool) -> Iterator[bytes]:
    """Each record of a block as a msgpack array; of a torn one without the last, if that is not whole."""
    if torn and not values:
        return
    many = _WIDTHS.get(bytes(values[0]), 0) if values else 0
    rest = (len(values) - 1) % many if many else 0
    if not many or (rest and not torn):
        raise UnreadableTrace(f"block {block} is damaged: {len(values)} values", reason="corrupt")
    head = bytes([_ARRAY | many])
    for start in range(1, len(values) - rest, many):
        yield head + b"".join(values[start : start + many])


def _whole_values(data: bytes) -> Iterator[bytes]:
    """The values of an array that was cut, but for the one in which it ends."""
    start = _ARRAY_HEADER_NBYTES.get(data[:1], 1)
    while start < len(data) and (end := _end_of_value(data, start)) is not None:
        yield data[start:end]
        start = end


_ARRAY: Final = 0x90
_WIDTHS: Final[dict[bytes, int]] = {bytes([width]): width for width in (LIMITS, STATE, STEP)}
_ARRAY_HEADER_NBYTES: Final = {b"\xdc": 3, b"\xdd": 5}
"""By first byte of a msgpack array; of up to 15 values it is 1."""
_FIXED_NBYTES: Final = dict(zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True))
"""Of numbers."""
_SIZE_NBYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Of bytes and text: how long their length is."""
_COUNT_NBYTES: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Of arrays and maps: how long their count is, and how many values one entry is."""


def _end_of_value(data: bytes, at: int) -> int | None:
    """Where the msgpack value at `at` ends; None if the data end before it does."""
    left = 1
    while left:
        if at >= len(data):
            return None
        first = data[at]
        at, left = at + 1, left - 1
        if 0x80 <= first <= 0x8F:
            left += 2 * (first & 0x0F)
        elif 0x90 <= first <= 0x9F:
            left += first & 0x0F
        elif 0xA0 <= first <= 0xBF:
            at += first & 0x1F
        elif first in _SIZE_NBYTES:
            nbytes = _SIZE_NBYTES[first]
            at += nbytes + int.from_bytes(data[at : at + nbytes], "big")
        elif first in _COUNT_NBYTES:
            nbytes, values = _COUNT_NBYTES[first]
            left += values * int.from_bytes(data[at : at + nbytes], "big")
            at += nbytes
        else:
            at += _FIXED_NBYTES.get(first, 0)
    return at if at <= len(data) else None
