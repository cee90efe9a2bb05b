"""What stands for the engine of a prefill node: submits, cancels, holds, checks every byte, releases."""

import ctypes
from collections.abc import Callable
from typing import Final

from epd.chaos.oracle import Oracle, embedding_request
from epd.chaos.schedule import Request
from epd.node import PrefillNode
from epd.request import Delivery, EmbeddingRequest
from epd.sim.process import Process
from epd.sim.watch import overlap

_GRACE_S: Final = 5.0
"""A request without an outcome so long after its deadline is lost."""


class Consumer:
    """Of one incarnation of a prefill node; what it had asked for dies with it."""

    def __init__(
        self,
        seed: int,
        process: Process,
        node: PrefillNode,
        oracle: Oracle,
        violated: Callable[[str], None],
    ) -> None:
        self.open: dict[str, EmbeddingRequest] = {}
        """Without an outcome."""
        self.ended = 0
        self._seed = seed
        self._process = process
        self._node = node
        self._oracle = oracle
        self._violated = violated
        self._held: dict[str, list[tuple[int, int]]] = {}

    @property
    def holding(self) -> int:
        """Deliveries that are not released."""
        return len(self._held)

    def submit(self, request: Request) -> None:
        """In a turn of the process's loop."""
        loop = self._process.loop
        wanted = embedding_request(self._seed, request)
        self.open[wanted.request_id] = wanted
        self._node.submit(wanted, lambda delivery: self._on_outcome(request, wanted, delivery))
        if request.cancel_s is not None:
            loop.call_later(request.cancel_s, self._node.cancel, wanted.request_id)
        loop.call_later(request.deadline_s + _GRACE_S, self._on_overdue, wanted.request_id)

    def check_write(self, address: int, nbytes: int) -> None:
        """Something lands there: never in what is held here (I1)."""
        for request, ranges in self._held.items():
            for start, held_nbytes in ranges:
                if overlap(start, held_nbytes, address, nbytes):
                    self._violated(f"I1: {nbytes} B landed in what {request} holds in {self._process.name}")

    def _on_outcome(self, request: Request, wanted: EmbeddingRequest, delivery: Delivery) -> None:
        if self.open.pop(wanted.request_id, None) is None:
            self._oracle.lost += 1
            self._violated(f"I3: a second outcome of {wanted.request_id}")
            return
        self.ended += 1
        if delivery.error is not None:
            self._oracle.failed[delivery.error.code] += 1
            return
        delivery.take()
        self._held[wanted.request_id] = [_range(view) for view in delivery.views if view.nbytes]
        self._oracle.check(wanted, delivery, "when it came")
        self._process.loop.call_later(request.hold_s, self._give_back, wanted, delivery)

    def _give_back(self, wanted: EmbeddingRequest, delivery: Delivery) -> None:
        self._oracle.check(wanted, delivery, "before its release")
        self._oracle.poison(delivery)
        self._oracle.delivered += 1
        self._oracle.delivered_nbytes += sum(view.nbytes for view in delivery.views)
        del self._held[wanted.request_id]
        delivery.release()

    def _on_overdue(self, request_id: str) -> None:
        wanted, process = self.open.get(request_id), self._process
        if wanted is None:
            return
        # It stood still, perhaps before the node had read the request: its time begins there.
        due_s = process.went_on_s + wanted.deadline_s + _GRACE_S
        if process.now_s() < due_s:
            process.loop.call_at(due_s, self._on_overdue, request_id)
        else:
            self._oracle.lost += 1
            self._violated(f"I3: {request_id} has no outcome {_GRACE_S} s after its deadline")


def _range(view: object) -> tuple[int, int]:
    assert isinstance(view, memoryview)
    return ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes
