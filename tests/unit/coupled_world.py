"""One prefill node and two encoder nodes made of bare machines, queues and modelled memory.

No actor, socket or clock: one seeded chooser picks which queue goes on. Queues are first in, first out
per sender and receiver (and per session and direction on the wire); nothing else is ordered. The memory
is modelled by what is written where, so that a slot that is reused too early is seen by its content.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from functools import partial
from random import Random
from typing import Any

from coupled_base import Faults, Session
from coupled_encoder import EncoderNode
from coupled_prefill import PrefillNode

from epd.protocol import prefill_types as pt
from epd.protocol.ids import SessionId
from epd.protocol.machine import TimerExpired


class World:
    def __init__(self, seed: int, faults: Faults, requests: int) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.left = {name: getattr(faults, name) for name in Faults._fields}
        self.now_s = 0.0
        self.queues: defaultdict[Hashable, deque[Callable[[], None]]] = defaultdict(deque)
        self.sessions: dict[SessionId, Session] = {}
        self.numbers: defaultdict[str, int] = defaultdict(int)
        self.encoders = [EncoderNode(self), EncoderNode(self)]
        self.prefill = PrefillNode(self)
        self.to_submit = requests
        for node in self.encoders:
            self.open(node)

    def number(self, of: str) -> int:
        self.numbers[of] += 1
        return self.numbers[of]

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def tell(self, queue: Hashable, handler: Callable[..., None], *args: Any) -> None:
        self.queues[queue].append(partial(handler, *args))

    # -- sessions --------------------------------------------------------------------------

    def open(self, node: "EncoderNode") -> None:
        session = Session(self, SessionId(self.number("session")), node)
        self.sessions[session.id] = session
        session.up(node.open_session, session)
        self.tell("transfer", self.prefill.open_peer, session.id)
        self.prefill.open_session(session)

    def end(self, session: "Session") -> None:
        """What is on its way gets there up to some point; then each side learns of it, in its own time."""
        session.ended = True
        for queue in (session.queue_up, session.queue_down):
            waiting = self.queues[queue]
            for _ in range(self.random.randint(0, len(waiting))):
                waiting.pop()
        self.tell(session.queue_up, session.node.end_session, session.id)
        self.tell(session.queue_down, self.prefill.end_session, session.id)

    # -- running ---------------------------------------------------------------------------

    def run(self, faulty_steps: int) -> None:
        for _ in range(faulty_steps):
            self.disturb()
            if not self.advance(early_timers=self.faults.early_timers):
                break
        self.left = dict.fromkeys(self.left, 0)
        self.faults = Faults()
        for _ in range(20_000):
            if not self.advance(early_timers=False):
                return
        raise AssertionError("it does not come to rest")

    def advance(self, *, early_timers: bool) -> bool:
        """One message, one submission, one release or one timer; False if there is nothing left."""
        if self.to_submit and self.chance(0.1):
            self.to_submit -= 1
            self.prefill.submit()
            return True
        ready = [queue for queue, waiting in self.queues.items() if waiting]
        if ready and not (early_timers and self.chance(0.02)):
            self.queues[self.random.choice(ready)].popleft()()
            return True
        for act in (self.prefill.consume, self.prefill.go_on_reading, self.work, self.reconnect):
            if act():
                return True
        return self.fire_timer() or bool(ready) or self.to_submit > 0

    def work(self) -> bool:
        worked = [node.work() for node in self.encoders]
        return any(worked)

    def reconnect(self) -> bool:
        """Heartbeats, and the dialling of what is not connected.

        A late `Hello` of an ended session may end its successor at the encoder; the next heartbeat in
        that one is then answered `Rejected(session over)`.
        """
        for session in self.prefill.sessions.values():
            if not session.ended and session.greeted and session.id not in session.node.sessions:
                self.end(session)
                return True
        for node in self.encoders:
            if not any(s.node is node for s in self.prefill.sessions.values()):
                self.open(node)
                return True
        return False

    def fire_timer(self) -> bool:
        tables = [self.prefill.requests, self.prefill.slots]
        for node in self.encoders:
            tables += [node.parts, node.jobs, node.sources]
        due = [
            (state.deadline_s, number, key)
            for number, table in enumerate(tables)
            for key, state in table.states.items()
            if state.deadline_s is not None
        ]
        if not due:
            return False
        deadline_s, number, key = min(due, key=lambda entry: entry[:2])
        self.now_s = max(self.now_s, deadline_s)
        before = tables[number].state(key)
        tables[number].feed(key, TimerExpired())
        assert tables[number].state(key) != before, "the deadline stays where it was"
        return True

    def disturb(self) -> None:
        kind = self.random.choice(["session_ends", "crashes", "evictions", "cancels", "drains", *[""] * 25])
        if not self.left.get(kind):
            self.prefill.consume_some()
            self.prefill.go_on_reading(some=True)
            for node in self.encoders:
                if self.chance(0.2):
                    node.work()
            if self.chance(0.05):
                self.reconnect()
            return
        self.left[kind] -= 1
        living = [session for session in self.sessions.values() if not session.ended]
        node = self.random.choice(self.encoders)
        if kind == "session_ends" and living:
            self.end(self.random.choice(living))
        elif kind == "crashes":
            node.alive = False
            self.encoders[self.encoders.index(node)] = EncoderNode(self)
            for session in living:
                if session.node is node:
                    self.end(session)
        elif kind == "evictions":
            node.evict_one()
        elif kind == "cancels" and self.prefill.requests.states:
            self.prefill.requests.feed(
                self.random.choice(list(self.prefill.requests.states)), pt.CancelWanted()
            )
        elif kind == "drains":
            node.drain()

    def residue(self) -> dict[str, object]:
        """Everything that is held anywhere; all empty at the end."""
        held: dict[str, object] = dict(self.prefill.held())
        for number, node in enumerate(self.encoders):
            held |= {f"encoder {number} {name}": value for name, value in node.held().items()}
        return {name: value for name, value in held.items() if value}
