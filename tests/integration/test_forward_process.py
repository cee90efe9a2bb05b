"""The forward worker as a real process: results, failures of one item, deaths on either side."""

import asyncio
import gc
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import forward_encoders
import pytest
import uvloop
import xxhash
from forward_node import MemfdRegion

from epd.data import photographs
from epd.encoders.base import MediaItem
from epd.encoders.media import probe_image
from epd.encoders.registry import load_encoder
from epd.forward.process import ForwardItem, ItemResult, ProcessWorker, backoff_s
from epd.protocol.errors import ConfigError
from epd.protocol.messages import DType, Probe

pytestmark = pytest.mark.slow  # processes are started

ECHO = f"callable:{forward_encoders.__name__}:ECHO"
GUARD_NBYTES = 256
HANG_S = 30.0
"""Only bounds a test that has failed already."""


class Ready(NamedTuple):
    pass


class Ended(NamedTuple):
    batch: int
    results: Sequence[ItemResult]


class Lost(NamedTuple):
    reason: str


class Died(NamedTuple):
    reason: str


class Node:
    """What a node holds of its worker: a loop, staging regions, and the events in order."""

    def __init__(
        self,
        encoder: str,
        *,
        num_threads: int = 1,
        batch_items: int = 1,
        region_nbytes: int = 1 << 16,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self.runner = asyncio.Runner(loop_factory=loop_factory)
        self.regions = [MemfdRegion(3, region_nbytes), MemfdRegion(5, region_nbytes)]
        self.worker = ProcessWorker(encoder, num_threads, batch_items)
        self.batch = 0
        self._events: asyncio.Queue[Ready | Ended | Died | Lost] = asyncio.Queue()
        self.runner.run(self._start())

    async def _start(self) -> None:
        self.worker.start(self.regions, self)

    def worker_ready(self) -> None:
        self._events.put_nowait(Ready())

    def batch_ended(self, batch: int, results: Sequence[ItemResult]) -> None:
        self._events.put_nowait(Ended(batch, results))

    def worker_lost(self, reason: str) -> None:
        self._events.put_nowait(Lost(reason))

    def worker_died(self, reason: str) -> None:
        self._events.put_nowait(Died(reason))

    def event(self) -> Ready | Ended | Died | Lost:
        async def get() -> Ready | Ended | Died | Lost:
            async with asyncio.timeout(HANG_S):
                return await self._events.get()

        return self.runner.run(get())

    def no_more_events(self) -> bool:
        self.runner.run(asyncio.sleep(0))
        return self._events.empty()

    def submit(self, items: Sequence[ForwardItem], *, digest: bool = False) -> int:
        self.batch += 1
        self.worker.submit(self.batch, items, digest=digest)
        return self.batch

    def encode(self, items: Sequence[ForwardItem], *, digest: bool = False) -> Sequence[ItemResult]:
        batch = self.submit(items, digest=digest)
        ended = self.event()
        assert isinstance(ended, Ended), ended
        assert ended.batch == batch
        return ended.results

    def payload(self, item: ForwardItem) -> bytes:
        (region,) = [region for region in self.regions if region.region == item.region]
        return bytes(region.view[item.offset : item.offset + item.spec.nbytes])

    def close(self) -> None:
        self.worker.stop()
        self.runner.close()
        for region in self.regions:
            region.close()


def echo_item(media: bytes, rows: int = 3, offset: int = 0, region: int = 3) -> ForwardItem:
    probe = Probe("image", width=rows)
    return ForwardItem(media, probe, "float32", forward_encoders.plan(probe, "float32"), region, offset)


def expected_payload(item: ForwardItem) -> bytes:
    return bytes(forward_encoders.expected(item.probe, bytes(item.media)).tobytes())


def held() -> tuple[set[str], int, set[str]]:
    """Descriptors, threads and children of this process."""
    gc.collect()
    fds = {f"{fd}" for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").exists()}
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return fds, threading.active_count(), set(children)


@pytest.fixture
def node() -> Iterator[Node]:
    """A node with a ready worker of its own; afterwards nothing of either is left."""
    before = held()
    node = Node(ECHO)
    assert node.event() == Ready()
    yield node
    node.close()
    assert held() == before


@pytest.fixture(scope="module")
def shared() -> Iterator[Node]:
    """A node whose worker these tests leave alive."""
    node = Node(ECHO)
    assert node.event() == Ready()
    yield node
    node.close()


@pytest.fixture(scope="module")
def vision() -> Iterator[Node]:
    """A node with the real tower, which takes seconds to load."""
    node = Node("builtin:qwen2-vl", region_nbytes=1 << 20)
    assert node.event() == Ready()
    yield node
    node.close()


# -- starting ------------------------------------------------------------------------------------


def test_a_worker_starts_where_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    node = Node(ECHO)
    try:
        assert node.event() == Ready()
    finally:
        node.close()


# -- results -------------------------------------------------------------------------------------


def test_results_lie_where_they_were_wanted_and_nothing_beside_them(shared: Node) -> None:
    for region in shared.regions:
        region.view[:] = b"\xaa" * region.nbytes
    items = [
        echo_item(b"one", offset=GUARD_NBYTES),
        echo_item(b"", rows=5, offset=4096),
        echo_item(b"three", offset=GUARD_NBYTES, region=5),
    ]
    results = shared.encode(items, digest=True)
    assert [result.error for result in results] == [None] * 3
    for item, result in zip(items, results, strict=True):
        assert shared.payload(item) == expected_payload(item)
        assert result.digest == xxhash.xxh3_128_digest(expected_payload(item))
    for region, nbytes in zip(shared.regions, (48 + 80, 48), strict=True):
        assert bytes(region.view).count(b"\xaa") == region.nbytes - nbytes


def test_no_digest_is_made_unless_it_is_asked_for(shared: Node) -> None:
    assert shared.encode([echo_item(b"x")]) == [ItemResult(None, None)]


@pytest.mark.parametrize(
    ("media", "code"),
    [(b"bad", "media_invalid"), (b"raise", "forward_failed"), (b"short", "media_mismatch")],
)
def test_a_bad_item_fails_alone(shared: Node, media: bytes, code: str) -> None:
    items = [echo_item(b"a"), echo_item(media, offset=512), echo_item(b"c", offset=1024)]
    for region in shared.regions:
        region.view[:] = bytes(region.nbytes)
    first, second, third = shared.encode(items)
    assert (first.error, third.error) == (None, None)
    assert second.error is not None
    assert second.error.code == code
    if media == b"raise":
        assert re.fullmatch(r"RuntimeError: as told \(forward_encoders\.py:\d+\)", second.error.message)
    assert shared.payload(items[1]) == bytes(items[1].spec.nbytes)
    assert [shared.payload(item) for item in (items[0], items[2])] == [
        expected_payload(item) for item in (items[0], items[2])
    ]


def test_a_batch_without_any_media_bytes_is_encoded(shared: Node) -> None:
    assert shared.encode([echo_item(b"")]) == [ItemResult(None, None)]


def test_what_a_model_prints_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    node = Node(ECHO)
    assert node.event() == Ready()
    assert node.encode([echo_item(b"print")]) == [ItemResult(None, None)]
    node.close()
    assert capfd.readouterr() == ("", "chatter of a model\n")


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_both_event_loops_see_results_death_and_restart(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    loop_factory().close()  # uvloop keeps two descriptors of its own from its first loop on
    before = held()
    node = Node(ECHO, loop_factory=loop_factory)
    assert node.event() == Ready()
    assert node.encode([echo_item(b"x")]) == [ItemResult(None, None)]
    node.worker.kill()
    assert node.event() == Died("killed by SIGKILL (9)")
    assert node.event() == Ready()
    assert node.encode([echo_item(b"x")]) == [ItemResult(None, None)]
    node.close()
    assert held() == before


# -- what the process is -------------------------------------------------------------------------


def test_the_worker_is_nice_and_holds_only_what_it_was_given(node: Node) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)  # what another library may have left open
    node.worker.kill()
    assert isinstance(node.event(), Died)
    assert node.event() == Ready()
    pid = node.worker.pid
    assert pid is not None
    links = {fd: os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    os.close(reading)
    os.close(writing)
    assert links.pop("0") == "/dev/null"
    assert links.pop("1") == links.pop("2")
    kinds = sorted(target.split(":")[0].split("[")[0] for target in links.values())
    assert kinds == ["/memfd", "/memfd", "anon_inode", "socket"], links
    assert os.getpriority(os.PRIO_PROCESS, pid) >= 10


def test_media_do_not_stay_open_in_either_process(node: Node) -> None:
    def descriptors() -> tuple[int, int]:
        return len(os.listdir(f"/proc/{node.worker.pid}/fd")), len(os.listdir("/proc/self/fd"))

    assert node.encode([echo_item(b"first")]) == [ItemResult(None, None)]
    before = descriptors()
    for media in (b"x", b"bad", b"raise", b"", b"short"):
        node.encode([echo_item(media)])
    assert descriptors() == before


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_group_leave_the_worker_to_its_node(node: Node, ignored: signal.Signals) -> None:
    assert node.worker.pid is not None
    os.kill(node.worker.pid, ignored)
    assert node.encode([echo_item(b"x")]) == [ItemResult(None, None)]


def test_the_number_of_threads_is_set_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    node = Node(f"callable:{forward_encoders.__name__}:THREADS", num_threads=3)
    assert node.event() == Ready()
    probe = Probe("image", width=1)
    item = ForwardItem(b"", probe, "bfloat16", forward_encoders.plan(probe, "bfloat16"), 3, 0)
    assert node.encode([item]) == [ItemResult(None, None)]
    payload = node.payload(item)
    node.close()
    three = 0x4040  # 3.0 in bfloat16
    assert payload == three.to_bytes(2, "little") * forward_encoders.DIM


# -- deaths --------------------------------------------------------------------------------------


def wait_for_hang(node: Node, fifo: Path) -> None:
    """Until the item that hangs is running."""
    fd = os.open(fifo, os.O_RDWR)
    assert node.submit([echo_item(b"hang:" + os.fsencode(fifo))])
    assert os.read(fd, 1) == b"!"
    os.close(fd)


def wait_until_readable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(HANG_S * 1000), "nothing happened"


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_a_worker_killed_in_a_forward_is_reported_and_replaced(node: Node, fifo: Path) -> None:
    wait_for_hang(node, fifo)
    first = node.worker.pid
    node.worker.kill()
    assert node.event() == Died("killed by SIGKILL (9)")
    assert node.worker.pid is None
    assert node.event() == Ready()
    assert node.worker.pid not in (None, first)
    item = echo_item(b"after")
    assert node.encode([item]) == [ItemResult(None, None)]
    assert node.payload(item) == expected_payload(item)


def test_a_worker_killed_from_outside_is_gone_when_its_death_is_reported(node: Node) -> None:
    pid = node.worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert node.event() == Died("killed by SIGKILL (9)")
    with pytest.raises(ProcessLookupError):  # waited for, not only dead
        os.kill(pid, 0)
    assert node.event() == Ready()


def test_a_crash_in_a_forward_fails_the_batch_not_the_node(node: Node) -> None:
    node.submit([echo_item(b"die")])
    assert node.event() == Died("ended with status 7")
    assert node.event() == Ready()
    assert node.encode([echo_item(b"x")]) == [ItemResult(None, None)]


def test_a_batch_that_ended_before_the_death_has_ended(node: Node) -> None:
    running = node.worker._running
    assert running is not None
    batch = node.submit([echo_item(b"x")])
    wait_until_readable(running.channel.fileno())  # the answer is there, the node has not read it
    os.kill(running.process.pid, signal.SIGKILL)
    wait_until_readable(running.pidfd)
    assert node.event() == Ended(batch, [ItemResult(None, None)])
    assert node.event() == Died("killed by SIGKILL (9)")


def test_a_batch_submitted_to_a_worker_that_has_just_died_is_answered_by_its_death(node: Node) -> None:
    running = node.worker._running
    assert running is not None
    os.kill(running.process.pid, signal.SIGKILL)
    wait_until_readable(running.pidfd)  # the node has not yet been told
    node.submit([echo_item(b"x")])
    assert node.event() == Died("killed by SIGKILL (9)")
    node.submit([echo_item(b"x")])  # nor may this one, of a caller that reads its mail later, be lost
    assert node.event() == Ready()
    assert node.encode([echo_item(b"x")]) == [ItemResult(None, None)]


def test_a_second_batch_is_refused_while_one_runs(node: Node, fifo: Path) -> None:
    wait_for_hang(node, fifo)
    with pytest.raises(RuntimeError, match="batch 2 submitted while 1 runs"):
        node.submit([echo_item(b"x")])


def test_an_encoder_that_cannot_be_loaded_at_start_says_why_and_ends_the_node() -> None:
    before = held()
    node = Node(f"callable:{forward_encoders.__name__}:UNLOADABLE")
    lost = node.event()
    assert isinstance(lost, Lost)
    assert "UNLOADABLE cannot be loaded: RuntimeError: no such weights" in lost.reason
    node.close()
    assert held() == before


def test_a_process_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = held()
    node = Node(ECHO)
    died = node.event()
    assert isinstance(died, Died)
    assert died.reason.startswith("cannot be started: ")
    node.close()
    assert held() == before


def test_no_memory_for_the_media_fails_the_batch_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memfd(name: str, flags: int) -> int:
        raise OSError(28, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", no_memfd)
        (result,) = node.encode([echo_item(b"x")])
    assert result.error is not None
    assert (result.error.code, result.error.retryable) == ("forward_failed", True)
    assert node.encode([echo_item(b"x")]) == [ItemResult(None, None)]


def test_the_backoff_doubles_up_to_its_end() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 6, 7, 1000)] == [0.1, 0.2, 0.4, 3.2, 5.0, 5.0]


def test_stop_ends_a_busy_worker_and_may_be_repeated(node: Node, fifo: Path) -> None:
    wait_for_hang(node, fifo)
    pid = node.worker.pid
    assert pid is not None
    node.worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    node.worker.stop()
    node.worker.kill()
    assert node.worker.pid is None
    assert node.no_more_events()


def test_stop_while_a_restart_is_due_starts_nothing(node: Node) -> None:
    node.worker.kill()
    assert isinstance(node.event(), Died)
    node.worker.stop()
    assert node.worker._restart is None
    assert node.worker.pid is None


def test_a_worker_in_a_tight_loop_dies_with_its_node(fifo: Path) -> None:
    told = os.open(fifo, os.O_RDWR)
    program = Path(__file__).with_name("forward_node.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with subprocess.Popen(
        [sys.executable, program, ECHO, fifo], stdout=subprocess.PIPE, env=env
    ) as node_process:
        assert node_process.stdout is not None
        worker_pidfd = os.pidfd_open(int(node_process.stdout.readline()))
        assert os.read(told, 1) == b"!"  # its forward runs
        node_process.kill()
        node_process.wait()
        wait_until_readable(worker_pidfd)
    os.close(worker_pidfd)
    os.close(told)


def test_a_region_without_a_memfd_is_refused(shared: Node) -> None:
    region = MemfdRegion(0, 4096)
    fd, region.fd = region.fd, None

    async def start() -> None:
        ProcessWorker(ECHO, 1).start([region], shared)

    with pytest.raises(ConfigError, match="staging region 0 has no memfd"):
        asyncio.run(start())
    region.fd = fd
    region.close()


@pytest.mark.parametrize(("num_threads", "batch_items"), [(0, 1), (1, 0)])
def test_numbers_below_one_are_refused(num_threads: int, batch_items: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ProcessWorker(ECHO, num_threads, batch_items)


# -- the real tower ------------------------------------------------------------------------------


def photograph_items(paths: Sequence[Path], dtype: DType) -> list[ForwardItem]:
    encoder = load_encoder("builtin:qwen2-vl")
    items = []
    offset = 0
    for path in paths:
        data = path.read_bytes()
        probe = probe_image(data, path.name)
        spec = encoder.plan(probe, dtype)
        items.append(ForwardItem(memoryview(data), probe, dtype, spec, 3, offset))
        offset += -(-spec.nbytes // GUARD_NBYTES) * GUARD_NBYTES
    return items


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_photographs_come_out_bit_equal_to_a_local_encode(vision: Node, dtype: DType) -> None:
    import torch

    local = load_encoder("builtin:qwen2-vl")
    local.load(1, "cpu")
    items = photograph_items(photographs()[:4], dtype)
    results = vision.encode(items, digest=True)
    for item, result in zip(items, results, strict=True):
        media = MediaItem(item.probe, memoryview(item.media), dtype)
        (rows,) = local.forward([local.preprocess(media)])
        payload = rows.contiguous().view(torch.uint8).numpy().tobytes()
        assert result == ItemResult(None, xxhash.xxh3_128_digest(payload))
        assert vision.payload(item) == payload


def test_damaged_media_fail_alone(vision: Node) -> None:
    good, cut, empty, text, other = photograph_items(photographs()[:1] * 5, "float32")
    other_size = Probe("image", width=other.probe.width + 28, height=other.probe.height)
    results = vision.encode(
        [
            cut._replace(media=cut.media[: len(cut.media) // 2]),
            empty._replace(media=b""),
            text._replace(media=b"no picture at all"),
            other._replace(probe=other_size),
            good,
        ]
    )
    codes = [result.error.code if result.error else None for result in results]
    assert codes == ["media_invalid", "media_invalid", "media_invalid", "media_mismatch", None]
