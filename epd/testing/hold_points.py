"""Named hold points: stop a real node at a named place, and let it go on by an event, not a sleep."""

import threading
from collections.abc import Callable, Sequence

from epd.forward.base import ForwardItem, ForwardWorker, WorkerEvents
from epd.memory.region import Region


class HoldPoints:
    """A set of names. A thread that passes a held name waits there until it is released."""

    def __init__(self, reached: Callable[[str], None] | None = None) -> None:
        self._changed = threading.Condition()
        self._held: set[str] = set()
        self._waiting: set[str] = set()
        self._reached = reached

    def hold(self, name: str) -> None:
        with self._changed:
            self._held.add(name)

    def release(self, name: str) -> None:
        with self._changed:
            self._held.discard(name)
            self._changed.notify_all()

    def release_all(self) -> None:
        with self._changed:
            self._held.clear()
            self._changed.notify_all()

    def is_held(self, name: str) -> bool:
        with self._changed:
            return name in self._held

    def tell_reached(self, name: str) -> None:
        """Somebody is waiting at `name`."""
        with self._changed:
            self._waiting.add(name)
            self._changed.notify_all()
        if self._reached is not None:
            self._reached(name)

    def pass_by(self, name: str) -> None:
        """Go on at once, or wait here while `name` is held."""
        if not self.is_held(name):
            return
        self.tell_reached(name)
        with self._changed:
            self._changed.wait_for(lambda: name not in self._held)
            self._waiting.discard(name)

    def wait_reached(self, name: str, timeout_s: float = 60.0) -> None:
        """Until somebody waits at `name`. Raises `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._waiting, timeout_s):
                raise TimeoutError(f"nobody reached the hold point {name!r} within {timeout_s} s")


class HeldWorker:
    """A forward worker that keeps its batches back while `forward` is held."""

    def __init__(self, inner: ForwardWorker, points: HoldPoints) -> None:
        self._inner = inner
        self._points = points
        self._kept: list[tuple[int, Sequence[ForwardItem], bool]] = []

    def start(self, regions: Sequence[Region], events: WorkerEvents) -> None:
        self._inner.start(regions, events)

    def submit(self, batch: int, items: Sequence[ForwardItem], *, digest: bool) -> None:
        if self._points.is_held("forward"):
            self._kept.append((batch, items, digest))
            self._points.tell_reached("forward")
        else:
            self._inner.submit(batch, items, digest=digest)

    def resume(self) -> None:
        """Hand over what was kept; in the loop's thread, after `release("forward")`."""
        for batch, items, digest in self._kept:
            self._inner.submit(batch, items, digest=digest)
        self._kept.clear()

    def kill(self) -> None:
        self._inner.kill()

    def stop(self) -> None:
        self._inner.stop()

    @property
    def pid(self) -> int | None:
        return self._inner.pid
