"""Both data planes between real processes: whole bytes, or a terminal word; nothing else."""

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from plane_source import pattern
from planes import SESSION, Reader, SourceProcess, end_of, held, piece, seal_offset, source_of

from epd.dataplane import handover, shm
from epd.dataplane.base import DataPlane, Piece, Posted, ReadState
from epd.dataplane.faulty import FaultyPlane
from epd.dataplane.mooncake import MooncakePlane
from epd.dataplane.mooncake_wire import shut_connections
from epd.dataplane.poller import PeerOpened, ReadPosted
from epd.dataplane.select import Choice, open_plane
from epd.memory.region import Region
from epd.protocol.errors import DataPlaneError
from epd.protocol.ids import RegionId, SessionId
from epd.protocol.messages import RegionDescriptor

MIB = 1024 * 1024
REGION_NBYTES = 32 * MIB
LARGE_NBYTES = 256 * MIB
"""Long enough on any machine that a stop, sent after its posting, comes in mid-read."""
SEAL = 0x1122334455667788
PLANES: list[Choice] = ["shm", "mooncake"]


@pytest.fixture(params=PLANES)
def choice(request: pytest.FixtureRequest) -> Choice:
    chosen: Choice = request.param
    return chosen


@pytest.fixture
def plane(choice: Choice) -> Iterator[DataPlane]:
    plane = open_plane(choice, "127.0.0.1")
    yield plane
    plane.close()


@pytest.fixture
def mooncake() -> Iterator[DataPlane]:
    plane = open_plane("mooncake", "127.0.0.1")
    yield plane
    plane.close()


@pytest.fixture
def source(choice: Choice) -> Iterator[SourceProcess]:
    with SourceProcess(choice, 2, REGION_NBYTES) as process:
        yield process


def receive(plane: DataPlane, nbytes: int = REGION_NBYTES) -> Region:
    return plane.allocate(1, nbytes, exported=False)[0]


def test_the_plane_names_the_transport_really_in_use(choice: Choice, source: SourceProcess) -> None:
    assert source.name == {"shm": "shm", "mooncake": "mooncake/tcp"}[choice]


@pytest.mark.slow
@pytest.mark.slow
def test_an_engine_that_cannot_start_is_an_error_of_the_plane() -> None:
    """Wherever in its start the engine runs out of files: a code, an exception of its C++, or no answer."""
    script = Path(__file__).with_name("plane_short_of_files.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["1"].startswith("mooncake: the engine does not start on 127.0.0.1: ")
    assert any("Too many open files" in message for message in said.values())


async def test_every_size_arrives_byte_for_byte_and_nothing_beside_it(
    plane: DataPlane, source: SourceProcess
) -> None:
    to = receive(plane)
    reader = Reader(plane)
    assert (await reader.open(source)).ok
    at = 0
    for nbytes in (0, 1, 63, 64 * 1024, MIB, MIB + 1, 20_000_000):
        offset = at + 256
        at = seal_offset(offset, nbytes) + 8
        expected = pattern(1, REGION_NBYTES)[offset : offset + nbytes]
        source.write(1, seal_offset(offset, nbytes), SEAL.to_bytes(8, "little"))
        to.view[:] = b"\xee" * REGION_NBYTES
        digest = hashlib.sha256(expected).digest()
        assert await reader.read(to, 512, source_of(1, offset, nbytes, SEAL)) == "ok"
        assert hashlib.sha256(to.view[512 : 512 + nbytes]).digest() == digest
        assert to.view[:512] == b"\xee" * 512
        assert to.view[512 + nbytes : 1024 + nbytes] == b"\xee" * 512
    assert await asyncio.to_thread(reader.poller.stop)


async def test_a_source_reused_before_the_read_had_ended_is_never_reported_ok(
    choice: Choice, plane: DataPlane, source: SourceProcess
) -> None:
    """The encoder changes the seal and reuses the slot after the payload was read, before the seal."""
    nbytes, offset = 1 * MIB, 4096
    pieces: list[Piece] = []

    def reuse(_: SessionId, wanted: Piece) -> None:
        if wanted.nbytes == 8:
            # Whatever is read at the seal's place now, every piece had ended before it was asked for.
            assert len(pieces) == 4
            source.write(0, seal_offset(offset, nbytes), (SEAL + 1).to_bytes(8, "little"))
            source.write(0, offset, b"somebody else's bytes")
        pieces.append(wanted)

    to = receive(plane)
    reader = Reader(FaultyPlane(plane, before_post=reuse))
    assert (await reader.open(source)).ok
    source.write(0, seal_offset(offset, nbytes), SEAL.to_bytes(8, "little"))
    done = await reader.done(reader.start(to, 0, source_of(0, offset, nbytes, SEAL)))
    assert (done.outcome, done.nbytes) == ("seal_mismatch", 0)
    pieces.clear()
    assert await reader.read(to, 0, source_of(0, offset, nbytes, SEAL + 1)) == "ok"
    assert await asyncio.to_thread(reader.poller.stop)


@pytest.mark.parametrize(
    ("region", "offset", "nbytes"),
    [(0, REGION_NBYTES - 8, 9), (0, REGION_NBYTES, 1), (2, 0, 1), (0, -1, 8)],
    ids=["past the end", "behind the end", "unknown region", "before the start"],
)
def test_pieces_outside_of_what_was_announced_are_refused(
    plane: DataPlane, source: SourceProcess, region: int, offset: int, nbytes: int
) -> None:
    to = receive(plane)
    assert plane.open_peer(SESSION, source.segment, source.regions) is ReadState.DONE
    assert plane.post(SESSION, Piece(to.address, region, offset, nbytes)) is ReadState.REFUSED
    assert plane.post(SessionId(8), piece(to, 0, 0, 8)) is ReadState.REFUSED
    elsewhere = ctypes.create_string_buffer(8)
    assert plane.post(SESSION, Piece(ctypes.addressof(elsewhere), 0, 0, 8)) is ReadState.REFUSED
    assert plane.post(SESSION, Piece(to.address + to.nbytes - 4, 0, 0, 8)) is ReadState.REFUSED
    assert end_of(plane, SESSION, piece(to, 0, REGION_NBYTES - 8, 8)) is ReadState.DONE
    plane.close_peer(SESSION)
    assert plane.post(SESSION, piece(to, 0, 0, 8)) is ReadState.REFUSED


async def test_a_peer_that_does_not_export_what_it_announced_is_not_opened(
    plane: DataPlane, source: SourceProcess
) -> None:
    reader = Reader(plane)
    first = source.regions[0]
    for session, regions in enumerate(
        (
            [RegionDescriptor(first.region, first.base, first.nbytes + 4096)],
            [RegionDescriptor(RegionId(9), first.base + (1 << 40), first.nbytes)],
        )
    ):
        reader.poller.open_peer(SessionId(session), source.segment, regions)
        assert not (await reader.result(PeerOpened, session)).ok
    assert await asyncio.to_thread(reader.poller.stop)


@pytest.mark.parametrize("segment", ["@epd-nobody", "127.0.0.1:1", "", "nonsense", "127.0.0.1:99999"])
def test_a_peer_that_is_not_there_is_not_opened(plane: DataPlane, segment: str) -> None:
    assert plane.open_peer(SESSION, segment, []) is ReadState.FAILED


async def test_registrations_stay_as_they_are_over_a_thousand_reads(
    choice: Choice, plane: DataPlane, source: SourceProcess
) -> None:
    plane.allocate(2, MIB, exported=True)
    to = receive(plane, MIB)
    reader = Reader(plane)
    assert (await reader.open(source)).ok
    source.write(0, 64, SEAL.to_bytes(8, "little"))
    before = plane.registrations()
    assert before == {"shm": 0, "mooncake": 2}[choice]  # the staging regions; what receives is not
    started = [reader.start(to, 64 * at, source_of(0, 0, 64, SEAL)) for at in range(1000)]
    assert {(await reader.done(read)).outcome for read in started} == {"ok"}
    assert plane.registrations() == before
    assert await asyncio.to_thread(reader.poller.stop)


@pytest.mark.slow
async def test_a_closed_plane_leaves_nothing_behind(choice: Choice, source: SourceProcess) -> None:
    async def one_life() -> None:
        plane = open_plane(choice, "127.0.0.1")
        plane.allocate(3, MIB, exported=True)
        to = receive(plane, MIB)
        reader = Reader(plane)
        assert (await reader.open(source)).ok
        source.write(0, 64, SEAL.to_bytes(8, "little"))
        assert await reader.read(to, 0, source_of(0, 0, 64, SEAL)) == "ok"
        assert await asyncio.to_thread(reader.poller.stop)
        await asyncio.to_thread(plane.close)
        plane.close()
        with pytest.raises(DataPlaneError):
            _ = to.view

    await one_life()  # what Python, the loop and the engine's library keep for ever is there now
    before = held()
    await one_life()
    assert held() == before


def test_a_view_that_a_consumer_still_holds_survives_the_plane(choice: Choice) -> None:
    plane = open_plane(choice, "127.0.0.1")
    view = receive(plane, MIB).view
    view[:4] = b"mine"
    plane.close()
    assert bytes(view[:4]) == b"mine"


# -- nothing is writable from outside --------------------------------------------------------


@pytest.mark.slow
async def test_a_stranger_can_write_neither_what_is_exported_nor_what_receives(mooncake: DataPlane) -> None:
    """The engine takes anybody's writes into what is registered: we register nothing writable."""
    from mooncake.engine import TransferEngine

    staging = mooncake.allocate(1, MIB, exported=True)[0]
    pool = receive(mooncake, MIB)
    staging.view[:] = pattern(0, MIB)
    pool.view[:] = pattern(1, MIB)
    stranger = TransferEngine()
    assert stranger.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    evil = ctypes.create_string_buffer(b"\xff" * 4096, 4096)
    source = ctypes.addressof(evil)
    exported = mooncake.export()[0].base
    for target in (exported, staging.address, pool.address):
        code = await asyncio.to_thread(stranger.transfer_sync_write, mooncake.segment, source, target, 4096)
        assert code != 0
    assert bytes(staging.view) == pattern(0, MIB)
    assert bytes(pool.view) == pattern(1, MIB)
    # The node is unharmed: its next reads, by the stranger as well, are good.
    assert await asyncio.to_thread(stranger.transfer_sync_read, mooncake.segment, source, exported, 4096) == 0
    assert evil.raw == pattern(0, 4096)
    with SourceProcess("mooncake", 1, MIB) as other:
        assert mooncake.open_peer(SESSION, other.segment, other.regions) is ReadState.DONE
        assert end_of(mooncake, SESSION, piece(pool, 0, 0, 4096)) is ReadState.DONE
    await asyncio.to_thread(dropped, [stranger])


def dropped(engines: list[object]) -> None:
    engines.clear()


def test_an_shm_reader_can_neither_shrink_what_it_was_given_nor_is_it_given_more_rights() -> None:
    plane = shm.ShmPlane()
    region = plane.allocate(1, MIB, exported=True)[0]
    received: dict[int, tuple[int, int]] = {}
    handover._receive(plane.segment, received)
    fd, nbytes = received[0]
    assert nbytes == MIB
    assert not os.get_inheritable(fd)
    assert region.fd is not None
    for size in (0, MIB // 2, 2 * MIB):
        with pytest.raises(OSError, match="Invalid argument"):  # not open for writing
            os.ftruncate(fd, size)
        with pytest.raises(PermissionError):  # sealed: the worker has this one
            os.ftruncate(region.fd, size)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, MIB, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)
    plane.close()


def test_our_mapping_of_a_peer_is_read_only() -> None:
    plane, peer = shm.ShmPlane(), shm.ShmPlane()
    peer.allocate(1, MIB, exported=True)
    assert plane.open_peer(SESSION, peer.segment, peer.export()) is ReadState.DONE
    (mapping,) = plane._mappings[SESSION]
    with open("/proc/self/maps") as maps:
        rights = [line.split()[1] for line in maps if line.startswith(f"{mapping.address:x}-")]
    assert rights == ["r--s"]
    plane.close()
    peer.close()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW], ids=["no seals", "may shrink"])
def test_an_shm_peer_whose_memory_may_shrink_is_not_opened(seals: int) -> None:
    """Shrinking it under the copy would be SIGBUS for the reader."""
    plane, peer = shm.ShmPlane(), shm.ShmPlane()
    (region,) = peer.allocate(1, MIB, exported=True)
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    os.dup2(fd, region.fd or -1, inheritable=False)
    os.close(fd)
    assert plane.open_peer(SESSION, peer.segment, peer.export()) is ReadState.FAILED
    plane.close()
    peer.close()


def test_shm_descriptors_are_not_given_to_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = shm.ShmPlane()
    peer.allocate(1, MIB, exported=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect("\0" + peer.segment[1:])
        assert stranger.recv(100) == b""
    peer.close()


def own_sockets() -> set[str]:
    """Of this process, in whatever state: one that was shut down is still a descriptor."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry))
    return {link for link in found if link.startswith("socket:")}


@pytest.mark.slow
async def test_nothing_is_left_of_the_connections_to_peers_that_have_gone(mooncake: DataPlane) -> None:
    """The engine keeps them, four to each incarnation that ever was."""
    before = own_sockets()
    reader = Reader(mooncake)
    to = receive(mooncake, 4 * MIB)
    for session in range(1, 4):
        with SourceProcess("mooncake", 1, 4 * MIB + 4096) as source:
            assert (await reader.open(source, SessionId(session))).ok
            source.write(0, 4 * MIB, SEAL.to_bytes(8, "little"))
            assert await reader.read(to, 0, source_of(0, 0, 4 * MIB, SEAL), SessionId(session)) == "ok"
            assert len(own_sockets() - before) > 0
            source.kill()
        reader.poller.close_peer(SessionId(session))
    assert await asyncio.to_thread(reader.poller.stop)
    assert isinstance(mooncake, MooncakePlane)
    for flusher in list(mooncake._flushers):
        flusher.join(10)
    assert own_sockets() - before == set()


# -- stopped and killed sources --------------------------------------------------------------


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many connections each abort has found: a stopped source's read would else end as well,
    after a minute, by the engine's own limit."""
    counts: list[int] = []

    def counted(host: str, port: int) -> set[str]:
        shut = shut_connections(host, port)
        counts.append(len(shut))
        return shut

    monkeypatch.setattr("epd.dataplane.mooncake.shut_connections", counted)
    return counts


@pytest.mark.slow
async def test_a_read_from_a_stopped_source_stays_unknown_until_it_is_aborted(
    mooncake: DataPlane, shut: list[int]
) -> None:
    with SourceProcess("mooncake", 1, LARGE_NBYTES + 4096) as source:
        to = receive(mooncake, LARGE_NBYTES)
        reader = Reader(mooncake)
        assert (await reader.open(source)).ok
        source.write(0, LARGE_NBYTES, SEAL.to_bytes(8, "little"))
        read = reader.start(to, 0, source_of(0, 0, LARGE_NBYTES, SEAL))
        await reader.result(ReadPosted, read)
        source.stop()
        reader.poller.abort(read)
        assert (await reader.done(read)).outcome == "aborted"
        assert shut[0] > 0
        received = hashlib.sha256(to.view).digest()
        source.go_on()
        # It serves others again, so whatever it still had for us, it has sent.
        assert source.digest(0)
        assert hashlib.sha256(to.view).digest() == received
        outcomes = [await reader.read(to, 0, source_of(0, 0, LARGE_NBYTES, SEAL)) for _ in range(3)]
        assert outcomes[-1] == "ok"  # connections that were shut may fail once each
        assert bytes(to.view[-4096:]) == pattern(0, LARGE_NBYTES + 4096)[-8192:-4096]
        assert await asyncio.to_thread(reader.poller.stop)


@pytest.mark.slow
def test_the_plane_itself_says_unknown_of_a_stopped_source(mooncake: DataPlane, shut: list[int]) -> None:
    with SourceProcess("mooncake", 1, MIB) as source:
        to = receive(mooncake, MIB)
        assert mooncake.open_peer(SESSION, source.segment, source.regions) is ReadState.DONE
        source.stop()
        posted = mooncake.post(SESSION, piece(to, 0, 0, MIB))
        assert isinstance(posted, Posted)
        for _ in range(1000):
            assert mooncake.poll(posted.ticket) is ReadState.UNKNOWN
        mooncake.close_peer(SESSION)  # the session is over; its read is not, and can be aborted
        mooncake.abort(SESSION)
        assert shut[0] > 0
        while (state := mooncake.poll(posted.ticket)) is ReadState.UNKNOWN:
            pass
        assert state is ReadState.FAILED
        source.go_on()
        again = SessionId(9)
        assert mooncake.open_peer(again, source.segment, source.regions) is ReadState.DONE
        ends = [end_of(mooncake, again, piece(to, 0, 0, MIB)) for _ in range(2)]
        assert ends[-1] is ReadState.DONE


@pytest.mark.slow
async def test_a_stopped_source_delays_nobody_else(mooncake: DataPlane, shut: list[int]) -> None:
    with SourceProcess("mooncake", 1, MIB) as stuck, SourceProcess("mooncake", 1, MIB) as well:
        to = receive(mooncake, MIB)
        reader = Reader(mooncake)
        other = SessionId(8)
        assert (await reader.open(stuck)).ok
        assert (await reader.open(well, other)).ok
        well.write(0, 64, SEAL.to_bytes(8, "little"))
        stuck.stop()
        hanging = [reader.start(to, 0, source_of(0, 0, 4096, SEAL)) for _ in range(20)]
        for _ in range(20):
            assert await reader.read(to, 4096, source_of(0, 0, 64, SEAL), other) == "ok"
        for read in hanging:
            reader.poller.abort(read)
        await reader.done(hanging[0])
        assert shut[0] > 0
        assert {(await reader.done(read)).outcome for read in hanging} == {"aborted"}
        assert await reader.read(to, 4096, source_of(0, 0, 64, SEAL), other) == "ok"
        assert await asyncio.to_thread(reader.poller.stop)


async def test_a_stopped_source_is_not_opened_and_delays_nobody_else(
    choice: Choice, plane: DataPlane, source: SourceProcess
) -> None:
    to = receive(plane, MIB)
    reader = Reader(plane)
    assert (await reader.open(source)).ok
    source.write(0, 64, SEAL.to_bytes(8, "little"))
    with SourceProcess(choice, 1, MIB) as stuck:
        stuck.stop()
        reader.poller.open_peer(SessionId(8), stuck.segment, stuck.regions)
        for _ in range(5):
            assert await reader.read(to, 0, source_of(0, 0, 64, SEAL)) == "ok"
        assert not [r for r in reader.results if isinstance(r, PeerOpened) and r.session == 8]
        stuck.kill()  # or else the answer comes after the time that a peer is given
        opened = await reader.result(PeerOpened, 8)
        assert not opened.ok
        assert stuck.segment in opened.reason
    assert await asyncio.to_thread(reader.poller.stop)


@pytest.mark.slow
async def test_a_read_from_a_killed_source_ends_by_itself(choice: Choice, plane: DataPlane) -> None:
    with SourceProcess(choice, 1, LARGE_NBYTES + 4096) as source:
        to = receive(plane, LARGE_NBYTES)
        reader = Reader(plane)
        assert (await reader.open(source)).ok
        source.write(0, LARGE_NBYTES, SEAL.to_bytes(8, "little"))
        read = reader.start(to, 0, source_of(0, 0, LARGE_NBYTES, SEAL))
        source.kill()
        outcome = (await reader.done(read)).outcome
        # Over shm the memory outlives its owner as long as we map it: whole bytes, no fault.
        assert outcome == "ok" if choice == "shm" else outcome in ("ok", "failed")
        received = hashlib.sha256(to.view).digest()
        reader.poller.open_peer(SessionId(8), source.segment, source.regions)
        assert not (await reader.result(PeerOpened, 8)).ok
        if choice == "mooncake":
            assert await reader.read(to, 0, source_of(0, 0, 64, SEAL)) == "failed"
            # The engine has said so, and nothing was written since.
            assert hashlib.sha256(to.view).digest() == received
        assert await asyncio.to_thread(reader.poller.stop)


async def test_stopping_the_poller_ends_the_reads_it_has(mooncake: DataPlane) -> None:
    with SourceProcess("mooncake", 1, MIB) as source:
        to = receive(mooncake, MIB)
        reader = Reader(mooncake)
        assert (await reader.open(source)).ok
        source.stop()
        read = reader.start(to, 0, source_of(0, 0, 4096, SEAL))
        assert await asyncio.to_thread(reader.poller.stop)
        assert (await reader.done(read)).outcome == "aborted"


class Front:
    """Stands at a fixed address before one engine's RPC port, and later before another's."""

    def __init__(self) -> None:
        self.target = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.segment = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # shut down: the end
            while True:
                asking, _ = self._listener.accept()
                host, _, port = self.target.rpartition(":")
                with asking, socket.create_connection((host, int(port))) as engine:
                    (nbytes,) = struct.unpack("<Q", head := asking.recv(8, socket.MSG_WAITALL))
                    engine.sendall(head + asking.recv(nbytes, socket.MSG_WAITALL))
                    answer = bytearray()
                    while some := engine.recv(65536):
                        answer += some
                    asking.sendall(answer)
                    asking.shutdown(socket.SHUT_WR)
                    asking.recv(1)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    yield front
    front.close()


@pytest.mark.slow
def test_another_process_behind_the_same_address_is_read_afresh(mooncake: DataPlane, front: Front) -> None:
    """The engine keeps a segment's descriptor for ever, and with it the port of its former owner."""
    to = receive(mooncake, MIB)
    for session in range(3):
        with SourceProcess("mooncake", 1, MIB) as source:
            front.target = source.segment
            source.write(0, 0, bytes([session]) * 64)
            opened = mooncake.open_peer(SessionId(session), front.segment, source.regions)
            assert opened is ReadState.DONE
            assert end_of(mooncake, SessionId(session), piece(to, 0, 0, 64)) is ReadState.DONE
            assert bytes(to.view[:64]) == bytes([session]) * 64
