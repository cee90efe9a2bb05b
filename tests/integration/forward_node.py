"""A node that has nothing but a forward worker with an item that never ends; to be killed.

`python forward_node.py ENCODER FIFO` prints the worker's process id; the item writes to FIFO when it
runs.
"""

import asyncio
import mmap
import os
import sys
from collections.abc import Sequence

from epd.forward.process import ForwardItem, ItemResult, ProcessWorker
from epd.memory.region import HostRegion
from epd.protocol.ids import RegionId
from epd.protocol.messages import EmbeddingSpec, Probe


class MemfdRegion(HostRegion):
    """A staging region as a data plane would make it."""

    def __init__(self, region: int, nbytes: int) -> None:
        self.region = RegionId(region)
        self.nbytes = nbytes
        self.fd: int | None = os.memfd_create("epd-test")
        os.ftruncate(self.fd, nbytes)
        self._mapping = mmap.mmap(self.fd, nbytes)
        self._view = memoryview(self._mapping)
        self.address = 0

    @property
    def view(self) -> memoryview:
        return self._view

    def close(self) -> None:
        self._view.release()
        self._mapping.close()
        assert self.fd is not None
        os.close(self.fd)


class _Events:
    def __init__(self, worker: ProcessWorker, fifo: str) -> None:
        self._worker = worker
        self._fifo = fifo

    def worker_ready(self) -> None:
        item = ForwardItem(
            b"hang:" + os.fsencode(self._fifo),
            Probe("image", width=1),
            "float32",
            EmbeddingSpec(1, 4, "float32"),
            0,
            0,
        )
        self._worker.submit(1, [item], digest=False)
        sys.stdout.write(f"{self._worker.pid}\n")
        sys.stdout.flush()

    def batch_ended(self, batch: int, results: Sequence[ItemResult]) -> None:
        raise AssertionError(results)

    def worker_lost(self, reason: str) -> None:
        raise AssertionError(reason)

    def worker_died(self, reason: str) -> None:
        raise AssertionError(reason)


async def _main(encoder: str, fifo: str) -> None:
    worker = ProcessWorker(encoder, 1)
    worker.start([MemfdRegion(0, 4096)], _Events(worker, fifo))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2]))
