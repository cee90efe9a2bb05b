"""Encoding batches, wherever the worker lives: an item that fails, fails alone."""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from epd.encoders.base import Encoder, MediaItem
from epd.encoders.media import DEFAULT_RULES, PictureRules
from epd.forward.base import ForwardItem, ItemResult
from epd.protocol.errors import EpdError, ForwardFailed, MediaMismatch
from epd.protocol.messages import EmbeddingSpec, ErrorValue

REASON_CHARACTERS: Final = 200
"""Of one error text: a batch of `MAX_ITEMS_PER_PART` failures must fit a worker's message."""

Store = Callable[[Any, ForwardItem, bool], bytes | None]
"""Writes one result to its item's place and nothing beside it; returns its digest, if that is asked for."""


class BatchRunner:
    """Preprocess, forward, store; `batch_items` items in one forward, at most."""

    def __init__(
        self,
        encoder: Encoder,
        store: Store,
        batch_items: int,
        pictures: PictureRules = DEFAULT_RULES,
    ) -> None:
        self._pictures = pictures
        self._encoder = encoder
        self._store = store
        self._batch_items = batch_items

    def run(self, items: Sequence[ForwardItem], *, digest: bool) -> list[ItemResult]:
        """One result per item, in order."""
        results: list[ItemResult] = []
        for first in range(0, len(items), self._batch_items):
            results += self._run_group(items[first : first + self._batch_items], digest)
        return results

    def _run_group(self, group: Sequence[ForwardItem], digest: bool) -> list[ItemResult]:
        results: list[ItemResult | None] = [None] * len(group)
        prepared: dict[int, Any] = {}
        for number, item in enumerate(group):
            try:
                media = MediaItem(item.probe, memoryview(item.media), item.dtype, self._pictures)
                prepared[number] = self._encoder.preprocess(media)
            except Exception as error:
                results[number] = failed(error)
        for number, outcome in zip(prepared, self._forward(list(prepared.values())), strict=True):
            if isinstance(outcome, ItemResult):
                results[number] = outcome
                continue
            try:
                check_shape(outcome, group[number].spec)
                results[number] = ItemResult(None, self._store(outcome, group[number], digest))
            except Exception as error:
                results[number] = failed(error)
        return [result for result in results if result is not None]

    def _forward(self, inputs: list[Any]) -> list[Any]:
        """A tensor or a failure per input. Whoever spoils a common forward is found by going alone.

        No exception is kept: its frames would keep the media mapped until a garbage collection.
        """
        if not inputs:
            return []
        try:
            tensors = list(self._encoder.forward(inputs))
            if len(tensors) != len(inputs):
                raise ForwardFailed(f"{self._encoder.name}: {len(tensors)} results of {len(inputs)} items")
        except Exception as error:
            if len(inputs) == 1:
                return [failed(error)]
            return [outcome for one in inputs for outcome in self._forward([one])]
        return tensors


def check_shape(result: Any, spec: EmbeddingSpec) -> None:
    """Raises `MediaMismatch` or `ForwardFailed` if a result is not what was announced."""
    shape, dtype = tuple(result.shape), str(result.dtype).removeprefix("torch.")
    if shape != (spec.rows, spec.dim):
        raise MediaMismatch(f"{spec.rows}x{spec.dim} announced, the forward made {shape}")
    if dtype != spec.dtype:
        raise ForwardFailed(f"{spec.dtype} announced, the forward made {dtype}")


def failed(error: Exception) -> ItemResult:
    """An error of ours as it is; anything else is a failed forward, which may succeed elsewhere."""
    known = error if isinstance(error, EpdError) else ForwardFailed(describe(error))
    text = known.message[:REASON_CHARACTERS]
    return ItemResult(ErrorValue(known.code, known.retryable, text), None)


def describe(error: Exception) -> str:
    """The error and the line that raised it: all that is known here of a user's encoder."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = f" ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[: REASON_CHARACTERS - len(where)] + where
