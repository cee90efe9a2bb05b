"""Every setting: its key, unit, bound and default; and the queue sizes that follow from them.

A new setting is one field here, with its docstring: file, variable, flag, `epd config` and the example
file follow. What is wrong is one line: the key, what was given, what is allowed.
"""

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, inspect

from epd.encoders.media import MAX_PIXELS, MAX_PIXELS_EVER, PictureRules
from epd.protocol.errors import ConfigError
from epd.protocol.rates import RateLimits
from epd.protocol.wire import MAX_ITEMS_PER_PART
from epd.runtime.addresses import is_loopback, parse_address
from epd.runtime.processors import usable_processors

MIB: Final = 1024 * 1024

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=65_536)]


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the tables of the file."""


class MemoryConfig(_Table, frozen=True, kw_only=True):
    """One pool: all of it is allocated before the node is ready, nothing afterwards."""

    regions: Annotated[int, Meta(ge=1, le=1024)] = 4
    region_nbytes: Annotated[int, Meta(ge=4096, le=2**40, multiple_of=4096)] = 64 * MIB
    """Bytes of each region: the largest item there can be."""


class Timeouts(_Table, frozen=True, kw_only=True):
    """All relative; a request's own deadline caps them all."""

    connect_s: Seconds = 5.0
    """From dialling to `Welcome`."""
    metadata_s: Seconds = 5.0
    """From `EncodeRequest` to the sizes."""
    room_s: Seconds = 30.0
    """Waiting for room in the receive pool."""
    consume_warning_s: Seconds = 60.0
    """A delivery that is not released for so long is reported, never taken away."""
    read_base_s: Seconds = 5.0
    """A read of n bytes is aborted after `read_base_s + n / read_min_bandwidth_bytes_per_s`."""
    read_min_bandwidth_bytes_per_s: Annotated[float, Meta(ge=1_000, le=10**13)] = 50e6
    media_s: Seconds = 30.0
    """Media of an item without progress."""
    forward_s: Seconds = 120.0
    """One forward, from its start."""
    dedup_retention_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    """How long a finished result that nobody waits for is kept."""
    heartbeat_s: Seconds = 1.0
    suspect_after_s: Seconds = 2.0
    """Without any frame for so long a peer gets no new work."""
    dead_after_s: Seconds = 10.0
    """Without any frame for so long a session ends."""


class WorkerConfig(_Table, frozen=True, kw_only=True):
    """The forward worker of an encoder."""

    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Of one forward; None: see `Config.worker_threads`."""
    batch_items: Annotated[int, Meta(ge=1, le=MAX_ITEMS_PER_PART)] = 1
    """Items of one forward, at most. Rows differ bitwise between batch sizes."""


class PicturesConfig(_Table, frozen=True, kw_only=True):
    """How an encoder reads pictures."""

    max_pixels: Annotated[int, Meta(ge=1, le=MAX_PIXELS_EVER)] = MAX_PIXELS
    """Of one picture, checked on its header."""
    background: str = "#ffffff"
    """Under what is transparent, as #RRGGBB; equal on all encoders."""

    def rules(self) -> PictureRules:
        red, green, blue = bytes.fromhex(self.background[1:])
        return PictureRules(max_pixels=self.max_pixels, background=(red, green, blue))


class SecurityConfig(_Table, frozen=True, kw_only=True):
    """CURVE on both lanes: everything is encrypted, and only peers with a known key come in."""

    secret_key: str | None = None
    """This node's secret key: a file of `epd keygen` that only its owner can read. None: no CURVE."""
    peers: str | None = None
    """A TOML file that says which key may be which peer (see `epd.runtime.keys`)."""
    trusted_network: bool = False
    """Whoever reaches this host may read what its Mooncake engine exports, and write a pool that is pushed
    into, keys or not."""


class Limits(_Table, frozen=True, kw_only=True):
    media_nbytes: Annotated[int, Meta(ge=1, le=2**40)] = 256 * MIB
    """Media bytes a node holds at once, received or asked for."""
    max_item_media_nbytes: Annotated[int, Meta(ge=1, le=2**32)] = 64 * MIB
    """Media bytes of one item."""
    max_peers: Annotated[int, Meta(ge=1, le=8_192)] = 64
    """Sessions at once, clients included."""
    max_attempts: Annotated[int, Meta(ge=1, le=1_000)] = 8
    """Of one part of a request, within the request's deadline."""
    max_open_requests: Count = 4_096
    """Further ones are refused with `busy`."""
    peer_frames_per_s: Annotated[float, Meta(ge=100, le=10**7)] = 20_000
    """Of one peer, and its largest burst; a session that brings more is ended with `too_fast`."""
    peer_records_per_s: Annotated[float, Meta(ge=10_000, le=10**8)] = 50_000
    """Messages in those frames."""
    peer_media_bytes_per_s: Annotated[float, Meta(ge=4 * MIB, le=10**12)] = 2e9

    def rates(self) -> RateLimits:
        return RateLimits(self.peer_frames_per_s, self.peer_records_per_s, self.peer_media_bytes_per_s)


class Config(_Table, frozen=True, kw_only=True):
    """What a node is started with. `load_config` makes one; rules between keys hold only there."""

    role: Literal["encoder", "prefill"]
    node: str | None = None
    """For people, in logs and traces; None: `ROLE-HOST-PORT`."""
    listen: str = "tcp://127.0.0.1:0"
    """The control lane, `tcp://HOST:PORT`; port 0: the system chooses. Without keys loopback only."""
    media_listen: str = "tcp://127.0.0.1:0"
    """The media lane; peers are told. Without keys loopback only."""
    insecure: bool = False
    """Listen on other addresses than loopback without keys: whoever reaches them is served."""
    encoders: tuple[str, ...] = ()
    """Whom a prefill node dials."""
    data_plane: Literal["auto", "mooncake", "shm"] = "auto"
    """`auto`: Mooncake where it imports and initialises, else shm."""
    direction: Literal["pull", "push"] = "pull"
    """Who moves the bytes, equal on both sides. `pull`: the prefill node reads, and no peer can write its
    memory. `push`: the encoder writes, over Mooncake's TCP only, and windows are revoked where it fails."""
    model: Annotated[str, Meta(min_length=1)] = "builtin:qwen2-vl"
    device: str = "auto"
    """Where forwards run and pools lie: `cpu`, `cuda:N`, or `auto`: the first GPU where there is one and
    Mooncake can read between GPUs, else the CPU."""
    trace: str | None = None
    """A file for one record per step of every machine; one that is there is replaced."""
    trace_file_nbytes: Annotated[int, Meta(ge=65_536, le=2**40)] = 64 * MIB
    """A trace file of so many bytes (compressed) becomes `FILE.1`, and the next one begins."""
    trace_files: Annotated[int, Meta(ge=1, le=1_000)] = 4
    """How many files of one trace are kept; the oldest goes."""
    metrics_port: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    """For `/metrics`, `/healthz` and `/readyz`; 0: a free port. None: no port, and nothing is counted."""
    metrics_listen: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """The address or host name for `metrics_port`. It answers GET to whoever reaches it."""
    spans: bool = False
    """OpenTelemetry spans of requests and forwards; needs the extra `otel`."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """`auto`: console on a terminal, JSON elsewhere. Logs go to stderr."""
    verify: Literal["off", "seal", "checksum"] = "seal"
    """What proves that a read is whole: the source's seal; or the seal and a digest (xxh3-128) that the
    encoder's worker computes (`checksum` of an encoder) and a prefill node compares wherever it comes.
    `off` of a prefill node: nothing proves it; to measure what proving costs, never in production."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 25.0
    """After SIGTERM running transfers have so long to finish."""
    pool: MemoryConfig = MemoryConfig()
    """What a prefill node receives into."""
    staging: MemoryConfig = MemoryConfig()
    """Where an encoder node keeps results until they are read."""
    timeouts: Timeouts = Timeouts()
    worker: WorkerConfig = WorkerConfig()
    pictures: PicturesConfig = PicturesConfig()
    limits: Limits = Limits()
    security: SecurityConfig = SecurityConfig()

    def plane_host(self) -> str:
        """The address by which the data planes of peers reach this node's."""
        host = parse_address(self.listen, to_bind=True).host
        return "127.0.0.1" if is_loopback(host) else host

    def worker_threads(self) -> int:
        """Threads of one forward: as configured, else `OMP_NUM_THREADS`, else half of the processors
        that affinity and cgroup allow. The other half is for the node itself and for the other nodes of
        this host. A node has one worker, so nothing is divided further."""
        asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        if self.worker.threads is None and asked.isdecimal() and int(asked) > 0:
            return min(int(asked), 1024)
        return self.worker.threads or max(1, usable_processors() // 2)

    def mailbox_bound(self) -> int:
        """Messages that one mailbox may hold. None of what is summed here waits for anything else, so
        a mailbox that is full means that its actor has stopped."""
        per_request = (
            2  # submitted; cancelled
            + 2  # taken; released
            + 3  # room wanted; given or refused; wanted no more
        )
        per_part = (
            2  # one attempt is open at a time: requested; its sizes or its failure
            + 1  # granted
            + 1  # cancelled, at the same time
        )
        per_item = (
            1  # ready to be read (encoder: read)
            + 2  # read posted; read ended
            + 1  # read to be aborted
        )
        # A request is counted as one part that is full; an encoder's open parts are counted the same way.
        per_full_request = per_request + per_part + MAX_ITEMS_PER_PART * per_item
        per_session = 3  # opened; draining; ended
        return self.limits.max_open_requests * per_full_request + self.limits.max_peers * per_session


# -- keys and values -------------------------------------------------------------------------


class Key(msgspec.Struct, frozen=True):
    type: Any
    allowed: str


def _keys_of(table: type[_Table], prefix: str) -> dict[str, Key]:
    keys = {}
    for field in msgspec.structs.fields(table):
        name = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, _Table):
            keys.update(_keys_of(field.type, f"{name}."))
        else:
            keys[name] = Key(field.type, _describe(inspect.type_info(field.type)))
    return keys


def _describe(info: inspect.Type) -> str:
    """A type's values in words."""
    match info:
        case inspect.LiteralType(values):
            return " or ".join(map(repr, values))
        case inspect.UnionType(types):
            return " or ".join(_describe(one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.IntType() | inspect.FloatType():
            low = f"from {info.ge:_}" if info.ge is not None else f"above {info.gt:_}"
            multiple = f", a multiple of {info.multiple_of:_}" if info.multiple_of else ""
            kind = "an integer" if isinstance(info, inspect.IntType) else "a number"
            return f"{kind} {low} to {info.le:_}{multiple}"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text that is not empty" if info.min_length else "text"
        case inspect.VarTupleType(item):
            return f"a list of {_describe(item)}"
        case _:
            raise AssertionError(f"no words for {info}")


KEYS: Final = _keys_of(Config, "")
TABLES: Final = {key.partition(".")[0] for key in KEYS if "." in key}


def convert(key: str, value: Any) -> Any:
    """The value of `key` in its own type. Raises `ConfigError`: unknown key, or not what is allowed."""
    if key in TABLES:
        raise wrong(key, repr(value), f"a table [{key}]")
    if key not in KEYS:
        raise _unknown(key)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        return msgspec.convert(value, KEYS[key].type)
    except msgspec.ValidationError:
        raise wrong(key, _shown(value), KEYS[key].allowed) from None


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # hexadecimal, with more digits than Python writes in decimal
        return "a number of thousands of digits"


def build(given: Mapping[str, Any]) -> Config:
    """A whole configuration of converted values. Raises `ConfigError` without a role."""
    if "role" not in given:
        raise wrong("role", "nothing", f"{KEYS['role'].allowed} (by --role, EPD_ROLE or a settings file)")
    top: dict[str, Any] = {name: {} for name in TABLES}
    for key, value in given.items():
        table, dot, name = key.partition(".")
        if dot:
            top[table][name] = value
        else:
            top[table] = value
    return msgspec.convert(top, Config)


def wrong(key: str, given: str, allowed: str) -> ConfigError:
    """The one line that teaches."""
    return ConfigError(f"{key}: {given} given, allowed is {allowed}", key=key, given=given, allowed=allowed)


def _unknown(key: str) -> ConfigError:
    near = nearest(key)
    hint = f"; did you mean {near}?" if near else f"; keys are: {', '.join(KEYS)}"
    return ConfigError(f"{key}: unknown key{hint}", key=key)


def nearest(key: str) -> str | None:
    """The nearest key or table that exists: by its whole name, or by its name in another table."""
    whole = difflib.get_close_matches(key, [*KEYS, *TABLES], 1, 0.75)
    if whole:
        return whole[0]
    by_last_name = {name.rpartition(".")[2]: name for name in KEYS}
    last = difflib.get_close_matches(key.rpartition(".")[2], by_last_name, 1, 0.75)
    return by_last_name[last[0]] if last else None
