"""The references of `transfer`: the same bytes read in the barest way the transport allows."""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np

from epd.bench.pair import Pair
from epd.dataplane.poller import cut

_POLL_S: Final = 50e-6
_SPIN_S: Final = 200e-6


class RawMooncake:
    """An engine of its own that reads the encoder's memory: synchronously, or in pieces."""

    def __init__(self, pair: Pair) -> None:
        from mooncake.engine import TransferEngine  # the plane has set its environment already

        self._engine: Any = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise OSError("the reference's Mooncake engine does not start")
        self._segment = pair.segment
        self._base = pair.exported[0].base
        self._into = np.zeros(pair.exported[0].nbytes, np.uint8)
        self._thread = ThreadPoolExecutor(1, "raw-mooncake")

    def references(self, nbytes: int) -> dict[str, Callable[[], float]]:
        """Name and a call that reads `nbytes` once and returns the seconds it took."""
        return {
            "raw sync read": lambda: self._thread.submit(self._sync, nbytes).result(),
            "raw read": lambda: self._thread.submit(self._in_pieces, nbytes).result(),
        }

    def _sync(self, nbytes: int) -> float:
        start_s = time.perf_counter()
        code = self._engine.transfer_sync_read(self._segment, self._into.ctypes.data, self._base, nbytes)
        took_s = time.perf_counter() - start_s
        if code != 0:
            raise OSError(f"transfer_sync_read of {nbytes} B: {code}")
        return took_s

    def _in_pieces(self, nbytes: int) -> float:
        """The best asynchronous way found: one entry a call, spin for a moment, then sleep."""
        start_s = time.perf_counter()
        open_batches = [
            self._engine.batch_transfer_async_read(
                self._segment, [self._into.ctypes.data + offset], [self._base + offset], [length]
            )
            for offset, length in cut(nbytes)
        ]
        while open_batches:
            running = []
            for batch in open_batches:
                status = self._engine.transfer_check_status(batch)
                if status < 0:
                    raise OSError(f"raw read of {nbytes} B: {status}")
                if status == 0:
                    running.append(batch)
            open_batches = running
            if open_batches and time.perf_counter() - start_s > _SPIN_S:
                time.sleep(_POLL_S)
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._thread.shutdown()
        self._engine = None


class RawCopy:
    """One memory copy by one thread, between pages that were touched before."""

    def __init__(self, nbytes: int) -> None:
        self._source = np.ones(nbytes, np.uint8)
        self._into = np.zeros(nbytes, np.uint8)

    def references(self, nbytes: int) -> dict[str, Callable[[], float]]:
        return {"memcpy": partial(self._copy, nbytes)}

    def _copy(self, nbytes: int) -> float:
        start_s = time.perf_counter()
        ctypes.memmove(self._into.ctypes.data, self._source.ctypes.data, nbytes)
        return time.perf_counter() - start_s

    def close(self) -> None:
        """Nothing but memory."""
