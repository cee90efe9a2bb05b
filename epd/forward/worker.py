"""The forward worker's process: `python -m epd.forward.worker SOCKET_FD NODE_PIDFD`.

Started by `epd.forward.process` only. It writes results into the node's staging memory, so it must
never outlive the node: a thread waits for the node's death and ends the process at once. (Not
PR_SET_PDEATHSIG: that fires when the *thread* that started us ends.)
"""

import array
import contextlib
import mmap
import os
import select
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from epd.encoders.registry import load_encoder
from epd.forward import messages as m
from epd.forward.base import ForwardItem
from epd.forward.batches import BatchRunner, describe
from epd.protocol.errors import EpdError, ForwardFailed

NICE: Final = 10
"""Lower than the node, whose round trips must stay short while a forward takes every core."""
OOM_SCORE: Final = 500
"""When memory runs out the kernel shall take this process, which can be had again, not the node."""


def main(socket_fd: int, node_pidfd: int) -> int:
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    # Signals to the whole process group are for the node: it drains, then ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Of pictures' sizes, which have a limit of ours, and of odd metadata: nobody reads them here.
    warnings.filterwarnings("ignore", module="PIL")
    for fd in (socket_fd, node_pidfd):
        os.set_inheritable(fd, False)
    threading.Thread(target=_die_with, args=(node_pidfd,), name="epd-node-watch", daemon=True).start()
    with contextlib.suppress(OSError):  # /proc may be hidden; this only shifts a preference
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    with socket.socket(fileno=socket_fd) as channel, contextlib.suppress(ConnectionError):
        _serve(channel)
    return 0


def _die_with(node_pidfd: int) -> None:
    watch = select.poll()  # not select(): the number is the node's, and may be above 1,023
    watch.register(node_pidfd, select.POLLIN)
    watch.poll()
    os._exit(1)


def _serve(channel: socket.socket) -> None:
    """Until the node closes its end, which shows as an end of messages or as a `ConnectionError`."""
    start = _receive(channel)
    if start is None:
        return
    message, _ = start
    if not isinstance(message, m.Start):
        raise TypeError(f"first message is {type(message).__name__}, not Start")
    regions = {r.region: _map_region(r) for r in message.regions}
    try:
        encoder = load_encoder(message.encoder)
        encoder.load(message.num_threads, "cpu")
        _set_threads(message.num_threads)
    except EpdError as error:  # it says all there is to say
        channel.send(m.encode(m.LoadFailed(error.message)))
        return
    except Exception as error:
        channel.send(m.encode(m.LoadFailed(describe(error))))
        raise
    runner = BatchRunner(encoder, MappedStore(regions), message.batch_items, message.pictures)
    channel.send(m.encode(m.Ready()))
    while (received := _receive(channel)) is not None:
        batch, media_fd = received
        if not isinstance(batch, m.Batch) or media_fd is None:
            raise TypeError(f"{type(batch).__name__} with media {media_fd}, not a Batch with media")
        answers = run_batch(runner, batch, media_fd)
        channel.send(m.encode(m.BatchEnded(batch.batch, answers)))


def _receive(channel: socket.socket) -> tuple[m.Start | m.Batch, int | None] | None:
    """The next message and the descriptor that came with it; None when the node has closed."""
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    # not socket.recv_fds: it ignores its flags, and the descriptor would be inherited
    data, ancillary, flags, _ = channel.recvmsg(m.MESSAGE_NBYTES, room, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ValueError("a message of the node was cut")
    fds = array.array("i")
    for level, kind, body in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(body)
    return m.decode_from_node(data), fds[0] if fds else None


def _map_region(region: m.RegionFd) -> memoryview:
    """The whole region, writable: shared with the node, which exports it."""
    mapping = mmap.mmap(region.fd, region.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(region.fd)
    return memoryview(mapping)


def _set_threads(num_threads: int) -> None:
    """Even if the encoder's `load` did not: a default would take every core from the node."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(num_threads)


def run_batch(runner: BatchRunner, batch: m.Batch, media_fd: int) -> tuple[m.ItemAnswer, ...]:
    """One answer per item, in order. Closes `media_fd`."""
    with _mapped_media(media_fd) as media:
        items = [
            ForwardItem(
                media[task.media_offset : task.media_offset + task.media_nbytes],
                task.probe,
                task.dtype,
                task.spec,
                task.region,
                task.offset,
            )
            for task in batch.items
        ]
        results = runner.run(items, digest=batch.digest)
        return tuple(m.ItemAnswer(result.error, result.digest) for result in results)


class MappedStore:
    """Stores results in mapped regions."""

    def __init__(self, regions: dict[int, memoryview]) -> None:
        self._regions = regions

    def __call__(self, result: Any, item: ForwardItem, digest: bool) -> bytes | None:
        payload = _payload(result)
        place = self._regions[item.region][item.offset : item.offset + item.spec.nbytes]
        if len(place) != len(payload):
            raise ForwardFailed(f"region {item.region} has no {len(payload)} B at {item.offset}")
        place[:] = payload
        if not digest:
            return None
        import xxhash

        return xxhash.xxh3_128_digest(payload)


@contextlib.contextmanager
def _mapped_media(media_fd: int) -> Iterator[memoryview]:
    try:
        nbytes = os.fstat(media_fd).st_size
        if nbytes == 0:  # cannot be mapped
            yield memoryview(b"")
            return
        mapping = mmap.mmap(media_fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        yield memoryview(mapping)
        # Not closed here: an encoder may have kept a view. The last view's end unmaps it.
    finally:
        os.close(media_fd)


def _payload(result: Any) -> memoryview:
    """The bytes of a torch tensor (or numpy array), C order."""
    if "torch" in sys.modules:
        import torch

        if isinstance(result, torch.Tensor):
            result = result.detach().cpu().contiguous().view(torch.uint8).numpy()
    import numpy

    return numpy.ascontiguousarray(result).view(numpy.uint8).data.cast("B")


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing of ours is left to be saved; the interpreter's own end takes seconds with torch in it.
    os._exit(status)
