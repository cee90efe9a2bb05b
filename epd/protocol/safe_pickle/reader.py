"""Interprets pickles: a fixed set of opcodes; a name is a handler of ours or a class the caller allows."""

import io
import pickletools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from epd.protocol.safe_pickle.tensors import (
    DTYPES,
    STORAGES,
    Name,
    Storage,
    TensorBudget,
    dtype_of,
    integers,
    load_storage,
    storage_claim,
)
from epd.protocol.safe_pickle.values import PickleLimits, PickleRefused, check_tree, is_key, refuse

if TYPE_CHECKING:
    import torch

_MARK: Final = object()
_OLD_MODULES: Final = {"__builtin__": "builtins"}
"""Names of Python 2, which the protocols 0 to 2 use."""


def safe_pickle_loads(
    data: bytes | bytearray | memoryview,
    *,
    allowed: Mapping[str, type] | None = None,
    limits: PickleLimits | None = None,
) -> Any:
    """The value of a pickle of any protocol, made of None, bool, int, float, str, bytes, list, tuple, dict,
    set, frozenset, `OrderedDict`, torch tensors (on the CPU), dtypes, devices and sizes.

    `allowed`: full names (`package.module.Class`) to classes whose instances may be in it besides. An
    instance gets its attributes without its `__init__` or `__setstate__` being called; a member of an
    `Enum` is looked up by its value.

    Raises `PickleRefused`, whatever `data` is.
    """
    limits = limits or PickleLimits()
    nbytes = memoryview(data).nbytes
    if nbytes > limits.max_nbytes:
        refuse("limit", f"{nbytes} B, at most {limits.max_nbytes} are taken")
    stream = io.BytesIO(data)
    try:
        value = _Reader(stream, dict(allowed or {}), limits).read()
    except PickleRefused:
        raise
    except Exception as error:  # whatever an odd pickle makes of the reader, it is a refusal
        message = f"pickle refused: {type(error).__name__}: {str(error)[:200]}"
        raise PickleRefused(message, reason="malformed") from None
    if stream.tell() != nbytes:
        refuse("malformed", f"{nbytes - stream.tell()} B behind its end")
    check_tree(value, limits)
    return value


class _Reader:
    """Reads one pickle of a stream. `inside_storage`: storages may have names there, and nothing else."""

    def __init__(
        self,
        stream: io.BytesIO,
        allowed: dict[str, type],
        limits: PickleLimits,
        *,
        inside_storage: bool = False,
    ) -> None:
        self._stream = stream
        self._allowed = allowed
        self._limits = limits
        self._inside_storage = inside_storage
        self._names = STORAGES.keys() if inside_storage else _CALLS.keys() | DTYPES | allowed.keys()
        self._tensors = TensorBudget(limits)
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        with warnings.catch_warnings():  # odd escapes in the oldest string opcode
            warnings.simplefilter("ignore")
            for count, (opcode, argument, _) in enumerate(pickletools.genops(self._stream)):
                if count >= self._limits.max_objects:
                    refuse("limit", f"more than {self._limits.max_objects} opcodes")
                if opcode.name in _PUSHES:
                    self._stack.append(argument)
                elif opcode.name in _OPCODES:
                    _OPCODES[opcode.name](self, argument)
                elif opcode.name != "STOP":
                    refuse("opcode", f"opcode {opcode.name}")
        if len(self._stack) != 1:
            refuse("malformed", f"{len(self._stack)} values at its end, one is expected")
        return self._plain(self._stack.pop())

    # -- the stack ---------------------------------------------------------------------------

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        return refuse("malformed", "no mark")

    def _get(self, index: int) -> None:
        if index not in self._memo:
            refuse("malformed", f"nothing is remembered under {index}")
        self._push(self._memo[index])

    def _put(self, index: int) -> None:
        if self._stack[-1] is _MARK:
            refuse("malformed", "a mark is remembered")
        self._memo[index] = self._stack[-1]

    # -- containers --------------------------------------------------------------------------

    def _plain(self, value: Any) -> Any:
        """What may be part of the result: no mark, no storage, no name but a dtype's. A tuple was perhaps
        meant to be arguments, so it is looked into."""
        if type(value) is tuple and any(isinstance(one, Name | Storage | tuple) for one in value):
            return tuple(map(self._plain, value))
        if isinstance(value, Name):
            return dtype_of(value)
        if value is _MARK or isinstance(value, Storage):
            refuse("malformed", "a value is missing")
        return value

    def _tuple(self, values: list[Any]) -> None:
        if any(value is _MARK for value in values):
            refuse("malformed", "a mark inside a tuple")
        self._push(tuple(values))

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            refuse("value", "items for what is no list")
        target.extend(map(self._plain, values))

    def _set_items(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict) or len(values) % 2:
            refuse("value", "items for what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not is_key(key):
                refuse("value", f"a key of type {type(key).__name__}")
            target[key] = self._plain(value)

    def _dict(self, values: list[Any]) -> None:
        self._push({})
        self._set_items(values)

    def _add_items(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not set:
            refuse("value", "items for what is no set")
        target.update(_members(values))

    # -- names and what they stand for -------------------------------------------------------

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or "." in name:
            refuse("name", f"{str(module)[:100]!r}, {str(name)[:100]!r}: no module and plain name")
        full = f"{_OLD_MODULES.get(module, module)}.{name}"
        if full not in self._names:
            refuse("name", f"{full[:200]} is not allowed")
        self._push(Name(full))

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._name(module, name)

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._name(module, name)

    def _reduce(self) -> None:
        arguments, name = self._pop(), self._pop()
        if not isinstance(name, Name) or type(arguments) is not tuple:
            refuse("value", "a call of what is no name")
        call, kind = _CALLS.get(name.full), self._allowed.get(name.full)
        if call is not None:
            self._push(call(self, arguments))
        elif kind is not None and issubclass(kind, Enum) and len(arguments) == 1 and is_key(arguments[0]):
            self._push(kind(arguments[0]))
        else:
            refuse("name", f"{name.full} is not called")

    def _new_object(self) -> None:
        arguments, name = self._pop(), self._pop()
        kind = self._allowed.get(name.full) if isinstance(name, Name) else None
        if kind is None or arguments != () or issubclass(kind, Enum):
            refuse("name", "an instance of no allowed class, or one that takes arguments")
        self._push(object.__new__(kind))

    def _build(self) -> None:
        state, instance = self._plain(self._pop()), self._stack[-1]
        if type(instance) not in self._allowed.values() or isinstance(instance, Enum):
            refuse("value", "attributes for no instance of an allowed class")
        if type(state) is not dict or not all(map(_is_attribute, state)):
            refuse("value", "attributes that are no dict of names")
        for key, value in state.items():
            object.__setattr__(instance, key, value)

    def _persistent_id(self) -> None:
        if not self._inside_storage:
            refuse("opcode", "a persistent id")
        self._push(storage_claim(self._pop()))

    # -- calls -------------------------------------------------------------------------------

    def storage(self, arguments: tuple[Any, ...]) -> Storage:
        (blob,) = arguments
        return load_storage(
            blob, lambda stream: _Reader(stream, {}, self._limits, inside_storage=True).read()
        )

    def tensor(self, arguments: tuple[Any, ...]) -> "torch.Tensor":
        return self._tensors.rebuild(arguments, has_dtype=False)

    def tensor_with_dtype(self, arguments: tuple[Any, ...]) -> "torch.Tensor":
        return self._tensors.rebuild(arguments, has_dtype=True)


def _is_attribute(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("__")


def _members(values: Any) -> list[Any]:
    if not isinstance(values, list | tuple) or not all(map(is_key, values)):
        refuse("value", "members of a set that are no scalars")
    return list(values)


def _parameter(_: _Reader, arguments: tuple[Any, ...]) -> "torch.Tensor":
    """Of a parameter its tensor: what is read here is not trained."""
    import torch

    if len(arguments) != 3 or not isinstance(arguments[0], torch.Tensor):
        refuse("value", "a parameter without a tensor")
    return arguments[0]


def _size(_: _Reader, arguments: tuple[Any, ...]) -> "torch.Size":
    import torch

    (lengths,) = arguments
    return torch.Size(integers(lengths, "a torch.Size"))


def _device(_: _Reader, arguments: tuple[Any, ...]) -> "torch.device":
    import torch

    match arguments:
        case (("cpu" | "cuda") as kind,):
            return torch.device(kind)
        case (("cpu" | "cuda") as kind, int(index)) if 0 <= index < 128:
            return torch.device(kind, index)
    return refuse("value", "a torch.device that is neither cpu nor cuda")


def _ordered_dict(_: _Reader, arguments: tuple[Any, ...]) -> OrderedDict[Any, Any]:
    return refuse("value", "an OrderedDict with arguments") if arguments else OrderedDict()


def _set(_: _Reader, arguments: tuple[Any, ...]) -> set[Any]:
    (values,) = arguments
    return set(_members(values))


def _frozen_set(_: _Reader, arguments: tuple[Any, ...]) -> frozenset[Any]:
    (values,) = arguments
    return frozenset(_members(values))


def _encoded(_: _Reader, arguments: tuple[Any, ...]) -> bytes:
    """Bytes of the protocols 0 to 2: text, one byte a character."""
    match arguments:
        case (str(text), "latin1"):
            return text.encode("latin1")
    return refuse("value", "text in another encoding than latin1")


def _no_bytes(_: _Reader, arguments: tuple[Any, ...]) -> bytes:
    """The empty bytes of the protocols 0 to 2. A size would be memory for the asking."""
    return refuse("value", "bytes with arguments") if arguments else b""


_CALLS: Final[Mapping[str, Callable[[_Reader, tuple[Any, ...]], Any]]] = {
    "torch._utils._rebuild_tensor_v2": _Reader.tensor,
    "torch._utils._rebuild_tensor_v3": _Reader.tensor_with_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.storage._load_from_bytes": _Reader.storage,
    "torch.Size": _size,
    "torch.device": _device,
    "collections.OrderedDict": _ordered_dict,
    "builtins.set": _set,
    "builtins.frozenset": _frozen_set,
    "builtins.bytes": _no_bytes,
    "_codecs.encode": _encoded,
}
"""Names that may be called, each with what is done instead of calling it."""

_PUSHES: Final = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("FLOAT", "BINFLOAT"),
    )
)
"""Opcodes that push their argument."""

_OPCODES: Final[Mapping[str, Callable[[_Reader, Any], object]]] = {
    "PROTO": lambda r, _: None,
    "FRAME": lambda r, _: None,
    "MARK": lambda r, _: r._push(_MARK),
    "POP": lambda r, _: r._pop(),
    "POP_MARK": lambda r, _: r._pop_to_mark(),
    "DUP": lambda r, _: r._push(r._stack[-1]),
    "NONE": lambda r, _: r._push(None),
    "NEWTRUE": lambda r, _: r._push(True),
    "NEWFALSE": lambda r, _: r._push(False),
    "EMPTY_LIST": lambda r, _: r._push([]),
    "EMPTY_TUPLE": lambda r, _: r._push(()),
    "EMPTY_DICT": lambda r, _: r._push({}),
    "EMPTY_SET": lambda r, _: r._push(set()),
    "TUPLE": lambda r, _: r._tuple(r._pop_to_mark()),
    "TUPLE1": lambda r, _: r._tuple([r._pop()]),
    "TUPLE2": lambda r, _: r._tuple([r._pop(), r._pop()][::-1]),
    "TUPLE3": lambda r, _: r._tuple([r._pop(), r._pop(), r._pop()][::-1]),
    "LIST": lambda r, _: r._push([r._plain(value) for value in r._pop_to_mark()]),
    "APPEND": lambda r, _: r._extend([r._pop()]),
    "APPENDS": lambda r, _: r._extend(r._pop_to_mark()),
    "DICT": lambda r, _: r._dict(r._pop_to_mark()),
    "SETITEM": lambda r, _: r._set_items([r._pop(), r._pop()][::-1]),
    "SETITEMS": lambda r, _: r._set_items(r._pop_to_mark()),
    "ADDITEMS": lambda r, _: r._add_items(r._pop_to_mark()),
    "FROZENSET": lambda r, _: r._push(frozenset(_members(r._pop_to_mark()))),
    "GLOBAL": lambda r, argument: r._global(argument),
    "STACK_GLOBAL": lambda r, _: r._stack_global(),
    "REDUCE": lambda r, _: r._reduce(),
    "NEWOBJ": lambda r, _: r._new_object(),
    "BUILD": lambda r, _: r._build(),
    "BINPERSID": lambda r, _: r._persistent_id(),
    "GET": lambda r, index: r._get(index),
    "BINGET": lambda r, index: r._get(index),
    "LONG_BINGET": lambda r, index: r._get(index),
    "PUT": lambda r, index: r._put(index),
    "BINPUT": lambda r, index: r._put(index),
    "LONG_BINPUT": lambda r, index: r._put(index),
    "MEMOIZE": lambda r, _: r._put(len(r._memo)),
}
"""Opcodes that are taken besides those; all others are refused (STOP ends the pickle)."""
