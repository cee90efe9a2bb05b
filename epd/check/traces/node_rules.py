"""The invariants within one node's trace, from its events and effects alone.

Only machines whose first step is in the trace are looked at: of others the beginning is not known.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final

from epd.check.traces.findings import Finding
from epd.observe.timeline.load import NodeTrace, TracedStep
from epd.protocol import encoder as e
from epd.protocol import group as g
from epd.protocol import jobs as j
from epd.protocol import prefill_types as p
from epd.protocol import rank as k
from epd.protocol import reads as r
from epd.protocol import slots as sl
from epd.protocol import sources as so
from epd.protocol.machine import Ignored
from epd.protocol.registry import machines_of
from epd.protocol.unhandled import UNHANDLED

Flaw = tuple[str, str]
"""Rule and message."""


def check_node(node: NodeTrace) -> Iterator[Finding]:
    """What this node did against the rules, in the order of its steps."""
    machines = machines_of(node.header.logic_version)
    watched: dict[tuple[str, Any], Any] = {}
    seals: set[int] = set()
    for at, step in enumerate(node.steps):
        flaws = list(_cell_flaws(machines[step.kind].module, step))
        key = step.kind, step.key
        make = _WATCHERS.get(step.kind)
        if make is not None:
            if key not in watched and isinstance(step.before, type(machines[step.kind].module.INITIAL)):
                watched[key] = make(seals) if step.kind == "sources" else make()
            if key in watched:
                flaws += watched[key].see(step)
                if step.after.final:
                    del watched[key]
        for rule, message in flaws:
            yield Finding(rule, node.name, at, step.kind, str(step.key), message)


def _cell_flaws(module: Any, step: TracedStep) -> Iterator[Flaw]:
    """The cell of the machine's table is one that may be met, and what it does not handle changes nothing."""
    cell = type(step.before), type(step.event)
    if cell in module.TRANSITIONS:
        return
    reason = UNHANDLED[step.kind, "TRANSITIONS"].get(cell)
    name = f"{cell[1].__name__} in {cell[0].__name__}"
    if reason is None:
        yield "cell", f"{name} is in no table"
    elif reason.kind == "impossible":
        yield "cell", f"{name} cannot be: {reason.why}"
    if step.effects != (Ignored(cell[1].__name__),):
        yield "cell", f"{name} has no handler and did {list(step.effects)}"


class _Slot:
    """I1: a lease is freed when every read that was posted into it is terminal."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._posted: set[int] = set()

    def see(self, step: TracedStep) -> Iterator[Flaw]:
        if isinstance(step.event, sl.ReadTerminal):
            self._running.discard(step.event.read)
        for effect in step.effects:
            match effect:
                case sl.PostRead():
                    if effect.wanted.read in self._posted:
                        yield "I1", f"read {effect.wanted.read} posted again"
                    self._posted.add(effect.wanted.read)
                    self._running.add(effect.wanted.read)
                case sl.TellReadEnded(error=None) if not (
                    isinstance(step.event, sl.ReadTerminal) and step.event.outcome == "ok"
                ):
                    yield "I2", f"item {effect.item} called whole by {step.event}"
                case sl.FreeExtents() if self._running:
                    yield "I1", f"freed while reads {sorted(self._running)} may still write"


class _Read:
    """I1, I2: it ends when all its pieces have, and is good only with the seal that was announced."""

    def __init__(self) -> None:
        self._posted: set[int] = set()
        self._seal: int | None = None
        self._pieces = 0

    def see(self, step: TracedStep) -> Iterator[Flaw]:
        match step.event:
            case r.ReadWanted():
                self._seal, self._pieces = step.event.seal, step.event.pieces
            case r.PieceEnded():
                self._posted.discard(step.event.index)
        for effect in step.effects:
            match effect:
                case r.PostPiece():
                    self._posted.add(effect.index)
                case r.ReadSeal() if self._posted:
                    yield "I2", f"the seal is read before pieces {sorted(self._posted)} have ended"
                case r.Finish():
                    if self._posted:
                        yield "I1", f"over while pieces {sorted(self._posted)} may still be written"
                    if effect.outcome == "ok" and self._seal is not None and self._pieces > 0:
                        seen = step.event.value if isinstance(step.event, r.SealRead) else None
                        if seen != self._seal:
                            yield "I2", f"good with seal {seen}, announced was {self._seal}"


class _Source:
    """I2: a staging slot is freed behind a new seal, never while it is written or pinned."""

    def __init__(self, seals: set[int]) -> None:
        self._seals = seals
        self._pins: set[Any] = set()
        self._writing = False
        self._seal: int | None = None

    def see(self, step: TracedStep) -> Iterator[Flaw]:
        match step.event:
            case so.Reserved():
                self._writing = True
            case so.Written() | so.WriteEnded():
                self._writing = False
            case so.Unpinned():
                self._pins.discard(step.event.subscriber)
        resealed = False
        for effect in step.effects:
            match effect:
                case so.WriteSeal():
                    if effect.seal in self._seals:
                        yield "I2", f"seal {effect.seal} written again"
                    self._seals.add(effect.seal)
                    resealed = effect.seal != self._seal
                    self._seal = effect.seal
                case so.TellPinned():
                    self._pins.add(effect.subscriber)
                case so.FreeExtent():
                    if not resealed:
                        yield "I2", "freed without a new seal before it"
                    if self._pins:
                        yield "I2", f"freed while {len(self._pins)} read it"
                    if self._writing:
                        yield "I2", "freed while its forward may still write"


class _Request:
    """I3, I5: one outcome, one attempt of a part at a time, delivered whole, freed after its release."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, int]] = {}
        self._last: dict[int, int] = {}
        self._whole: set[int] = set()
        self._count = 0
        self._told: list[str] = []
        self._released = True

    def see(self, step: TracedStep) -> Iterator[Flaw]:
        self._hear(step)
        for effect in step.effects:
            match effect:
                case p.SendEncodeRequest():
                    yield from self._begin(effect)
                case p.SendReceipt(last=True) | p.SendCancel():
                    self._open.pop(effect.part, None)
                case p.StartRead() if self._open.get(effect.part) != (effect.attempt, effect.session):
                    yield "I8", f"reads for attempt {effect.attempt} of part {effect.part}, which is not open"
                case p.Deliver():
                    self._told.append("delivered")
                    self._released = False
                    if len(self._whole) < self._count:
                        yield "I3", f"delivered with {len(self._whole)} of {self._count} items whole"
                case p.FailRequest():
                    self._told.append(effect.error.code)
                case p.ReturnLease() if not self._released:
                    yield "I5", "given back before its consumer released it"
        if len(self._told) > 1:
            yield "I3", f"told {', '.join(self._told)}"

    def _hear(self, step: TracedStep) -> None:
        event, acted = step.event, not _is_ignored(step)
        match event:
            case p.Submitted() if acted:
                self._count = len(event.items)
            case p.ReadEnded(error=None) if acted:
                self._whole.add(event.item)
            case p.SessionEnded():
                self._open = {part: one for part, one in self._open.items() if one[1] != event.session}
            case p.AttemptFailed() if acted:
                self._open.pop(event.part, None)
            case p.ReadEnded() if acted:  # one failed read fails its attempt
                self._open.pop(event.part, None)
            case p.Released():
                self._released = True

    def _begin(self, sent: p.SendEncodeRequest) -> Iterator[Flaw]:
        if sent.part in self._open:
            yield "I3", f"attempt {sent.attempt} of part {sent.part} beside {self._open[sent.part][0]}"
        if sent.attempt <= self._last.get(sent.part, 0):
            yield "I3", f"attempt {sent.attempt} of part {sent.part} again"
        self._last[sent.part] = sent.attempt
        self._open[sent.part] = sent.attempt, sent.session


class _Part:
    """I2, I7: an item is announced once, with a grant, and pinned before."""

    def __init__(self) -> None:
        self._granted: dict[int, int] = {}
        self._announced: set[tuple[int, int]] = set()

    def see(self, step: TracedStep) -> Iterator[Flaw]:
        if isinstance(step.event, e.GrantReceived):
            self._granted.setdefault(step.event.attempt, step.event.grant)
        for effect in step.effects:
            if not isinstance(effect, e.SendForwardDone):
                continue
            if self._granted.get(effect.attempt) != effect.grant:
                yield "I7", f"attempt {effect.attempt} announced without its grant"
            if not isinstance(step.event, e.SourcePinned):
                yield "I2", f"announced by {type(step.event).__name__}, not by its pin"
            for item in range(effect.first, effect.first + len(effect.ready)):
                if (effect.attempt, item) in self._announced:
                    yield "I3", f"item {item} of attempt {effect.attempt} announced again"
                self._announced.add((effect.attempt, item))


class _Job:
    """I7: a forward is asked for only while somebody who wants it holds a grant."""

    def __init__(self) -> None:
        self._wanted: dict[Any, bool] = defaultdict(bool)

    def see(self, step: TracedStep) -> Iterator[Flaw]:
        match step.event:
            case j.Subscribed():
                self._wanted.setdefault(step.event.subscriber, False)
            case j.Granted() if step.event.subscriber in self._wanted:
                self._wanted[step.event.subscriber] = True
            case j.Left():
                self._wanted.pop(step.event.subscriber, None)
        for effect in step.effects:
            match effect:
                case j.QueueForward() if not any(self._wanted.values()):
                    yield "I7", "a forward that nobody with a grant wants"
                case j.TellFailed():
                    self._wanted.pop(effect.subscriber, None)


class _Log:
    """I6: entries have the numbers 1, 2, 3, ..., where they are appended and where they are applied."""

    def __init__(self) -> None:
        self._last = 0

    def see(self, step: TracedStep) -> Iterator[Flaw]:
        for effect in step.effects:
            if isinstance(effect, g.Append | k.Apply):
                if effect.number != self._last + 1:
                    yield "I6", f"entry {effect.number} after {self._last}"
                self._last = effect.number


def _is_ignored(step: TracedStep) -> bool:
    return len(step.effects) == 1 and isinstance(step.effects[0], Ignored)


_WATCHERS: Final[dict[str, Callable[..., Any]]] = {
    "slots": _Slot,
    "reads": _Read,
    "sources": _Source,
    "prefill": _Request,
    "encoder": _Part,
    "jobs": _Job,
    "group": _Log,
    "rank": _Log,
}
