"""What an engine submits and what it gets back: items, requests, deliveries."""

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import structlog

from epd.encoders.media import DEFAULT_RULES, PictureRules, probe_image
from epd.memory.region import DeviceView, View
from epd.memory.tensors import as_tensor, new_event
from epd.protocol.errors import EpdError, MediaInvalid
from epd.protocol.messages import AuxTensor, EmbeddingSpec, Item, Probe, WantedDType

if TYPE_CHECKING:
    import torch

_log = structlog.get_logger()

MAX_FILE_NBYTES: Final = 64 * 1024 * 1024
"""Of one file, unless the caller says another; what a node takes by default of one item."""


class ImageItem(msgspec.Struct, frozen=True, eq=False):
    """One picture: its encoded bytes, its probe and its SHA-256."""

    name: str
    media: bytes
    probe: Probe
    sha256: bytes

    @classmethod
    def from_bytes(
        cls, media: bytes, name: str = "image", rules: PictureRules = DEFAULT_RULES
    ) -> "ImageItem":
        """Probe and hash encoded media. Raises `MediaInvalid` naming the item."""
        return cls(name, media, probe_image(media, name, rules), hashlib.sha256(media).digest())

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        rules: PictureRules = DEFAULT_RULES,
        max_nbytes: int = MAX_FILE_NBYTES,
    ) -> "ImageItem":
        """Read, probe and hash a regular file of at most `max_nbytes`.

        Raises `MediaInvalid` naming the path and the reason. Never waits for a FIFO or a device.
        """
        name = os.fspath(path)
        try:
            media = _read_regular_file(path, name, max_nbytes)
        except OSError as error:
            raise MediaInvalid(f"{name}: {error.strerror or error}", item_name=name) from None
        except ValueError as error:  # a NUL in it, say
            raise MediaInvalid(f"{name!r}: {error}", item_name=name) from None
        return cls.from_bytes(media, name, rules)

    def described(self) -> Item:
        """The item as it travels."""
        return Item(self.probe, self.sha256, len(self.media))


def _read_regular_file(path: str | os.PathLike[str], name: str, max_nbytes: int) -> bytes:
    # Looked at before it is opened: opening a device can already do something.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise MediaInvalid(f"{name}: not a regular file", item_name=name)
    with open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise MediaInvalid(f"{name}: not a regular file", item_name=name)
        # Also after its size: it may grow, or say nothing, as the kernel's own files do.
        media = file.read(max_nbytes + 1) if status.st_size <= max_nbytes else b""
    if status.st_size > max_nbytes or len(media) > max_nbytes:
        nbytes = max(status.st_size, len(media))
        raise MediaInvalid(f"{name}: {nbytes} B, at most {max_nbytes} are read", item_name=name)
    return media


class EmbeddingRequest(msgspec.Struct, frozen=True, eq=False):
    """All items are delivered together, in order, or the request fails with one error.

    `request_id` is the caller's, unique among its open requests. `deadline_s` counts from submit.
    """

    request_id: str
    items: Sequence[ImageItem]
    deadline_s: float = 60.0
    dtype: WantedDType = "model"
    traceparent: str | None = None


class Fence(Protocol):
    """An event on a stream of a GPU."""

    def query(self) -> bool:
        """Whether all that was queued before it has been done."""
        ...


class Delivery:
    """One ended request: views into the pool, one per item, until `release()`; or an error.

    The views are valid until `release()` and no longer; release is explicit, never by garbage
    collection (I5): a handle dropped without it is reported with the request it belonged to.
    """

    __slots__ = (
        "_notify",
        "_released",
        "_taken",
        "error",
        "phases_s",
        "request_id",
        "specs",
        "verified",
        "views",
    )

    def __init__(
        self,
        request_id: str,
        specs: tuple[EmbeddingSpec, ...] = (),
        views: tuple[View, ...] = (),
        error: EpdError | None = None,
        phases_s: Mapping[str, float] | None = None,
        verified: tuple[bool, ...] = (),
        notify: Callable[[str, Fence | None], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.specs = specs
        self.views = views
        self.error = error
        self.phases_s = phases_s or {}
        """When each state name was first seen, monotonic seconds; grows until freed."""
        self.verified = verified
        """Per item: were its bytes compared with the digest that the forward's worker computed?"""
        self._notify = notify
        self._taken = False
        self._released = notify is None

    @property
    def tensors(self) -> "list[torch.Tensor]":
        """One `rows x dim` tensor per item, in item order: views, no copy. Raises `error` if any."""
        import torch

        if self.error is not None:
            raise self.error
        return [
            as_tensor(view).view(getattr(torch, spec.dtype)).view(spec.rows, spec.dim)
            for spec, view in zip(self.specs, self.views, strict=True)
        ]

    @property
    def aux(self) -> tuple[tuple[AuxTensor, ...], ...]:
        """The aux tensors (e.g. `grid_thw`) of each item."""
        return tuple(spec.aux for spec in self.specs)

    def take(self) -> None:
        """Say that the consumer holds the views now (`consumed`); idempotent."""
        if not self._taken and not self._released and self._notify is not None:
            self._taken = True
            self._notify("taken", None)

    def release(self, stream: Any = None) -> None:
        """Give the memory back; idempotent.

        Of a pool on a GPU: when what is queued on `stream` so far has been done (a `torch.cuda.Stream`;
        None: the calling thread's current one). Host memory needs none.
        """
        if not self._released and self._notify is not None:
            self._released = True
            fence = next((_fence(v.device, stream) for v in self.views if isinstance(v, DeviceView)), None)
            self.views = ()
            self._notify("released", fence)

    def call_from(self, hop: Callable[[Callable[[], None]], None]) -> None:
        """The consumer lives in another thread: `hop` brings its `take` and `release` to the node's."""
        notify = self._notify
        if notify is not None:
            self._notify = lambda news, fence: hop(lambda: notify(news, fence))

    def __del__(self) -> None:
        if not self._released and not sys.is_finalizing():
            _log.warning("delivery dropped without release()", request=self.request_id)


def _fence(device: str, stream: Any) -> Fence:
    import torch

    event = new_event()
    event.record(stream or torch.cuda.current_stream(device))
    fence: Fence = event
    return fence
