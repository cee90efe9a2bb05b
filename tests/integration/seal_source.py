"""An encoder's staging memory that is reused while it is read: `seal_source.py PLANE ROUNDS SEED`.

The real StagingBuffers lease, seal, evict and free; what is wrong is only the `Receipt`, which comes at
once, so that the next result may take the slot of one that a reader is reading. Each result is a pattern
of its number. Says where each is, one line of JSON each; starts when it is told to, and goes on when the
reader has seen the line, so that reads and reuse meet.
"""

import json
import random
import sys
from typing import Any

from epd.actors.staging_buffers import (
    PinAnswer,
    PinAsked,
    SourceEvent,
    StagedEvicted,
    StagingAnswer,
    StagingBuffers,
    StagingWanted,
    UnpinAsked,
)
from epd.dataplane.select import Choice, open_plane
from epd.memory.pool import Pool
from epd.protocol import sources
from epd.protocol.ids import Attempt, Part, SessionId, TransferId
from epd.protocol.job_key import JobKey
from epd.protocol.sources import Subscriber
from epd.runtime.clock import MonotonicClock
from epd.runtime.mailbox import Mailbox
from epd.runtime.runtime import Runtime
from epd.runtime.timers import Timers

REGION_NBYTES = 1024 * 1024 + 64 * 1024  # two or three results: the next ones take their places at once
MIN_NBYTES, MAX_NBYTES = 64 * 1024, 1024 * 1024


class Answers:
    """In place of the coordinator's and the EncodeActor's mailboxes."""

    def __init__(self) -> None:
        self.staged: Any = None
        self.pinned: Any = None

    def tell(self, message: StagingAnswer | StagedEvicted | PinAnswer) -> None:
        if isinstance(message, StagingAnswer):
            self.staged = message
        elif isinstance(message, PinAnswer):
            self.pinned = message


def pattern(number: int, nbytes: int) -> bytes:
    """Words that all say which result they are of."""
    return (number.to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]


def main(choice: Choice, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    plane = open_plane(choice, "127.0.0.1")
    pool = Pool(plane.allocate(1, REGION_NBYTES, exported=True))
    clock = MonotonicClock()
    runtime = Runtime(clock, Timers(clock, lambda _at_s, _callback: _Never()), None)
    buffers, answers = StagingBuffers(runtime, Mailbox("staging", 16), pool), Answers()
    buffers.to_dedup = buffers.to_encode = answers
    exported = [[one.region, one.base, one.nbytes] for one in plane.export()]
    say({"name": plane.name, "segment": plane.segment, "regions": exported})
    sys.stdin.readline()
    for number in range(1, rounds + 1):
        nbytes = int(MIN_NBYTES * (MAX_NBYTES / MIN_NBYTES) ** rng.random())
        job = JobKey(f"{number}", "image", nbytes, 1, 1, 0, "uint8")
        buffers.handle(StagingWanted(job, nbytes))
        staged, extent = answers.staged.staged, answers.staged.extent
        pool.view(extent)[:nbytes] = pattern(number, nbytes)
        reader = Subscriber(SessionId(7), TransferId(number), Part(0), Attempt(1), 0)
        buffers.handle(SourceEvent(staged, sources.Written()))
        buffers.handle(PinAsked(staged, reader))
        source = answers.pinned.source
        place = [source.region, source.offset, source.nbytes, source.seal]
        say({"number": number, "source": place})
        buffers.handle(UnpinAsked(staged, reader))  # the receipt that nobody has sent
        sys.stdin.readline()
        for _ in range(rng.randrange(2_000)):  # some of its reads end before the next round
            pass
    say({"number": 0})
    sys.stdin.readline()
    plane.close()


class _Never:
    """A timer that is never due: these machines have none."""

    def cancel(self) -> None:
        """Nothing was armed."""


def say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))  # type: ignore[arg-type]  # checked by open_plane
