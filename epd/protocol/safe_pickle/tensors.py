"""Tensors of a pickle: each size is checked against bytes that are there before torch sees it."""

import io
import struct
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from epd.protocol.safe_pickle.values import PickleLimits, PickleRefused, refuse

if TYPE_CHECKING:
    import torch


class Name:
    """A name in a pickle: nothing was imported for it."""

    __slots__ = ("full",)

    def __init__(self, full: str) -> None:
        self.full = full


class Storage:
    """Bytes of tensors; only tensors are made of it. `dtype` is None where each tensor says its own."""

    __slots__ = ("dtype", "untyped")

    def __init__(self, untyped: "torch.UntypedStorage", dtype: "torch.dtype | None") -> None:
        self.untyped = untyped
        self.dtype = dtype


class Claim(NamedTuple):
    """What a persistent id says of a storage."""

    key: str
    items: int
    nbytes: int
    is_untyped: bool


class _StorageKind(NamedTuple):
    item_nbytes: int
    dtype: str | None


STORAGES: Final[Mapping[str, _StorageKind]] = {
    "torch.FloatStorage": _StorageKind(4, "torch.float32"),
    "torch.DoubleStorage": _StorageKind(8, "torch.float64"),
    "torch.HalfStorage": _StorageKind(2, "torch.float16"),
    "torch.BFloat16Storage": _StorageKind(2, "torch.bfloat16"),
    "torch.LongStorage": _StorageKind(8, "torch.int64"),
    "torch.IntStorage": _StorageKind(4, "torch.int32"),
    "torch.ShortStorage": _StorageKind(2, "torch.int16"),
    "torch.CharStorage": _StorageKind(1, "torch.int8"),
    "torch.ByteStorage": _StorageKind(1, "torch.uint8"),
    "torch.BoolStorage": _StorageKind(1, "torch.bool"),
    "torch.ComplexFloatStorage": _StorageKind(8, "torch.complex64"),
    "torch.ComplexDoubleStorage": _StorageKind(16, "torch.complex128"),
    "torch.storage.UntypedStorage": _StorageKind(1, None),
}
DTYPES: Final = frozenset(
    (
        *(kind.dtype for kind in STORAGES.values() if kind.dtype),
        *("torch.uint16", "torch.uint32", "torch.uint64"),
        *("torch.float8_e4m3fn", "torch.float8_e5m2", "torch.float8_e4m3fnuz", "torch.float8_e5m2fnuz"),
    )
)
_STORAGE_MAGIC: Final = 0x1950A86A20F9469CFC6C
_STORAGE_VERSION: Final = 1001
_MAX_COUNT: Final = 2**48


def dtype_of(name: Name) -> "torch.dtype":
    """The one attribute of torch that a pickle chooses, and only among `DTYPES`."""
    import torch

    dtype = getattr(torch, name.full.removeprefix("torch."), None) if name.full in DTYPES else None
    if not isinstance(dtype, torch.dtype):
        refuse("value", f"{name.full} is no dtype of this torch")
    return dtype


def integers(value: object, what: str) -> tuple[int, ...]:
    """`value` if it is a tuple of counts."""
    if type(value) is not tuple or not all(type(one) is int and 0 <= one < _MAX_COUNT for one in value):
        refuse("value", f"{what} is not a tuple of counts")
    return value


def storage_claim(identity: object) -> Claim:
    """A persistent id of `torch.save`: kind, key, location, count, and no view of another storage."""
    match identity:
        case ("storage", Name(full=kind), str(key), str(), int(count), *view) if (
            kind in STORAGES and view in ([], [None]) and 0 <= count < _MAX_COUNT
        ):
            return Claim(key, count, count * STORAGES[kind].item_nbytes, STORAGES[kind].dtype is None)
    return refuse("value", "a persistent id that names no storage")


def load_storage(blob: object, read_pickle: Callable[[io.BytesIO], Any]) -> Storage:
    """What `torch.save` made of one storage, by torch's weights-only reader, on the CPU.

    `read_pickle` reads one pickle of a stream in which only storages have names.
    """
    if type(blob) is not bytes:
        refuse("value", "a storage that is no bytes")
    data = _data_of(blob, read_pickle)
    import torch

    if data is not None:
        copied = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return Storage(copied.untyped_storage(), None)
    try:
        loaded = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except Exception as error:
        raise PickleRefused(f"pickle refused: a storage: {type(error).__name__}", reason="value") from None
    if not isinstance(loaded, torch.storage.TypedStorage):
        refuse("value", "bytes of a storage that hold something else")
    return Storage(loaded._untyped_storage, loaded.dtype)


def _data_of(blob: bytes, read_pickle: Callable[[io.BytesIO], Any]) -> memoryview | None:
    """The bytes claim what they have, or are refused before torch allocates what they claim.

    The data themselves if they are of no dtype: torch's weights-only reader takes no such storage.
    """
    stream = io.BytesIO(blob)
    magic, version, system, claim, keys = (read_pickle(stream) for _ in range(5))
    if magic != _STORAGE_MAGIC or version != _STORAGE_VERSION or type(system) is not dict:
        refuse("value", "bytes that are no storage")
    if not isinstance(claim, Claim) or keys != [claim.key]:
        refuse("value", "bytes that hold not exactly one storage")
    data = memoryview(blob)[stream.tell() :]
    present = max(0, len(data) - 8)
    if len(data) < 8 or struct.unpack_from("<q", data)[0] != claim.items or present != claim.nbytes:
        refuse("limit", f"a storage that claims {claim.nbytes} B and has {present}")
    return data[8:] if claim.is_untyped else None


class TensorBudget:
    """Builds the tensors of one pickle, within its limits."""

    def __init__(self, limits: PickleLimits) -> None:
        self._limits = limits
        self._tensors = 0
        self._nbytes = 0

    def rebuild(self, arguments: tuple[Any, ...], *, has_dtype: bool) -> "torch.Tensor":
        """A view of a storage: offset, size and strides that lie inside it."""
        import torch

        count = 7 if has_dtype else 6
        if len(arguments) not in (count, count + 1):
            refuse("value", f"a tensor of {len(arguments)} facts")
        source, offset, size, stride, requires_grad, hooks = arguments[:6]
        if not isinstance(source, Storage) or type(requires_grad) is not bool or hooks:
            refuse("value", "a tensor without a storage, or with hooks")
        dtype = source.dtype
        if has_dtype:
            dtype = dtype_of(arguments[6]) if isinstance(arguments[6], Name) else None
        if dtype is None:
            refuse("value", "a tensor without a dtype")
        (offset,) = integers((offset,), "an offset")
        size, stride = integers(size, "a size"), integers(stride, "a stride")
        if len(size) != len(stride) or len(size) > 64:
            refuse("value", "a size and a stride that do not match")
        items = prod(size, start=1)
        self._take(items * dtype.itemsize)
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        available = source.untyped.nbytes() // dtype.itemsize
        if offset > available or (items and last >= available):
            refuse("value", "a tensor outside its storage")
        tensor = torch.empty(0, dtype=dtype).set_(source.untyped, offset, size, stride)
        return tensor.requires_grad_() if requires_grad and dtype.is_floating_point else tensor

    def _take(self, nbytes: int) -> None:
        self._tensors += 1
        self._nbytes += nbytes
        limits = self._limits
        if self._tensors > limits.max_tensors or self._nbytes > limits.max_tensor_nbytes:
            refuse("limit", f"{self._tensors} tensors of {self._nbytes} B in all")
