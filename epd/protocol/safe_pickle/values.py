"""What a pickle may hold, how much of it, and the one error for everything else."""

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final, NoReturn

import msgspec

from epd.protocol.errors import EpdError


class PickleRefused(EpdError):
    """A pickle, or a value, that is not taken. `reason` is one of: malformed, opcode, name, value, limit."""

    code = "pickle_refused"


class PickleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one pickle may hold."""

    max_nbytes: int = 512 * 1024 * 1024
    """Of the pickle itself."""
    max_depth: int = 64
    """Containers inside each other."""
    max_objects: int = 100_000
    """Opcodes run; and values met by whoever walks the result: a shared one counts each time."""
    max_tensors: int = 1_024
    max_tensor_nbytes: int = 512 * 1024 * 1024
    """Of all tensors together, by their shapes."""


def refuse(reason: str, message: str) -> NoReturn:
    raise PickleRefused(f"pickle refused: {message}", reason=reason)


_SCALARS: Final = (str, int, float, bytes, type(None))


def is_key(value: object) -> bool:
    """Hashing nested tuples recurses in C without a limit, so keys are scalars or flat tuples of them."""
    return isinstance(value, _SCALARS) or (
        type(value) is tuple and all(isinstance(one, _SCALARS) for one in value)
    )


def children(value: Any) -> Iterable[Any]:
    """The values directly inside a container; of an instance, its attributes."""
    if isinstance(value, dict | OrderedDict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, (*_SCALARS, Enum)) or type(value).__module__.split(".")[0] == "torch":
        return ()
    return getattr(value, "__dict__", {}).values()


def check_tree(root: Any, limits: PickleLimits) -> None:
    """Refuse a value that contains itself, is nested too deeply, or explodes when it is walked.

    Sharing makes a few bytes into a tree of any size, so sizes are summed over it as a walk would see it.
    """
    depth: dict[int, int] = {}
    size: dict[int, int] = {}
    open_: set[int] = set()
    todo: list[tuple[Any, bool]] = [(root, False)]
    while todo:
        value, is_leaving = todo.pop()
        key = id(value)
        if is_leaving:
            open_.discard(key)
            inner = [id(child) for child in children(value)]
            depth[key] = 1 + max((depth[one] for one in inner), default=0)
            size[key] = 1 + sum(size[one] for one in inner)
            if depth[key] > limits.max_depth:
                refuse("limit", f"values nested more than {limits.max_depth} deep")
            if size[key] > limits.max_objects:
                refuse("limit", f"more than {limits.max_objects} values")
        elif key in open_:
            refuse("value", "a value that contains itself")
        elif key not in depth:
            open_.add(key)
            todo.append((value, True))
            todo.extend((child, False) for child in children(value))
