"""A Hugging Face checkpoint directory: its configurations, and where the weights of its tower stand.

Read without torch and without loading anything: safetensors files begin with a table of their tensors
(https://github.com/huggingface/safetensors, format). Weights in pickled files are refused. Nothing in the
directory is ever run.
"""

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from epd.protocol.errors import ConfigError

_MAX_JSON_NBYTES: Final = 64 * 1024 * 1024
_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"


class _Place(NamedTuple):
    """A tensor in a file."""

    path: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """Raises `ConfigError` with one reason, for whatever is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise _refused(f"{path}: not a directory with a checkpoint")
        self.config = _read_json(path / "config.json")
        self._tables: dict[Path, dict[str, _Place]] = {}

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def vision(self) -> Mapping[str, Any]:
        """The vision tower's configuration; of a checkpoint that is only a tower, the whole."""
        vision = self.config.get("vision_config", self.config)
        if not isinstance(vision, Mapping):
            raise _refused(f"{self.path / 'config.json'}: vision_config is no table")
        return vision

    def processor(self) -> Mapping[str, Any]:
        """The image processor's configuration."""
        single, several = self.path / "preprocessor_config.json", self.path / "processor_config.json"
        if single.exists():
            return _read_json(single)
        found = _read_json(several).get("image_processor") if several.exists() else None
        if not isinstance(found, Mapping):
            raise _refused(f"{self.path}: neither {single.name} nor an image_processor in {several.name}")
        return found

    # -- weights -----------------------------------------------------------------------------

    def digest(self, prefixes: Sequence[str]) -> str:
        """Of the tower's weights: names, types, shapes and bytes. Reads them once."""
        digest = xxhash.xxh3_128()
        tower = self._tower(prefixes)
        for path in sorted({place.path for place in tower.values()}):
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for name in sorted(name for name, place in tower.items() if place.path == path):
                    place = tower[name]
                    digest.update(f"{name} {place.dtype} {place.shape} ".encode())
                    with memoryview(data) as view, view[place.begin : place.end] as part:
                        digest.update(part)
        return digest.hexdigest()

    def load_into(self, model: Any, prefixes: Sequence[str]) -> None:
        """Copy the tower's weights, and no others, into a torch module."""
        from safetensors import SafetensorError, safe_open

        expected, tower = model.state_dict(), self._tower(prefixes)
        missing = [name for name in expected if name not in tower]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise _refused(f"{self.path}: weights of the tower missing: {shown}")
        by_file: dict[Path, list[str]] = {}
        for name, parameter in expected.items():
            place = tower[name]
            if tuple(parameter.shape) != place.shape:
                shapes = f"{list(place.shape)}, the configuration says {list(parameter.shape)}"
                raise _refused(f"{place.path.name}: {place.key} is of shape {shapes}")
            by_file.setdefault(place.path, []).append(name)
        for path, names in by_file.items():
            try:
                with safe_open(str(path), framework="pt") as file:
                    for name in names:
                        expected[name].copy_(file.get_tensor(tower[name].key))
            except (SafetensorError, OSError) as error:
                raise _refused(f"{path}: {error}") from None

    def _tower(self, prefixes: Sequence[str]) -> dict[str, _Place]:
        """The tower's tensors by their names in it, under the first prefix that has any. Of a file that
        holds none of them not even the table is read."""
        index = self.path / _INDEX
        listed: Mapping[str, Any] | None = None
        if index.exists():
            listed = _read_json(index).get("weight_map")
            if not isinstance(listed, Mapping):
                raise _refused(f"{index}: no weight_map")
        for prefix in prefixes:
            names = (
                {_SINGLE}
                if listed is None
                else {str(listed[key]) for key in listed if key.startswith(prefix)}
            )
            places = {
                key.removeprefix(prefix): place
                for name in sorted(names)
                for key, place in self._table(self._shard(name)).items()
                if key.startswith(prefix)
            }
            if places:
                return places
        raise _refused(f"{self.path}: no weights of a vision tower ({' or '.join(prefixes)}...)")

    def _shard(self, name: str) -> Path:
        path = self.path / name
        if Path(name).name != name:
            raise _refused(f"{self.path / _INDEX}: {name!r} is no plain file name")
        if path.is_file():
            return path
        pickled = sorted(one.name for one in self.path.glob("*.bin")) + sorted(
            one.name for one in self.path.glob("*.pt*")
        )
        if pickled:
            fix = "save the model again with transformers' save_pretrained"
            raise _refused(
                f"{self.path}: weights only as pickles ({pickled[0]}), safetensors are taken: {fix}"
            )
        raise _refused(f"{path}: missing")

    def _table(self, path: Path) -> dict[str, _Place]:
        if path not in self._tables:
            try:
                self._tables[path] = dict(_read_table(path))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
                raise _refused(f"{path}: not a whole safetensors file: {error}") from None
        return self._tables[path]


def _read_table(path: Path) -> Iterator[tuple[str, _Place]]:
    nbytes = path.stat().st_size
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(_MAX_JSON_NBYTES, nbytes - 8):
            raise ValueError(f"a table of {size} B in a file of {nbytes} B")
        table = json.loads(file.read(size))
    for key, entry in table.items():
        if key == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= nbytes - 8 - size:
            raise ValueError(f"{key} lies outside of it")
        start = 8 + size
        yield key, _Place(path, key, str(entry["dtype"]), tuple(entry["shape"]), start + begin, start + end)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_NBYTES:
            raise _refused(f"{path}: too large for a configuration")
        read = json.loads(path.read_bytes())
    except OSError as error:
        raise _refused(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise _refused(f"{path}: not JSON: {error}") from None
    if not isinstance(read, dict):
        raise _refused(f"{path}: no table")
    return read


def _refused(why: str) -> ConfigError:
    return ConfigError(f"model: {why}", key="model")
