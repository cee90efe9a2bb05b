"""Where settings come from: a TOML file, below `EPD_*` variables, below flags.

One key has one name in three spellings: `timeouts.room_s` in a file and after `--set`, and
`EPD_TIMEOUTS__ROOM_S` as a variable (a dot is two underscores). In variables and flags a text stands
as it is, a list is separated by commas, and everything else is written as in TOML.
"""

import os
import re
import select
import stat
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from msgspec import inspect

from epd.config.rules import check
from epd.config.schema import KEYS, TABLES, Config, build, convert, nearest
from epd.protocol.errors import ConfigError

PREFIX: Final = "EPD_"
FILE_VARIABLE: Final = "EPD_CONFIG"
"""Names the file, as `--config` does."""
_INJECTED: Final = re.compile(
    r"EPD(_[A-Z0-9_]+?)??_(?:(?P<host>SERVICE_HOST)|(?P<number>SERVICE_PORT(_[A-Z0-9_]+)?)"
    r"|(?P<url>PORT(_\d+_(TCP|UDP|SCTP))?)|(?P<part>PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)))"
)
_MAX_FILE_NBYTES: Final = 1024 * 1024
_READ_S: Final = 5.0
_INJECTED_URL: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d+")


class Given(NamedTuple):
    """A value as it was given, and where: `FILE:LINE`, `variable NAME`, `flag --NAME`."""

    value: Any
    origin: str


class Settings(NamedTuple):
    config: Config
    origins: Mapping[str, str]
    """Where each key's value came from; `default` for those that nobody set."""

    def value(self, key: str) -> Any:
        value: Any = self.config
        for name in key.split("."):
            value = getattr(value, name)
        return value


def load_config(toml_path: str | os.PathLike[str] | None, overrides: Mapping[str, Any]) -> Config:
    """Settings of a file, if any, with `overrides` (dotted keys to values; None: not given) on top.

    Reads no variables. Raises `ConfigError` for the first key that is wrong: `key`, `given` and
    `allowed` are its facts.
    """
    given = _file(toml_path) if toml_path is not None else {}
    given |= {key: Given(value, "override") for key, value in overrides.items() if value is not None}
    return _settings(given).config


def load_settings(
    toml_path: str | None, environ: Mapping[str, str], flags: Iterable[tuple[str, str, str]]
) -> Settings:
    """Settings of all sources. A flag is (its name for people, key, text); the last one of a key counts.

    Without `toml_path` the variable `EPD_CONFIG` may name a file. Raises `ConfigError`.
    """
    path = toml_path if toml_path is not None else environ.get(FILE_VARIABLE)
    given = _file(path) if path is not None else {}
    given |= _variables(environ)
    given |= {key: Given(_parse(key, text), f"flag {name}") for name, key, text in flags}
    return _settings(given)


def variable_of(key: str) -> str:
    return PREFIX + key.replace(".", "__").upper()


def is_injected(name: str, value: str) -> bool:
    """Whether Kubernetes injects such a variable, for a Service whose name begins with `epd`.

    The value decides too: `EPD_METRIC_PORT=9400` is a misspelt setting, not a Service's address.
    """
    match = _INJECTED.fullmatch(name)
    if match is None:
        return False
    if match["url"]:
        return _INJECTED_URL.fullmatch(value) is not None
    if match["number"]:
        return value.isdecimal() or match["number"] == "SERVICE_PORT_NAME"
    return True


def _settings(given: Mapping[str, Given]) -> Settings:
    config = build({key: convert(key, one.value) for key, one in given.items()})
    check(config)
    return Settings(config, {key: given[key].origin if key in given else "default" for key in KEYS})


# -- files -----------------------------------------------------------------------------------


def _file(path: str | os.PathLike[str]) -> dict[str, Given]:
    name = os.fspath(path)
    try:
        text = _read(name).decode()
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}", key="config") from None
    except (ValueError, RecursionError) as error:  # of the syntax, the encoding, or the parser's own limits
        raise ConfigError(f"{name}: not TOML: {error}", key="config") from None
    values: dict[str, Any] = {}
    _flatten(table, "", values)
    lines = _lines(text)
    return {
        key: Given(value, f"{name}:{lines[key]}" if key in lines else name) for key, value in values.items()
    }


def _read(name: str) -> bytes:
    """At most `_MAX_FILE_NBYTES`. A pipe that nobody writes to is given up: a node must not hang at start."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        is_pipe, read = stat.S_ISFIFO(os.fstat(descriptor).st_mode), bytearray()
        while len(read) <= _MAX_FILE_NBYTES:
            part = file.read(65_536)
            if part:
                read += part
            elif part is not None and (read or not is_pipe):
                return bytes(read)
            elif not select.select([file], [], [], _READ_S)[0]:  # no writer yet, or none that says anything
                raise OSError(f"nothing came within {_READ_S:g} s")
            elif part is not None:
                is_pipe = False  # a writer came, or went without a word: the next end is the end
    raise OSError(f"more than {_MAX_FILE_NBYTES} B")


def _flatten(table: Mapping[str, Any], prefix: str, into: dict[str, Any]) -> None:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key in TABLES:
            _flatten(value, f"{key}.", into)
        else:
            into[key] = value


def _lines(text: str) -> dict[str, int]:
    """Line numbers of the keys that are written plainly; the parser keeps none."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*(\w+)\s*\]", line):
            table = header[1] + "."
        elif entry := re.match(r"\s*(\w+(?:\.\w+)?)\s*=", line):
            lines.setdefault(table + entry[1], number)
    return lines


# -- variables and flags ---------------------------------------------------------------------


def _variables(environ: Mapping[str, str]) -> dict[str, Given]:
    keys = {variable_of(key): key for key in KEYS}
    given = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name == FILE_VARIABLE or is_injected(name, text):
            continue
        key = keys.get(name)
        if key is None:
            raise _unknown_variable(name)
        given[key] = Given(_parse(key, text), f"variable {name}")
    return given


def _unknown_variable(name: str) -> ConfigError:
    near = nearest(name.removeprefix(PREFIX).replace("__", ".").lower())
    hint = f"did you mean {variable_of(near)}?" if near in KEYS else "see epd config --show for all keys"
    return ConfigError(f"{name}: unknown variable; {hint}", key=name)


def _parse(key: str, text: str) -> Any:
    """What a variable or flag says, before it is converted; text that is no value is refused there."""
    if key not in KEYS:
        return text
    info = inspect.type_info(KEYS[key].type)
    kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
    if any(isinstance(kind, inspect.VarTupleType) for kind in kinds):
        return [part.strip() for part in text.split(",") if part.strip()]
    if any(isinstance(kind, inspect.StrType | inspect.LiteralType) for kind in kinds):
        return text
    if "\n" in text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
