"""The simulated data plane: bytes land by themselves, late, in pieces, from whoever has the memory then."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from epd.dataplane.base import Piece, Posted, ReadState
from epd.memory.pool import Pool
from epd.protocol.ids import SessionId
from epd.sim.network import Network
from epd.sim.plane import Engines
from epd.sim.process import Process, Time
from epd.sim.watch import PoolWatch

SESSION = SessionId(1)
NBYTES = 65_536


class Bench:
    """A reader and its source, whose staging holds ones."""

    def __init__(self, *, one_sided: bool = False, seed: int = 1) -> None:
        self.time = Time()
        self.provoked: Counter[str] = Counter()
        self.written: list[tuple[int, int]] = []
        self.violations: list[str] = []
        rng = random.Random(seed)
        self.network = Network(self.time, rng, lambda what: self.provoked.update([what]))
        self.engines = Engines(self.network, rng, self._note, self.violations.append, one_sided=one_sided)
        self.reader, self.source = (
            Process(self.time, name, random.Random(seed), lambda *_: None) for name in ("reader", "source")
        )
        self.here, self.there = (
            self.engines.open(self.reader, "127.0.2.1"),
            self.engines.open(self.source, "127.0.1.1"),
        )
        (self.staging,) = self.there.allocate(1, NBYTES, exported=True)
        (self.pool,) = self.here.allocate(1, NBYTES, exported=False)
        self.staging.view[:] = b"\1" * NBYTES

    def _note(self, process: Process, address: int, nbytes: int) -> None:
        self.written.append((address, nbytes))

    def open(self) -> ReadState:
        return self.here.open_peer(SESSION, self.there.segment, self.there.export())

    def post(self, nbytes: int = NBYTES) -> int:
        answer = self.here.post(SESSION, Piece(self.pool.address, 0, 0, nbytes))
        assert isinstance(answer, Posted)
        return answer.ticket

    def run(self, seconds: float) -> None:
        self.time.run(self.time.now_s + seconds)

    def close(self) -> None:
        self.reader.kill()
        self.source.kill()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    assert bench.open() is ReadState.DONE
    yield bench
    bench.close()


def test_what_was_posted_lands_although_nobody_asks(bench: Bench) -> None:
    ticket = bench.post()
    assert bench.here.poll(ticket) is ReadState.UNKNOWN
    bench.run(1.0)
    assert bench.pool.view == b"\1" * NBYTES
    assert bench.here.poll(ticket) is ReadState.DONE


def test_a_piece_lands_in_halves_so_that_a_source_reused_meanwhile_is_torn(bench: Bench) -> None:
    ticket = bench.post()
    while not bench.written:
        bench.time.run(bench.time.now_s + 1e-6)
    bench.staging.view[:] = b"\2" * NBYTES
    bench.run(1.0)
    assert bench.here.poll(ticket) is ReadState.DONE
    assert bytes(bench.pool.view) == b"\1" * (NBYTES // 2) + b"\2" * (NBYTES // 2)


def test_a_dead_peer_fails_the_read(bench: Bench) -> None:
    ticket = bench.post()
    bench.source.kill()
    bench.run(1.0)
    assert bench.here.poll(ticket) is ReadState.FAILED
    assert not bench.written


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_stopped_peer_holds_the_read_up_unless_a_nic_reads(one_sided: bool) -> None:
    bench = Bench(one_sided=one_sided)
    bench.open()
    bench.source.stop()
    ticket = bench.post()
    bench.run(5.0)
    assert bench.here.poll(ticket) is (ReadState.DONE if one_sided else ReadState.UNKNOWN)
    bench.source.go_on()
    bench.run(1.0)
    assert bench.pool.view == b"\1" * NBYTES
    bench.close()


def test_a_parted_link_holds_the_read_up(bench: Bench) -> None:
    bench.network.part("127.0.1.1", "127.0.2.1", 3.0)
    ticket = bench.post()
    bench.run(2.9)
    assert bench.here.poll(ticket) is ReadState.UNKNOWN
    bench.run(1.0)
    assert bench.here.poll(ticket) is ReadState.DONE


def test_the_plane_can_stand_while_the_network_is_whole(bench: Bench) -> None:
    bench.engines.stall("127.0.2.1", "127.0.1.1", 3.0)
    ticket = bench.post()
    bench.run(2.9)
    assert bench.here.poll(ticket) is ReadState.UNKNOWN
    bench.engines.heal()
    bench.run(0.2)
    assert bench.here.poll(ticket) is ReadState.DONE


def test_a_read_into_a_place_where_another_still_writes_is_told(bench: Bench) -> None:
    first = bench.post(4_096)
    assert bench.violations == []
    bench.post(8)
    assert bench.violations == ["reader reads into a place where another read still writes"]
    bench.run(1.0)
    assert bench.here.poll(first) is ReadState.DONE
    bench.post(4_096)
    assert len(bench.violations) == 1


def test_an_aborted_read_may_write_until_it_has_failed_and_never_after() -> None:
    late = 0
    for seed in range(40):
        bench = Bench(seed=seed)
        bench.open()
        bench.network.part("127.0.1.1", "127.0.2.1", 2.0)
        ticket = bench.post()
        bench.run(0.1)
        while bench.here.poll(ticket) is ReadState.UNKNOWN:
            bench.here.abort(SESSION)
            assert bench.here.writes(bench.pool.address, 1)
            bench.run(0.05)
        late += bool(bench.written)
        bench.written.clear()
        bench.run(10.0)
        assert not bench.written
        assert not bench.here.writes(bench.pool.address, NBYTES)
        bench.close()
    assert 0 < late < 40


def test_what_is_not_ours_or_not_exported_is_refused(bench: Bench) -> None:
    outside = Piece(bench.pool.address, 0, 1, NBYTES)
    not_ours = Piece(bench.staging.address, 0, 0, NBYTES)
    assert bench.here.post(SESSION, outside) is ReadState.REFUSED
    assert bench.here.post(SESSION, not_ours) is ReadState.REFUSED
    assert bench.here.post(SessionId(2), Piece(bench.pool.address, 0, 0, 8)) is ReadState.REFUSED


def test_who_is_gone_or_says_something_else_cannot_be_opened(bench: Bench) -> None:
    exported = bench.there.export()
    assert bench.here.open_peer(SESSION, "sim:nobody", exported) is ReadState.FAILED
    assert bench.here.open_peer(SESSION, bench.here.segment, exported) is ReadState.FAILED
    bench.source.kill()
    assert bench.open() is ReadState.FAILED


def test_room_that_is_given_back_while_it_is_written_is_told(bench: Bench) -> None:
    pool, told = Pool([bench.pool]), list[str]()
    PoolWatch(pool, bench.here.writes, told.append, "reader")
    (extent,) = pool.take([4_096]) or ()
    assert pool.address(extent) == bench.pool.address
    bench.post(4_096)
    pool.give([extent])
    assert told == ["reader gave 4096 B back into which somebody still writes"]
    bench.run(1.0)
    (extent,) = pool.take([4_096]) or ()
    pool.give([extent])
    assert len(told) == 1


def test_what_is_announced_has_no_addresses_which_differ_from_run_to_run(bench: Bench) -> None:
    assert {region.base for region in bench.there.export()} == {0}
