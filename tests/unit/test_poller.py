"""The poller with planes that misbehave on purpose; every wait is for an event."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import xxhash

from epd.dataplane import poller as poller_module
from epd.dataplane.base import DataPlane, Piece, ReadState
from epd.dataplane.faulty import FaultyPlane, Rates
from epd.dataplane.poller import (
    PeerOpened,
    PollerFailed,
    ReadDone,
    ReadPoller,
    ReadPosted,
    ReadRequest,
    ReadResult,
    cut,
)
from epd.dataplane.shm import ShmPlane
from epd.memory.region import Region
from epd.protocol import reads
from epd.protocol.ids import ReadId, RegionId, Seal, SessionId
from epd.protocol.machine import Effect, Event
from epd.protocol.messages import Source

MIB = 1024 * 1024
SEAL = 0xABCDEF0123456789
SESSION = SessionId(1)
OTHER = SessionId(2)


class Bench:
    """A staging pool and a receive pool in one process, with a faulty plane between them."""

    def __init__(self, plane: FaultyPlane) -> None:
        self.owner = ShmPlane()
        self.staging = self.owner.allocate(1, 4 * MIB, exported=True)[0]
        self.plane = plane
        self.pool = plane.allocate(1, 8 * MIB, exported=False)[0]
        self.results: list[ReadResult] = []
        self.steps: list[tuple[ReadId, Event, tuple[Effect, ...]]] = []
        self._arrived = asyncio.Event()
        self.poller = ReadPoller(plane, self._deliver, asyncio.get_running_loop(), tap=self._tap)

    def _deliver(self, results: list[ReadResult]) -> None:
        self.results += results
        self._arrived.set()

    def _tap(
        self,
        read: ReadId,
        event: Event,
        now_s: float,
        effects: tuple[Effect, ...],
        state: reads.AnyState,
    ) -> None:
        self.steps.append((read, event, effects))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._arrived.clear()
            await self._arrived.wait()

    async def open(self, session: SessionId = SESSION) -> None:
        self.poller.open_peer(session, self.owner.segment, self.owner.export())
        await self.until(lambda: PeerOpened(session, True, "") in self.results)

    def put(self, offset: int, data: bytes, seal: int = SEAL) -> Source:
        """A finished source in the staging pool."""
        view, end = self.staging.view, offset + (len(data) + 7) // 8 * 8
        view[offset : offset + len(data)] = data
        view[end : end + 8] = seal.to_bytes(8, "little")
        return Source(RegionId(0), offset, len(data), Seal(seal))

    def start(
        self,
        read: int,
        source: Source,
        *,
        at: int = 0,
        session: SessionId = SESSION,
        digest: bytes | None = None,
    ) -> None:
        self.poller.read(ReadRequest(ReadId(read), session, self.pool.address + at, source, digest))

    def outcome(self, read: int) -> str | None:
        ended = [r for r in self.results if isinstance(r, ReadDone) and r.read == read]
        assert len(ended) <= 1
        return ended[0].outcome if ended else None

    async def end(self, read: int) -> str:
        await self.until(lambda: self.outcome(read) is not None)
        outcome = self.outcome(read)
        assert outcome is not None
        return outcome

    async def close(self) -> None:
        for point in ("payload", "seal", "open"):
            self.plane.release(point)
        assert await asyncio.to_thread(self.poller.stop)
        self.plane.close()
        self.owner.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(FaultyPlane(ShmPlane()))
    await made.open()
    yield made
    await made.close()


async def reached(event: threading.Event) -> None:
    await asyncio.to_thread(event.wait)


@pytest.mark.parametrize("nbytes", [0, 1, 63, MIB - 1, MIB, MIB + 1, 19_300_000, 154_300_000, 10_000_000_000])
def test_pieces_cover_a_read_once_and_in_order(nbytes: int) -> None:
    pieces = cut(nbytes)
    assert sum(size for _, size in pieces) == nbytes
    assert [at for at, _ in pieces] == [sum(size for _, size in pieces[:n]) for n in range(len(pieces))]
    assert all(0 < size <= poller_module.MAX_PIECE_NBYTES for _, size in pieces)
    assert len(pieces) == (0 if nbytes == 0 else 1 if nbytes < MIB else max(4, -(-nbytes // (64 * MIB))))


async def test_a_read_brings_the_bytes_and_its_measures(bench: Bench) -> None:
    source = bench.put(64, b"embedding")
    bench.start(1, source)
    assert await bench.end(1) == "ok"
    assert bytes(bench.pool.view[:10]) == b"embedding\0"
    done = next(r for r in bench.results if isinstance(r, ReadDone))
    assert done.nbytes == 9
    assert done.seconds > 0


async def test_an_empty_read_ends_well_even_without_a_peer(bench: Bench) -> None:
    bench.start(1, Source(RegionId(9), 0, 0, Seal(1)), session=SessionId(99))
    assert await bench.end(1) == "ok"


async def test_another_seal_is_never_ok(bench: Bench) -> None:
    source = bench.put(0, b"x" * 100, seal=SEAL - 1)
    bench.start(1, Source(source.region, source.offset, source.nbytes, Seal(SEAL)))
    assert await bench.end(1) == "seal_mismatch"


async def test_the_seal_is_asked_for_after_every_piece_has_ended(bench: Bench) -> None:
    """The source is reused while its payload is on the way: the seal that counts is the one after."""
    source = bench.put(0, b"a" * 2 * MIB)
    held = bench.plane.hold("payload")
    bench.start(1, source)
    await reached(held)
    bench.put(0, b"b" * 2 * MIB, seal=SEAL + 1)
    bench.plane.release("payload")
    assert await bench.end(1) == "seal_mismatch"


async def test_a_digest_that_differs_is_told(bench: Bench) -> None:
    source = bench.put(0, b"payload")
    bench.start(1, source, digest=xxhash.xxh3_128_digest(b"payload"))
    bench.start(2, source, at=64, digest=xxhash.xxh3_128_digest(b"Payload"))
    assert await bench.end(1) == "ok"
    assert await bench.end(2) == "digest_mismatch"


async def test_a_source_outside_of_the_peers_regions_is_refused(bench: Bench) -> None:
    bench.start(1, Source(RegionId(0), 4 * MIB, 64, Seal(SEAL)))
    bench.start(2, Source(RegionId(0), 0, 64, Seal(SEAL)), session=SessionId(99))
    assert await bench.end(1) == "refused"
    assert await bench.end(2) == "refused"


async def test_a_read_that_takes_a_while_is_announced_and_one_that_does_not_is_not(bench: Bench) -> None:
    source = bench.put(0, b"x" * 64)
    bench.start(1, source)
    assert await bench.end(1) == "ok"
    bench.plane.hold("payload")
    bench.start(2, source)
    await bench.until(lambda: ReadPosted(ReadId(2)) in bench.results)
    bench.plane.release("payload")
    assert await bench.end(2) == "ok"
    assert [r for r in bench.results if isinstance(r, ReadPosted)] == [ReadPosted(ReadId(2))]


async def test_an_abort_is_not_an_end_while_the_engine_may_write(bench: Bench) -> None:
    source = bench.put(0, b"late" * 16)
    held = bench.plane.hold("payload", survives_abort=True)
    bench.start(1, source)
    await reached(held)
    bench.poller.abort(ReadId(1))
    bench.poller.abort(ReadId(1))
    bench.start(2, Source(RegionId(0), 0, 0, Seal(1)))
    assert await bench.end(2) == "ok"  # the abort was handled by then
    assert bench.outcome(1) is None
    bench.plane.release("payload")
    assert await bench.end(1) == "aborted"
    assert bytes(bench.pool.view[:64]) == b"late" * 16  # that is why nobody may have had the slot


@pytest.mark.parametrize("point", ["payload", "seal"])
async def test_an_aborted_read_ends(bench: Bench, point: str) -> None:
    source = bench.put(0, b"x" * 2 * MIB)
    held = bench.plane.hold(point)  # type: ignore[arg-type]  # parametrized words are str
    bench.start(1, source)
    await reached(held)
    bench.poller.abort(ReadId(1))
    assert await bench.end(1) == "aborted"


async def test_pieces_that_wait_are_withdrawn_by_an_abort_and_never_written(bench: Bench) -> None:
    """More reads than may be posted: those that were not posted end at once."""
    posted: list[Piece] = []
    all_posted = threading.Event()

    def note(_: SessionId, piece: Piece) -> None:
        posted.append(piece)
        if len(posted) == poller_module.MAX_POSTED_PER_SESSION:
            all_posted.set()

    bench.plane._before_post = note
    bench.plane.hold("payload", survives_abort=True)
    source = bench.put(0, b"x" * 64)
    count = poller_module.MAX_POSTED_PER_SESSION + 3
    for read in range(count):
        bench.start(read, source, at=64 * read)
    await reached(all_posted)
    for read in range(count):
        bench.poller.abort(ReadId(read))
    for read in range(poller_module.MAX_POSTED_PER_SESSION, count):
        assert await bench.end(read) == "aborted"
    assert len(posted) == poller_module.MAX_POSTED_PER_SESSION
    bench.plane.release("payload")
    for read in range(poller_module.MAX_POSTED_PER_SESSION):
        assert await bench.end(read) == "aborted"
    assert len(posted) == poller_module.MAX_POSTED_PER_SESSION


async def test_a_peer_that_hangs_does_not_hold_up_another(bench: Bench) -> None:
    await bench.open(OTHER)
    source = bench.put(0, b"x" * 64)
    stuck: set[int] = set()

    def hang_one_session(session: SessionId, _: Piece) -> None:
        bench.plane.rates = Rates(hang=1.0 if session == SESSION else 0.0)
        stuck.add(session)

    bench.plane._before_post = hang_one_session
    for read in range(30):
        bench.start(read, source)
    for read in range(100, 130):
        bench.start(read, source, session=OTHER)
    for read in range(100, 130):
        assert await bench.end(read) == "ok"
    assert all(bench.outcome(read) is None for read in range(30))


async def test_a_small_read_does_not_wait_for_the_whole_of_a_large_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "MAX_PIECE_NBYTES", 64 * 1024)
    order: list[int] = []
    bench.plane._before_post = lambda _, piece: order.append(piece.nbytes)
    held = bench.plane.hold("payload")
    bench.start(1, bench.put(0, b"x" * 3 * MIB))
    bench.start(2, bench.put(3 * MIB + 64, b"y" * 64), at=4 * MIB)
    await reached(held)
    bench.plane.release("payload")
    assert await bench.end(2) == "ok"
    assert await bench.end(1) == "ok"
    assert len(order) == 48 + 1 + 2
    assert order.index(64) < 10


async def test_no_more_pieces_are_out_than_allowed(bench: Bench) -> None:
    out: set[int] = set()
    most = 0
    post, poll = bench.plane.post, bench.plane.poll

    def counted_post(session: SessionId, piece: Piece) -> object:
        nonlocal most
        answer = post(session, piece)
        if not isinstance(answer, ReadState):
            out.add(answer.ticket)
            most = max(most, len(out))
        return answer

    def counted_poll(ticket: int) -> ReadState:
        state = poll(ticket)
        if state is not ReadState.UNKNOWN:
            out.discard(ticket)
        return state

    bench.plane.post, bench.plane.poll = counted_post, counted_poll  # type: ignore[method-assign,assignment]
    bench.plane.rates = Rates(delay=1.0, max_delay_polls=3)
    source = bench.put(0, b"x" * MIB)
    for read in range(20):
        bench.start(read, source)
    assert [await bench.end(read) for read in range(20)] == ["ok"] * 20
    assert most == poller_module.MAX_POSTED_PER_SESSION


async def test_a_ticket_is_never_asked_about_after_its_end(bench: Bench) -> None:
    """On Mooncake that is a use after free; the faulty plane raises KeyError, and the poller dies."""
    bench.plane.rates = Rates(delay=0.7, max_delay_polls=4, fail=0.3)
    source = bench.put(0, b"x" * MIB)
    for read in range(100):
        bench.start(read, source)
    for read in range(100):
        assert await bench.end(read) in ("ok", "failed")
    assert not [r for r in bench.results if isinstance(r, PollerFailed)]


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_the_plane_does_a_read_that_is_ok_is_whole(bench: Bench, seed: int) -> None:
    plane = bench.plane
    plane._random.seed(seed)
    plane.rates = Rates(delay=0.5, max_delay_polls=5, fail=0.1, refuse=0.05, stale=0.3)
    payloads = {read: bytes([read]) * (1 << (read % 16)) * 3 for read in range(60)}
    sources = {read: bench.put(read * 65536, payload[:65000]) for read, payload in payloads.items()}
    for read, source in sources.items():
        bench.pool.view[read * 65536 : read * 65536 + source.nbytes] = b"\0" * source.nbytes
        bench.start(read, source, at=read * 65536)
    outcomes = {read: await bench.end(read) for read in sources}
    for read, outcome in outcomes.items():
        nbytes = sources[read].nbytes
        arrived = bytes(bench.pool.view[read * 65536 : read * 65536 + nbytes])
        assert outcome in ("ok", "failed", "refused", "seal_mismatch")
        if outcome == "ok":
            assert arrived == payloads[read][:65000]
    assert {"ok", "seal_mismatch"} <= set(outcomes.values())
    stale = sum(outcome == "seal_mismatch" for outcome in outcomes.values())
    assert plane.faults["stale"] == stale


@pytest.mark.parametrize("seed", range(5))
async def test_readers_of_one_source_are_torn_only_if_their_own_seal_tells(bench: Bench, seed: int) -> None:
    """A shared job has several: what the faulty plane spoils must never be a slot whose seal it left good."""
    plane = bench.plane
    plane._random.seed(seed)
    plane.rates = Rates(delay=0.5, max_delay_polls=20, fail=0.1, stale=0.5)
    sources = [bench.put(number * 4096, bytes([number + 1]) * 4000) for number in range(4)]
    wrong = 0
    for turn in range(30):
        for reader in range(8):
            bench.start(turn * 8 + reader, sources[(turn + reader) % 4], at=reader * 4096)
        for reader in range(8):
            if await bench.end(turn * 8 + reader) == "ok":
                found = bytes(bench.pool.view[reader * 4096 : reader * 4096 + 4000])
                wrong += found != bytes([(turn + reader) % 4 + 1]) * 4000
    assert wrong == 0


async def test_a_peer_closed_while_it_is_opened_is_closed_and_not_told(bench: Bench) -> None:
    held = bench.plane.hold("open")
    bench.poller.open_peer(OTHER, bench.owner.segment, bench.owner.export())
    await reached(held)
    bench.poller.close_peer(OTHER)
    bench.plane.release("open")
    await bench.open(SessionId(3))
    bench.start(1, bench.put(0, b"x" * 64), session=OTHER)
    assert await bench.end(1) == "refused"
    assert not [r for r in bench.results if isinstance(r, PeerOpened) and r.session == OTHER]


async def test_steps_are_told_in_the_loops_thread_and_replay(bench: Bench) -> None:
    source = bench.put(0, b"x" * 2 * MIB)
    bench.start(1, source)
    assert await bench.end(1) == "ok"
    state: reads.AnyState = reads.INITIAL
    for read, event, effects in bench.steps:
        assert read == 1
        state, again = reads.step(state, event, 0.0, reads.Limits())  # type: ignore[arg-type]  # any event
        assert again == effects
    assert state == reads.Ended("ok")


async def test_a_stop_ends_the_thread_and_every_read(bench: Bench) -> None:
    source = bench.put(0, b"x" * 2 * MIB)
    held = bench.plane.hold("payload")
    for read in range(5):
        bench.start(read, source)
    await reached(held)
    assert await asyncio.to_thread(bench.poller.stop)
    assert [await bench.end(read) for read in range(5)] == ["aborted"] * 5
    assert not [thread for thread in threading.enumerate() if thread.name == "epd-poller"]
    assert await asyncio.to_thread(bench.poller.stop)


async def test_a_stop_says_so_when_the_engine_may_still_write() -> None:
    bench = Bench(FaultyPlane(ShmPlane()))
    await bench.open()
    held = bench.plane.hold("payload", survives_abort=True)
    bench.start(1, bench.put(0, b"x" * 64))
    await reached(held)
    assert not await asyncio.to_thread(bench.poller.stop, 0.0)
    assert bench.outcome(1) is None
    bench.plane.close()
    bench.owner.close()


class BrokenPlane(FaultyPlane):
    def post(self, session: SessionId, piece: Piece) -> ReadState:
        raise RuntimeError("our own bug")


async def test_a_bug_in_the_thread_is_told_and_not_hidden() -> None:
    bench = Bench(BrokenPlane(ShmPlane()))
    await bench.open()
    bench.start(1, bench.put(0, b"x" * 64))
    await bench.until(lambda: PollerFailed("RuntimeError: our own bug") in bench.results)
    assert not await asyncio.to_thread(bench.poller.stop)
    bench.plane.close()
    bench.owner.close()


async def test_an_idle_poller_asks_nothing(bench: Bench) -> None:
    """It sleeps on its queue: no wake-up between two commands."""
    turns: list[None] = []
    take = bench.poller._take_commands

    def counted() -> None:
        turns.append(None)
        take()

    bench.poller._take_commands = counted  # type: ignore[method-assign]
    bench.start(1, bench.put(0, b"x" * 64))
    assert await bench.end(1) == "ok"
    bench.start(2, bench.put(0, b"x" * 64))
    assert await bench.end(2) == "ok"
    assert len(turns) <= 4


def test_the_faulty_plane_repeats_itself_with_its_seed() -> None:
    def run(seed: int) -> list[ReadState]:
        owner = ShmPlane()
        owner.allocate(1, MIB, exported=True)
        plane: DataPlane = FaultyPlane(ShmPlane(), seed=seed, rates=Rates(fail=0.3, refuse=0.2, stale=0.5))
        pool: Region = plane.allocate(1, MIB, exported=False)[0]
        assert plane.open_peer(SESSION, owner.segment, owner.export()) is ReadState.DONE
        ends = []
        for _ in range(50):
            answer = plane.post(SESSION, Piece(pool.address, 0, 0, 64))
            while not isinstance(answer, ReadState):
                state = plane.poll(answer.ticket)
                answer = state if state is not ReadState.UNKNOWN else answer
            ends.append(answer)
        plane.close()
        owner.close()
        return ends

    assert run(1) == run(1)
    assert run(1) != run(2)
