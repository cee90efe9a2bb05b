"""Both halves of push as shipped, the window machine and the encoder's writer, on a channel that drops,
repeats and reorders: no byte that is under way can reach a slot that has been let go of."""

import random
from typing import Any

import pytest
from machines import Bench
from push_parts import A, Parts

from epd.actors.push_writer import ReaderGone
from epd.actors.transfer import PollerNews
from epd.dataplane.poller import ReadDone
from epd.protocol import push
from epd.protocol.ids import ReadId, RegionId, Seal, WriteId
from epd.protocol.machine import Event, TimerExpired
from epd.protocol.messages import Drained, EmbeddingWritten, PushWanted, Reconcile, Source

WRITES = 4
STEPS = 80
SOURCE = Source(RegionId(0), 256, 100, Seal(7))


class World:
    """One session. `under_way` are the writes of which an engine or a kernel holds bytes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.window = Bench(push, push.Limits())
        self.writer = Parts()
        self.writer.ready()
        self.to_writer: list[PushWanted | Reconcile] = []
        self.to_reader: list[EmbeddingWritten | Drained] = []
        self.asked = 0
        self.posted: set[ReadId] = set()
        self.under_way: dict[ReadId, WriteId] = {}
        self.is_open = True
        self.let_go: dict[WriteId, str] = {}
        self.feed(push.WindowWanted())
        self.feed(push.WindowOpened(True))

    def feed(self, event: Event) -> None:
        for effect in self.window.feed(event):
            match effect:
                case push.AskWrite():
                    self.to_writer.append(PushWanted(effect.write, SOURCE, RegionId(0), 512))
                case push.AskDrained():
                    self.to_writer.append(Reconcile(effect.writes))
                case push.EndWrite(write, end):
                    assert write not in self.let_go, "once"
                    self.let_go[write] = end
        self.to_reader += [message for _, message in self.writer.sent]
        self.writer.sent.clear()

    def step(self) -> None:
        move: Any = self.random.choice(
            [
                self.ask,
                self.hear,
                self.hear,
                self.answer,
                self.answer,
                self.post,
                self.post,
                self.end,
                self.rare,
            ]
        )
        move()
        self.to_reader += [message for _, message in self.writer.sent]
        self.writer.sent.clear()
        reached = {write for write in self.under_way.values() if write in self.let_go}
        assert not (self.is_open and reached), f"bytes of {reached} reach slots that are {self.let_go}"

    def ask(self) -> None:
        if self.asked < WRITES:
            self.asked += 1
            self.feed(push.WriteWanted(WriteId(self.asked)))

    def take(self, queue: list[Any]) -> Any:
        """Any message; now and then it stays as well, or is lost."""
        if not queue:
            return None
        at = self.random.randrange(len(queue)) if self.random.random() < 0.3 else 0
        message = queue[at] if self.random.random() < 0.1 else queue.pop(at)
        return None if self.random.random() < 0.05 else message

    def hear(self) -> None:
        message = self.take(self.to_writer)
        if message is not None:
            self.writer.hear(message)

    def answer(self) -> None:
        match self.take(self.to_reader):
            case EmbeddingWritten(write, outcome):
                self.feed(push.WriteEnded(write, outcome))
            case Drained(writes):
                self.feed(push.WritesDrained(writes))

    def running(self) -> list[tuple[ReadId, WriteId]]:
        return [(read, write) for read, (_, write) in self.writer.writer._posted.items()]

    def post(self) -> None:
        """The encoder's engine takes one that its poller has."""
        for read, write in self.running():
            if read not in self.posted and read not in self.writer.aborted:
                self.posted.add(read)
                self.under_way[read] = write
                return

    def end(self) -> None:
        running = self.running()
        if not running:
            return
        read, _ = self.random.choice(running)
        posted, aborted = read in self.posted, read in self.writer.aborted
        if not posted and not aborted:
            return
        outcome = "aborted" if aborted else self.random.choice(["ok", "ok", "ok", "failed"])
        if outcome == "ok":
            del self.under_way[read]  # acknowledged; of one that failed the kernels may hold parts for long
        self.writer.writer.handle(PollerNews([ReadDone(read, outcome, 0.0, 0, posted)]))

    def rare(self) -> None:
        match self.random.randrange(8):
            case 0 | 1 | 2 if self.asked:
                self.feed(push.AbortWanted(WriteId(self.random.randint(1, self.asked))))
            case 3 if self.window.state.deadline_s is not None:
                self.feed(TimerExpired())
            case 4 if self.random.random() < 0.3:
                self.feed(push.SessionOver())
            case 5 if self.random.random() < 0.3:
                self.writer.writer.handle(ReaderGone(A))
            case _ if isinstance(self.window.state, push.Revoking):
                self.is_open = False
                self.feed(push.WindowRevoked(True))


@pytest.mark.slow
def test_nothing_under_way_reaches_a_slot_that_was_let_go_of() -> None:
    ends: set[str] = set()
    for seed in range(1500):
        world = World(seed)
        for _ in range(STEPS):
            world.step()
        ends |= set(world.let_go.values())
    assert ends == {"written", "untouched", "fenced", "refused"}, "every way to end a write was taken"
