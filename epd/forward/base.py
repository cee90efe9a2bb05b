"""The forward worker as its node sees it: one interface for a process (CPU) and a thread (GPU)."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from epd.memory.region import Region
from epd.protocol.messages import DType, EmbeddingSpec, ErrorValue, Probe


class ForwardItem(NamedTuple):
    """One item to encode; the result goes to `offset` of staging region `region`."""

    media: memoryview | bytes
    probe: Probe
    dtype: DType
    spec: EmbeddingSpec
    region: int
    offset: int


class ItemResult(NamedTuple):
    """What became of one item: an error, or its rows are in the region.

    `digest` is of the payload as the forward made it, if it was asked for: xxh3-128 of host memory,
    `epd.memory.tensors` of a GPU's.
    """

    error: ErrorValue | None
    digest: bytes | None


class WorkerEvents(Protocol):
    """What a worker reports; every call is made on the node's loop."""

    def worker_ready(self) -> None:
        """The model is loaded: batches may be submitted."""
        ...

    def batch_ended(self, batch: int, results: Sequence[ItemResult]) -> None:
        """Nothing writes for this batch any more; one result per item, in order."""
        ...

    def worker_lost(self, reason: str) -> None:
        """The node has to end: the model could not be loaded at start, or the worker may still write and
        nothing in this process can end it."""
        ...

    def worker_died(self, reason: str) -> None:
        """It is gone, by the kernel's word: nothing writes for the running batch any more.

        The batch submitted and not ended has failed. Another worker is started by itself.
        """
        ...


class ForwardWorker(Protocol):
    def start(self, regions: Sequence[Region], events: WorkerEvents) -> None:
        """Start it, once, on the running loop. Failures to start are reported as deaths."""
        ...

    def submit(self, batch: int, items: Sequence[ForwardItem], *, digest: bool) -> None:
        """Encode a batch. One runs at a time: submit when `worker_ready` was the last word, and then
        after each `batch_ended`. Exactly one `batch_ended` or `worker_died` answers."""
        ...

    def kill(self) -> None:
        """End it now, e.g. when a forward takes too long; its death is then reported as an event."""
        ...

    def stop(self) -> None:
        """End it and wait for its end, a few seconds at most. Idempotent; no event comes after."""
        ...

    @property
    def pid(self) -> int | None:
        """Of the worker's process, None where there is none (now)."""
        ...
