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
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from epd.encoders.base import Encoder, MediaItem
from epd.encoders.media import DEFAULT_RULES, PictureRules
from epd.encoders.registry import load_encoder
from epd.forward import messages as m
from epd.protocol.errors import EpdError, ForwardFailed, MediaMismatch
from epd.protocol.messages import EmbeddingSpec, ErrorValue

NICE: Final = 10
"""Lower than the node, whose round trips must stay short while a forward takes every core."""
OOM_SCORE: Final = 500
"""When memory runs out the kernel shall take this process, which can be had again, not the node."""


def main(socket_fd: int, node_pidfd: int) -> int:
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    # Signals to the whole process group are for the node: it drains, then ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
        encoder.load(message.num_threads)
        _set_threads(message.num_threads)
    except Exception as error:
        channel.send(m.encode(m.LoadFailed(_describe(error))))
        raise
    runner = BatchRunner(encoder, regions, message.batch_items, message.pictures)
    channel.send(m.encode(m.Ready()))
    while (received := _receive(channel)) is not None:
        batch, media_fd = received
        if not isinstance(batch, m.Batch) or media_fd is None:
            raise TypeError(f"{type(batch).__name__} with media {media_fd}, not a Batch with media")
        answers = runner.run(batch, media_fd)
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


class BatchRunner:
    """Encodes batches into mapped regions; an item that fails, fails alone."""

    def __init__(
        self,
        encoder: Encoder,
        regions: dict[int, memoryview],
        batch_items: int,
        pictures: PictureRules = DEFAULT_RULES,
    ) -> None:
        self._encoder = encoder
        self._regions = regions
        self._batch_items = batch_items
        self._pictures = pictures

    def run(self, batch: m.Batch, media_fd: int) -> tuple[m.ItemAnswer, ...]:
        """One answer per item, in order. Closes `media_fd`."""
        answers: list[m.ItemAnswer] = []
        with _mapped_media(media_fd) as media:
            for first in range(0, len(batch.items), self._batch_items):
                group = batch.items[first : first + self._batch_items]
                answers += self._run_group(group, media, digest=batch.digest)
        return tuple(answers)

    def _run_group(
        self, group: Sequence[m.ItemTask], media: memoryview, *, digest: bool
    ) -> list[m.ItemAnswer]:
        answers: list[m.ItemAnswer | None] = [None] * len(group)
        prepared: dict[int, Any] = {}
        for number, task in enumerate(group):
            try:
                view = media[task.media_offset : task.media_offset + task.media_nbytes]
                item = MediaItem(task.probe, view, task.dtype, self._pictures)
                prepared[number] = self._encoder.preprocess(item)
            except Exception as error:
                answers[number] = _failed(error)
        for number, outcome in zip(prepared, self._forward(list(prepared.values())), strict=True):
            if isinstance(outcome, m.ItemAnswer):
                answers[number] = outcome
                continue
            try:
                answers[number] = m.ItemAnswer(None, self._store(outcome, group[number], digest=digest))
            except Exception as error:
                answers[number] = _failed(error)
        return [answer for answer in answers if answer is not None]

    def _forward(self, inputs: list[Any]) -> list[Any]:
        """A result or a failure per input. Whoever spoils a common forward is found by going alone.

        No exception is kept: its frames would keep the media mapped until a garbage collection.
        """
        if not inputs:
            return []
        try:
            results = list(self._encoder.forward(inputs))
            if len(results) != len(inputs):
                raise ForwardFailed(f"{self._encoder.name}: {len(results)} results of {len(inputs)} items")
        except Exception as error:
            if len(inputs) == 1:
                return [_failed(error)]
            return [outcome for one in inputs for outcome in self._forward([one])]
        return results

    def _store(self, result: Any, task: m.ItemTask, *, digest: bool) -> bytes | None:
        """Write one result to its place, and nothing beside it. Returns its digest, if wanted."""
        payload = _payload(result, task.spec)
        place = self._regions[task.region][task.offset : task.offset + task.spec.nbytes]
        if len(place) != len(payload):
            raise ForwardFailed(f"region {task.region} has no {len(payload)} B at {task.offset}")
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


def _payload(result: Any, spec: EmbeddingSpec) -> memoryview:
    """The bytes of a torch tensor (or numpy array), C order, checked against what was announced."""
    shape, dtype = tuple(result.shape), str(result.dtype).removeprefix("torch.")
    if shape != (spec.rows, spec.dim):
        raise MediaMismatch(f"{spec.rows}x{spec.dim} announced, the forward made {shape}")
    if dtype != spec.dtype:
        raise ForwardFailed(f"{spec.dtype} announced, the forward made {dtype}")
    if "torch" in sys.modules:
        import torch

        if isinstance(result, torch.Tensor):
            result = result.detach().cpu().contiguous().view(torch.uint8).numpy()
    import numpy

    return numpy.ascontiguousarray(result).view(numpy.uint8).data.cast("B")


def _failed(error: Exception) -> m.ItemAnswer:
    """An error of ours as it is; anything else is a failed forward, which may succeed elsewhere."""
    known = error if isinstance(error, EpdError) else ForwardFailed(_describe(error))
    text = known.message[: m.REASON_CHARACTERS]
    return m.ItemAnswer(ErrorValue(known.code, known.retryable, text), None)


def _describe(error: Exception) -> str:
    """The error and the line that raised it: all that is known here of a user's encoder."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = f" ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[: m.REASON_CHARACTERS - len(where)] + where


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing of ours is left to be saved; the interpreter's own end takes seconds with torch in it.
    os._exit(status)
