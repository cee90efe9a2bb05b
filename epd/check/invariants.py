"""The invariants, one function each: `(View) -> Violation | None`.

A `View` is what they need to know of some nodes at one moment. The explorer makes it from its states; a
simulator or a test may make it from its own nodes, of one node or of many. I6 is about ranks, and
I4 is asked only when everything has ended.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple


class Violation(NamedTuple):
    invariant: str
    message: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.message}"


class LeaseView(NamedTuple):
    """Slots of a pool that are leased together; `slots` are their places."""

    lease: int
    slots: tuple[int, ...]


class WriteView(NamedTuple):
    """A read of which our engine may still write something into `slot`."""

    read: int
    lease: int
    slot: int


class DeliveryView(NamedTuple):
    """Delivered and not released; `whole`: its bytes are those that were announced."""

    request: str
    lease: int
    slots: tuple[int, ...]
    whole: bool


class PrefillView(NamedTuple):
    pool_slots: int = 0
    leases: tuple[LeaseView, ...] = ()
    writes: tuple[WriteView, ...] = ()
    deliveries: tuple[DeliveryView, ...] = ()
    told: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Per request, what its consumer was told: at most one word, `delivered` or an error's code."""
    waiting_with_slots: tuple[str, ...] = ()
    """Requests that hold slots while they wait for more."""
    sessions: tuple[int, ...] = ()
    attempt_sessions: tuple[int, ...] = ()
    """Of every open attempt."""
    flaws: tuple[str, ...] = ()
    """`I8: ...`: what only the moment showed."""
    held: tuple[str, ...] = ()
    """Everything that must be gone in the end, by name."""


class SourceView(NamedTuple):
    """A staged result in its slot."""

    staged: int
    slot: int
    writing: bool


class AnnouncedView(NamedTuple):
    """`ForwardDone` was sent, no receipt came: `intact` if seal and rows stand as announced."""

    part: tuple[int, ...]
    item: int
    staged: int
    pinned: bool
    intact: bool


class EncoderView(NamedTuple):
    sources: tuple[SourceView, ...] = ()
    forwards: tuple[tuple[int, int], ...] = ()
    """(staged, slot) of forwards that run or are queued."""
    announced: tuple[AnnouncedView, ...] = ()
    open_parts: tuple[tuple[int, ...], ...] = ()
    """(session, transfer, part) once per attempt that is open."""
    ungranted_forwards: tuple[int, ...] = ()
    """Jobs that took room while no subscriber held a grant."""
    sessions: tuple[int, ...] = ()
    flaws: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


class RankView(NamedTuple):
    """One rank of a group: entries applied, in order; `log` is rank 0's, `number` this rank's place in it."""

    applied: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    number: int = 0


class View(NamedTuple):
    prefills: tuple[PrefillView, ...] = ()
    encoders: tuple[EncoderView, ...] = ()
    ranks: tuple[RankView, ...] = ()


def i1_own_memory(view: View) -> Violation | None:
    """Our engine writes only into slots that are leased to that read, one read at a time."""
    for node in view.prefills:
        owners = Counter(slot for lease in node.leases for slot in lease.slots)
        for slot, count in owners.items():
            if count > 1:
                return Violation("I1", f"slot {slot} is leased {count} times")
        holder = {slot: lease.lease for lease in node.leases for slot in lease.slots}
        into: dict[int, int] = {}
        for write in node.writes:
            if holder.get(write.slot) != write.lease:
                now = f"of lease {holder[write.slot]}" if write.slot in holder else "free"
                return Violation(
                    "I1", f"read {write.read} may still write into slot {write.slot}, which is {now}"
                )
            if write.slot in into:
                return Violation(
                    "I1", f"reads {into[write.slot]} and {write.read} may both write into slot {write.slot}"
                )
            into[write.slot] = write.read
        for delivery in node.deliveries:
            for slot in delivery.slots:
                if slot in into:
                    return Violation(
                        "I1", f"read {into[slot]} may still write into the delivered slot {slot}"
                    )
    return None


def i2_whole_sources(view: View) -> Violation | None:
    """What is delivered is whole; what was announced stays as it was; no slot is shared or reused early."""
    for node in view.prefills:
        for delivery in node.deliveries:
            if not delivery.whole:
                return Violation("I2", f"{delivery.request} was delivered other bytes than were announced")
    for encoder in view.encoders:
        slots = Counter(source.slot for source in encoder.sources)
        for slot, count in slots.items():
            if count > 1:
                return Violation("I2", f"staging slot {slot} holds {count} results")
        for item in encoder.announced:
            if not item.pinned or not item.intact:
                why = "is not pinned" if not item.pinned else "has changed"
                return Violation("I2", f"the source of item {item.item} of part {item.part} {why}")
    return None


def i3_exactly_once(view: View) -> Violation | None:
    """A request is told one outcome; one attempt of a part is open at a time."""
    for node in view.prefills:
        for request, words in node.told:
            if len(words) > 1:
                return Violation("I3", f"{request} was told {' and '.join(words)}")
    for encoder in view.encoders:
        for part, count in Counter(encoder.open_parts).items():
            if count > 1:
                return Violation("I3", f"{count} attempts of part {part} are open at once")
    return None


def i4_no_residue(view: View) -> Violation | None:
    """Nothing is held. To be asked when all requests have ended and the retention is over."""
    for kind, nodes in (("prefill", view.prefills), ("encoder", view.encoders)):
        for node in nodes:
            if node.held:
                return Violation("I4", f"{kind} still holds {', '.join(node.held)}")
    return None


def i5_explicit_release(view: View) -> Violation | None:
    """A delivery's slots stay leased until it is released."""
    for node in view.prefills:
        leased = {lease.lease for lease in node.leases}
        for delivery in node.deliveries:
            if delivery.lease not in leased:
                return Violation("I5", f"the slots of {delivery.request} are free before its release")
    return None


def i6_one_order(view: View) -> Violation | None:
    """Every rank has applied a prefix of rank 0's log."""
    if not view.ranks:
        return None
    log = view.ranks[0].log
    for number, rank in enumerate(view.ranks):
        if rank.applied != log[: rank.number]:
            applied, due = ", ".join(rank.applied), ", ".join(log[: rank.number])
            return Violation("I6", f"rank {number} applied {applied or 'nothing'}, where the log has {due}")
    return None


def i7_work_needs_room(view: View) -> Violation | None:
    """A forward has a reserved slot and a granted subscriber; nobody holds slots while waiting for more."""
    for node in view.prefills:
        if node.waiting_with_slots:
            return Violation("I7", f"{node.waiting_with_slots[0]} holds slots while it waits for more")
    for encoder in view.encoders:
        written = {(source.staged, source.slot) for source in encoder.sources if source.writing}
        for forward in encoder.forwards:
            if forward not in written:
                # Without a number it never had a slot; else it was given up under the forward.
                invariant = "I2" if forward[0] else "I7"
                return Violation(invariant, f"a forward writes into slot {forward[1]}, not reserved for it")
        if encoder.ungranted_forwards:
            return Violation("I7", f"job {encoder.ungranted_forwards[0]} took room without a grant")
    return None


def i8_sessions(view: View) -> Violation | None:
    """Every open attempt's session is in force; nothing of another session is acted on."""
    for node in view.prefills:
        for session in node.attempt_sessions:
            if session not in node.sessions:
                return Violation("I8", f"an attempt is open in session {session}, which is over")
    for encoder in view.encoders:
        for part in encoder.open_parts:
            if part[0] not in encoder.sessions:
                return Violation("I8", f"part {part} is open in session {part[0]}, which is over")
    for flaws in (*(n.flaws for n in view.prefills), *(e.flaws for e in view.encoders)):
        for flaw in flaws:
            invariant, _, message = flaw.partition(": ")
            return Violation(invariant, message)
    return None


ALWAYS: Final[tuple[Callable[[View], Violation | None], ...]] = (
    i1_own_memory,
    i2_whole_sources,
    i3_exactly_once,
    i5_explicit_release,
    i6_one_order,
    i7_work_needs_room,
    i8_sessions,
)
"""Hold in every state; `i4_no_residue` in the last."""


def first_violation(view: View) -> Violation | None:
    return next((found for check in ALWAYS if (found := check(view)) is not None), None)
