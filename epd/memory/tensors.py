"""Parts of regions as tensors, copies of them on the host, and the digest of memory on a GPU.

The digest is multilinear: 32-bit words times 64-bit random weights, summed modulo 2^64, the sums of
rows digested again until one is left. It finds what goes wrong by itself (stale, torn, moved or
flipped bytes) with a chance of about 2^-32 to miss it; it is no defence against a forger. A hash made
for a processor's registers would leave a GPU idle; this is a few passes of ordinary kernels.
"""

import functools
import hashlib
from typing import TYPE_CHECKING, Any, Final

from epd.memory.region import HOST, View

if TYPE_CHECKING:
    import torch

_ROW_WORDS: Final = 1 << 16
_CHUNK_ROWS: Final = 128
"""Rows of 256 KiB digested at once: bounds the memory taken for products to 64 MiB."""
_WORD_NBYTES: Final = 4


def as_tensor(view: View) -> "torch.Tensor":
    """The part itself, as uint8 of shape (nbytes,): no copy, on the part's own device."""
    import torch

    if view.nbytes == 0:
        device = HOST if isinstance(view, memoryview) else view.device
        return torch.empty(0, dtype=torch.uint8, device=device)
    if isinstance(view, memoryview):
        return torch.frombuffer(view, dtype=torch.uint8)
    whole = view.whole() if view.whole is not None else None
    if whole is not None:
        return whole[view.start : view.start + view.nbytes]
    # Not once per part: torch forgets to let go of about 160 bytes at each.
    return torch.as_tensor(view, device=view.device)


def new_stream(device: str) -> Any:
    """A CUDA stream of its own. (torch says nothing of its type.)"""
    import torch

    cuda: Any = torch.cuda
    return cuda.Stream(device)


def new_event(*, blocking: bool = False) -> Any:
    """A CUDA event of the current device; `blocking`: who waits for it sleeps."""
    import torch

    cuda: Any = torch.cuda
    return cuda.Event(blocking=blocking)


def host_bytes(view: View) -> memoryview:
    """The part's bytes on the host: itself, or a copy of what is on a GPU."""
    if isinstance(view, memoryview):
        return view
    return as_tensor(view).cpu().numpy().data


def device_digest(payload: "torch.Tensor") -> bytes:
    """8 bytes, equal for equal payloads on any device. `payload` is uint8 of shape (nbytes,).

    It is queued on the current stream and waited for: 8 bytes come to the host.
    """
    import torch

    sums, level = _row_sums(payload, 0), 1
    while sums.numel() > 1:
        sums, level = _row_sums(sums.view(torch.uint8), level), level + 1
    value = (int(sums.item()) + payload.numel()) & 0xFFFF_FFFF_FFFF_FFFF
    return value.to_bytes(8, "little")


def _row_sums(payload: "torch.Tensor", level: int) -> "torch.Tensor":
    """One int64 per row of `payload`; what is short of a whole row counts as if zeros followed."""
    import torch

    nbytes = payload.numel()
    whole = nbytes // _WORD_NBYTES
    words = payload[: whole * _WORD_NBYTES].view(torch.int32)
    weights = _weights(level, str(payload.device))
    rows = whole // _ROW_WORDS
    sums = [
        (words[first * _ROW_WORDS : last * _ROW_WORDS].view(-1, _ROW_WORDS) * weights).sum(1)
        for first, last in ((at, min(at + _CHUNK_ROWS, rows)) for at in range(0, rows, _CHUNK_ROWS))
    ]
    rest = words[rows * _ROW_WORDS :]
    tail = (rest * weights[: rest.numel()]).sum().view(1)
    ragged = payload[whole * _WORD_NBYTES :].to(torch.int64)
    if ragged.numel():
        tail = tail + (ragged * weights[-ragged.numel() :]).sum()
    if rest.numel() or ragged.numel() or not sums:
        sums.append(tail)
    return torch.cat(sums)


@functools.cache
def _weights(level: int, device: str) -> "torch.Tensor":
    """`_ROW_WORDS` odd numbers of 64 bits, the same in every process and version."""
    import torch

    stream = hashlib.shake_256(b"epd digest %d" % level).digest(_ROW_WORDS * 8)
    return (torch.frombuffer(bytearray(stream), dtype=torch.int64) | 1).to(device)
