"""Small values of a model's processor, in types that another engine's allow-list takes."""

from typing import Any, Final

from epd.protocol.safe_pickle.values import refuse

_MAX_DEPTH: Final = 32


def normalize_aux_value(value: Any) -> Any:
    """`value` with numpy arrays as torch tensors (of the same dtype, copied), numpy scalars as Python's,
    and dicts, lists and tuples rebuilt of such values; torch tensors, None, bool, int, float, str and
    bytes stay as they are.

    Raises `PickleRefused` for anything else, and for containers nested more than 32 deep.
    """
    return _normalize(value, 0)


def _normalize(value: Any, depth: int) -> Any:
    import numpy as np
    import torch

    if depth > _MAX_DEPTH:
        refuse("limit", f"a value nested more than {_MAX_DEPTH} deep")
    if isinstance(value, np.ndarray):
        return _tensor(value)
    if isinstance(value, np.generic):
        scalar = value.item()
        if type(scalar) not in (bool, int, float, str, bytes):
            refuse("value", f"a numpy scalar of type {value.dtype}")
        return scalar
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, dict):
        keys = [_key(key) for key in value]
        return dict(zip(keys, (_normalize(one, depth + 1) for one in value.values()), strict=True))
    if isinstance(value, list | tuple):
        items = [_normalize(one, depth + 1) for one in value]
        return items if isinstance(value, list) else tuple(items)
    if value is None or type(value) in (bool, int, float, str, bytes, torch.Tensor):
        return value
    return refuse("value", f"a value of type {type(value).__qualname__}")


def _key(key: Any) -> Any:
    plain = _normalize(key, _MAX_DEPTH)
    if not isinstance(plain, str | int | float | bytes | None):
        refuse("value", f"a key of type {type(key).__qualname__}")
    return plain


def _tensor(array: Any) -> Any:
    import torch

    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    try:
        return torch.from_numpy(native)
    except TypeError:
        return refuse("value", f"a numpy array of dtype {array.dtype}")
