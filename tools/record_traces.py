"""Records the runs of `tests/traces`: a prefill node in this process, encoders in processes of their own.

    python tools/record_traces.py FOLDER [NAME...]

Writes `FOLDER/NAME-prefill.trace`, `FOLDER/NAME-encoder.trace` (and `-encoder-2` of an encoder that was
started again). A folder of a release is recorded once, for that release; to look at what today's code does,
record into another one. Nobody waits for time to pass: every wait is for something that was reached.
"""

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from pathlib import Path
from typing import Any, Final

from epd.config import load_config
from epd.dataplane.faulty import FaultyPlane
from epd.dataplane.select import open_plane
from epd.node import PrefillNode
from epd.protocol import prefill_types as p
from epd.protocol.machine import Effect, Event
from epd.protocol.session import FrameReceived
from epd.request import Delivery, EmbeddingRequest, ImageItem
from epd.testing.processes import HeldProcess, held_encoder
from epd.testing.synthetic import synthetic_item

MIB: Final = 1024 * 1024
ITEM: Final = synthetic_item(3 * MIB)
SMALL: Final = synthetic_item(64 * 1024)
TIMEOUTS: Final = {
    "timeouts.heartbeat_s": 0.25,
    "timeouts.suspect_after_s": 0.5,
    "timeouts.dead_after_s": 1.5,
    "timeouts.dedup_retention_s": 0.3,
}
_FAIL_AFTER_S: Final = 30.0

Matches = Callable[[Event, tuple[Effect, ...]], bool]


class Run:
    """One recorded run: our prefill node, its plane with hold points, and the encoder that serves."""

    def __init__(self, node: PrefillNode, plane: FaultyPlane, start_encoder: Callable[[], HeldProcess]):
        self.node = node
        self.plane = plane
        self.start_encoder = start_encoder
        self.encoder: HeldProcess
        self._requests = 0
        self._waiting: list[tuple[Matches, asyncio.Future[None]]] = []
        table = node.prefill._transfers
        table.observers = (*table.observers, self._observe)

    def submit(self, *items: ImageItem, deadline_s: float = 30.0) -> "asyncio.Future[Delivery]":
        self._requests += 1
        done: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        request = EmbeddingRequest(f"request-{self._requests}", list(items), deadline_s)
        self.node.submit(request, done.set_result)
        return done

    def cancel(self) -> None:
        """The last request."""
        self.node.cancel(f"request-{self._requests}")

    async def deliver(self, *items: ImageItem) -> None:
        """One request, whole, released."""
        await self.release(self.submit(*items))

    async def release(self, pending: "asyncio.Future[Delivery]") -> None:
        async with asyncio.timeout(_FAIL_AFTER_S):
            delivery = await pending
        if delivery.error is not None:
            raise delivery.error
        delivery.take()
        delivery.release()

    async def ended(self, pending: "asyncio.Future[Delivery]", code: str) -> None:
        async with asyncio.timeout(_FAIL_AFTER_S):
            delivery = await pending
        assert delivery.error is not None and delivery.error.code == code, delivery.error

    async def frames(self, count: int) -> None:
        """Until so many have come from the encoder."""
        left, come = count, asyncio.Event()

        def count_down(*step: Any) -> None:
            nonlocal left
            left -= isinstance(step[3], FrameReceived)
            if left <= 0:
                come.set()

        sessions = self.node.endpoint._table
        sessions.observers = (*sessions.observers, count_down)
        async with asyncio.timeout(_FAIL_AFTER_S):
            await come.wait()

    def next_step(self, matches: Matches) -> "asyncio.Future[None]":
        """Done with the next step of a request machine that matches; to be asked for before it comes."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((matches, done))
        return done

    def _observe(
        self, key: Hashable, before: Any, after: Any, event: Event, now_s: float, effects: tuple[Effect, ...]
    ) -> None:
        for matches, done in self._waiting:
            if not done.done() and matches(event, effects):
                done.set_result(None)


# -- the runs --------------------------------------------------------------------------------------


async def success(run: Run) -> None:
    """A request of two items, then one of one item."""
    await run.deliver(ITEM, SMALL)
    await run.deliver(synthetic_item(0))


async def join_orders(run: Run) -> None:
    """The grant before the job is ready, and, the same item at once again, the job before the grant."""
    await run.deliver(SMALL)
    await run.deliver(SMALL)


async def shared_job(run: Run) -> None:
    """Two requests for one item while its forward is held: one forward, two deliveries."""
    run.encoder.hold("forward")
    first = run.submit(SMALL)
    await asyncio.to_thread(run.encoder.wait_reached, "forward")
    granted = run.next_step(lambda _, effects: any(isinstance(e, p.SendGrant) for e in effects))
    second = run.submit(SMALL)
    await granted
    run.encoder.release("forward")
    await run.release(first)
    await run.release(second)


async def cancel(run: Run) -> None:
    """A cancel in each state: before delivery it ends the request, after it it changes nothing."""
    run.encoder.hold("plan")
    pending = run.submit(SMALL)  # requested
    await asyncio.to_thread(run.encoder.wait_reached, "plan")
    run.cancel()
    run.encoder.release("plan")
    await run.ended(pending, "cancelled")
    blocker = await run.submit(ITEM)
    asked = run.next_step(lambda _, effects: any(isinstance(e, p.AskRoom) for e in effects))
    pending = run.submit(synthetic_item(3 * MIB - 4))  # metadata: sizes are known, room is not there
    await asked
    run.cancel()
    await run.ended(pending, "cancelled")
    blocker.release()
    run.encoder.hold("forward")
    pending = run.submit(synthetic_item(1024))  # buffer-registered
    await asyncio.to_thread(run.encoder.wait_reached, "forward")
    run.cancel()
    run.encoder.release("forward")
    await run.ended(pending, "cancelled")
    reached = run.plane.hold("payload")
    pending = run.submit(synthetic_item(2048))  # forward-done
    await asyncio.to_thread(reached.wait, _FAIL_AFTER_S)
    run.cancel()
    await run.ended(pending, "cancelled")
    run.plane.release("payload")
    for take, release in ((False, False), (True, False), (True, True)):  # rdma-written, consumed, freed
        delivery = await run.submit(SMALL)
        if take:
            delivery.take()
        if release:
            delivery.release()
        run.cancel()
        await run.deliver(synthetic_item(0))
        if not release:
            delivery.release()


async def encoder_restarted(run: Run) -> None:
    """Killed in a forward; the request goes to its successor on the same port."""
    await run.deliver(SMALL)
    run.encoder.hold("forward")
    pending = run.submit(ITEM)
    await asyncio.to_thread(run.encoder.wait_reached, "forward")
    await run.frames(16)  # heartbeats: its trace has reached its file before it dies
    lost = run.next_step(lambda event, _: isinstance(event, p.SessionEnded))
    run.encoder.kill()
    await lost
    run.encoder = await asyncio.to_thread(run.start_encoder)
    await run.release(pending)


async def stopped_encoder(run: Run) -> None:
    """The encoder stands still in the midst of a read; the session dies, the encoder goes on, a new
    session is made, and the request is read in it."""
    reached = run.plane.hold("payload")
    pending = run.submit(ITEM)
    await asyncio.to_thread(reached.wait, _FAIL_AFTER_S)
    lost = run.next_step(lambda event, _: isinstance(event, p.SessionEnded))
    await asyncio.to_thread(run.encoder.stop)
    await lost
    run.plane.release("payload")
    run.encoder.go_on()
    await run.release(pending)


async def retry(run: Run) -> None:
    """The source is given to somebody else under the read: the seal shows it, a second attempt delivers."""
    reached = run.plane.hold("seal")
    pending = run.submit(SMALL)
    await asyncio.to_thread(reached.wait, _FAIL_AFTER_S)
    assert await asyncio.to_thread(run.encoder.reuse_early) >= 1
    run.plane.release("seal")
    await run.release(pending)


async def session_remade(run: Run) -> None:
    """The session ends while nothing runs; the next request goes through the next one."""
    await run.deliver(SMALL)
    (session,) = run.node.prefill.encoders.loads()
    available = run.next_step(lambda event, _: isinstance(event, p.EncoderAvailable))
    run.node.endpoint.close(session.session, "session_lost", "recorded on purpose")
    pending = run.submit(SMALL)
    await available
    await run.release(pending)


RUNS: Final[dict[str, Callable[[Run], Awaitable[None]]]] = {
    "success": success,
    "join-orders": join_orders,
    "shared-job": shared_job,
    "cancel": cancel,
    "encoder-restarted": encoder_restarted,
    "stopped-encoder": stopped_encoder,
    "retry": retry,
    "session-remade": session_remade,
}


@contextlib.asynccontextmanager
async def _running(folder: Path, name: str) -> AsyncIterator[Run]:
    common = TIMEOUTS | {"data_plane": "shm", "log_format": "json"}
    with contextlib.ExitStack() as stack:
        started: list[HeldProcess] = []

        def start_encoder() -> HeldProcess:
            suffix = "" if not started else f"-{len(started) + 1}"
            settings = common | {
                "node": "encoder",
                "staging.regions": 1,
                "staging.region_nbytes": 8 * MIB,
                "trace": str(folder / f"{name}-encoder{suffix}.trace"),
            }
            if started:
                settings["listen"] = started[0].listen
            started.append(stack.enter_context(held_encoder(settings, encoder="synthetic")))
            return started[-1]

        encoder = await asyncio.to_thread(start_encoder)
        overrides = common | {
            "role": "prefill",
            "node": "prefill",
            "encoders": [encoder.listen],
            "pool.regions": 1,
            "pool.region_nbytes": 4 * MIB,
            "trace": str(folder / f"{name}-prefill.trace"),
        }
        plane = FaultyPlane(open_plane("shm", "127.0.0.1"))
        async with PrefillNode(load_config(None, overrides), open_plane_with=lambda: plane) as node:
            run = Run(node, plane, start_encoder)
            run.encoder = encoder
            yield run
        run.encoder.close()  # ends it orderly
        await asyncio.to_thread(run.encoder.process.wait, _FAIL_AFTER_S)


async def record(folder: Path, names: list[str]) -> None:
    """Record these runs into `folder`."""
    for name in names:
        async with _running(folder, name) as run:
            await RUNS[name](run)
            await run.frames(4)  # heartbeats: what the encoder keeps for a while is given up meanwhile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[*RUNS, []], metavar="NAME")
    given = parser.parse_args()
    names = given.names or list(RUNS)
    given.folder.mkdir(parents=True, exist_ok=True)
    # Recorded elsewhere first: a run that fails leaves no half of it behind.
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(record(Path(folder), names))
        for path in sorted(Path(folder).iterdir()):
            (given.folder / path.name).write_bytes(path.read_bytes())
            print(f"{path.name}: {path.stat().st_size} B")


if __name__ == "__main__":
    main()
