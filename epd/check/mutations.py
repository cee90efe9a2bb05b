"""Seeded bugs, one each: what a checker must find to be believed.

Every mutation takes one rule away, from a machine's handler (a patch) or from the nodes' glue (`broken`),
and names the smallest world in which that shows.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from epd.check.explorer import Explored, explore
from epd.check.machines import Patch, StepFunction
from epd.check.script import WORLDS, script_of
from epd.check.setup import Part, Setup
from epd.protocol import encoder, group, jobs, rank, reads, session, slots, sources
from epd.protocol import prefill_types as t
from epd.protocol.ids import LeaseId
from epd.protocol.machine import Event, State, Step, TimerExpired

ONE: Final = (Part((0,)),)
OTHER: Final = (Part((1,)),)
REUSE: Final = Setup((ONE, OTHER), frozenset({"part-deadline"}), 1, rows=(2, 2), pool_slots=2)
"""The encoder's deadline unpins what is still being read, and the other request takes its slot."""


class Mutation(NamedTuple):
    """`invariant` is what it breaks."""

    name: str
    invariant: str
    setup: Setup
    patches: Mapping[str, Patch] = MappingProxyType({})
    world: str = "nodes"
    liveness: bool = True
    """False: ask only what holds in every state."""


class MutationResult(NamedTuple):
    name: str
    expected: str
    violation: str | None
    moves: int
    states: int
    seconds: float
    script: tuple[str, ...]

    @property
    def found(self) -> bool:
        return self.violation is not None and self.violation.startswith(self.expected)


def on(state: type, event: type, handler: Callable[[Any, Any, StepFunction], Step]) -> Patch:
    """Replaces one cell: `handler(state, event, step)`, where `step` is the shipped one at second 0."""

    def patch(shipped: StepFunction) -> StepFunction:
        def step(before: Any, happened: Any, now_s: float, limits: Any) -> Step:
            if isinstance(before, state) and isinstance(happened, event):
                return handler(before, happened, lambda s, e, _n, _l: shipped(s, e, now_s, limits))
            return shipped(before, happened, now_s, limits)

        return step

    return patch


def both(first: Patch, second: Patch) -> Patch:
    return lambda step: first(second(step))


def _as_shipped(step: StepFunction, state: Any, event: Any) -> Step:
    return step(state, event, 0.0, None)


def _free_at_once(state: slots.Leased, event: Any, step: StepFunction) -> Step:
    return Step(slots.Free(), (slots.FreeExtents(state.lease),))


def _forget_late_reads(state: slots.Leased, event: Any, step: StepFunction) -> Step:
    late = _as_shipped(step, state, event)
    return Step(replace(late.state, reads=()), late.effects)


def _believe_any_seal(state: reads.Sealing, event: reads.SealRead, step: StepFunction) -> Step:
    return _as_shipped(step, state, reads.SealRead(state.seal))


def _free_without_seal(state: Any, event: Any, step: StepFunction) -> Step:
    freed = _as_shipped(step, state, event)
    if not isinstance(freed.state, sources.Vacant):
        return freed
    return Step(freed.state, tuple(e for e in freed.effects if not isinstance(e, sources.WriteSeal)))


def _reserve_without_seal(state: Any, event: Any, step: StepFunction) -> Step:
    return Step(_as_shipped(step, state, event).state, ())


def _seal_when_written(state: sources.Writing, event: Any, step: StepFunction) -> Step:
    written = _as_shipped(step, state, event)
    return Step(written.state, (sources.WriteSeal(state.staged, state.seal), *written.effects))


def _give_up_running(state: jobs.Running, event: Any, step: StepFunction) -> Step:
    late = _as_shipped(step, state, event)
    return Step(jobs.Absent(), (*late.effects, jobs.MarkWriteEnded(state.staged)))


def _unpin_announced(state: Any, event: encoder.SourcePinned, step: StepFunction) -> Step:
    done = _as_shipped(step, state, event)
    return Step(done.state, (*done.effects, encoder.UnpinSource(event.attempt, event.item, event.staged)))


def _drop_job(state: jobs.Done, event: Any, step: StepFunction) -> Step:
    return Step(jobs.Absent(), (jobs.ReleaseStaged(state.staged),))


def _release_pinned(state: sources.Stable, event: Any, step: StepFunction) -> Step:
    return _as_shipped(step, replace(state, pins=()), event)


def _leave_as_a_number(state: Any, event: jobs.Left, step: StepFunction) -> Step:
    wishes = getattr(state, "wishes", ())
    return _as_shipped(step, state, jobs.Left(wishes[0].subscriber) if wishes else event)


def _deliver_again(state: t.Delivered, event: t.SourcesReady, step: StepFunction) -> Step:
    return Step(state, (t.Deliver(state.lease, tuple(r.spec for r in event.ready)),))


def _any_attempt(state: t.Filling, event: t.ReadEnded, step: StepFunction) -> Step:
    return _as_shipped(step, state, replace(event, attempt=state.parts[event.part].attempt))


def _queue_without_room(state: jobs.Fetching, event: Any, step: StepFunction) -> Step:
    return Step(jobs.Queued(state.wishes, LeaseId(0)), (jobs.QueueForward(LeaseId(0)),))


def _without_grant(state: jobs.Unstarted | jobs.Absent, event: jobs.Subscribed, step: StepFunction) -> Step:
    joined = _as_shipped(step, state, event).state
    sender = event.subscriber.session
    return Step(jobs.Fetching(joined.wishes, sender), (jobs.FetchMedia(sender),))


def _replace_rank(state: group.Leading, event: Any, step: StepFunction) -> Step:
    return Step(state, ())


def _skip_entry(state: rank.Following, event: rank.EntryReceived, step: StepFunction) -> Step:
    applied = _as_shipped(step, state, event)
    return Step(applied.state, ()) if isinstance(event.entry, group.Read) and state.rank else applied


def _first_rank_will_do(state: group.Leading, event: group.RankRead, step: StepFunction) -> Step:
    leases = tuple(
        replace(held, reads=tuple(replace(g, missing=g.missing & {event.rank}) for g in held.reads))
        for held in state.leases
    )
    return _as_shipped(step, replace(state, leases=leases), event)


def _go_on_after_a_gap(state: session.Open, event: session.FrameReceived, step: StepFunction) -> Step:
    if event.lane or event.sequence < state.control_received:
        return _as_shipped(step, state, event)
    return Step(replace(state, control_received=event.sequence + 1), ())


def _kinds(*kinds: str) -> frozenset[str]:
    return frozenset(kinds)


MUTATIONS: Final = (
    Mutation(
        "lease a slot while its read may still land",
        "I1",
        Setup((ONE,), _kinds("cancel"), 1),
        {"slot": on(slots.Leased, slots.LeaseReturned, _free_at_once)},
    ),
    Mutation(
        "treat a timed-out read as ended",
        "I1",
        Setup((ONE,), _kinds("read-timeout"), 1),
        {"slot": on(slots.Leased, TimerExpired, _forget_late_reads)},
    ),
    Mutation(
        "skip the seal check", "I2", REUSE, {"read": on(reads.Sealing, reads.SealRead, _believe_any_seal)}
    ),
    Mutation("read the seal before the last piece", "I2", REUSE._replace(broken=_kinds("early seal"))),
    Mutation(
        "overwrite before the seal is changed",
        "I2",
        REUSE,
        {
            "source": both(
                on(sources.Writing, sources.Written, _seal_when_written),
                both(
                    on(sources.Stable, Event, _free_without_seal),
                    on(sources.Vacant, sources.Reserved, _reserve_without_seal),
                ),
            )
        },
    ),
    Mutation(
        "repeat a seal (also after a restart)",
        "I2",
        REUSE._replace(kinds=_kinds("crash", "part-deadline"), broken=_kinds("repeat a seal")),
    ),
    Mutation(
        "change only the next slot's seal",
        "I2",
        REUSE._replace(rows=(1, 2)),
        {"source": on(sources.Stable, Event, _free_without_seal)},
    ),
    Mutation(
        "reuse a slot whose forward timed out but still runs",
        "I2",
        Setup((ONE,), _kinds("job-timeout"), 1),
        {"job": on(jobs.Running, TimerExpired, _give_up_running)},
    ),
    Mutation(
        "unpin at ForwardDone",
        "I2",
        Setup((ONE,), frozenset(), 0),
        {"part": on(encoder.Open, encoder.SourcePinned, _unpin_announced)},
    ),
    Mutation(
        "drop the job while a sibling still reads",
        "I2",
        Setup((ONE, ONE), frozenset(), 0, pool_slots=2),
        {
            "job": on(jobs.Done, jobs.Left, _drop_job),
            "source": on(sources.Stable, sources.ReleaseWanted, _release_pinned),
        },
        liveness=False,
    ),
    Mutation(
        "count subscribers instead of naming them",
        "I4",
        Setup((ONE, ONE), _kinds("job-timeout"), 1, mailboxes="encoder", pool_slots=2),
        {"job": on(State, jobs.Left, _leave_as_a_number)},
    ),
    Mutation(
        "deliver twice on a repeated ForwardDone",
        "I3",
        Setup((ONE,), _kinds("repeat"), 1, hostile=True),
        {"request": on(t.Delivered, t.SourcesReady, _deliver_again)},
    ),
    Mutation(
        "deliver a read whose attempt has ended",
        "I1",
        Setup((ONE,), _kinds("cut"), 1, mailboxes="prefill"),
        {"request": on(t.Filling, t.ReadEnded, _any_attempt)},
    ),
    Mutation(
        "act on a message of a session that is over",
        "I8",
        Setup((ONE,), _kinds("cut"), 1, broken=_kinds("any session")),
    ),
    Mutation(
        "accept a frame of an earlier session",
        "I8",
        Setup((), _kinds("cut"), 1, broken=_kinds("any frame")),
        world="sessions",
    ),
    Mutation(
        "go on after a gap in a session",
        "I8",
        Setup((), _kinds("drop"), 1),
        {"session": on(session.Open, session.FrameReceived, _go_on_after_a_gap)},
        world="sessions",
    ),
    Mutation(
        "replace one lost rank alone",
        "I6",
        Setup((ONE,), _kinds("lose-rank"), 1, broken=_kinds("replace a rank")),
        {"group": on(group.Leading, group.RankLost, _replace_rank)},
        world="group",
    ),
    Mutation(
        "skip an entry of the group log",
        "I6",
        Setup((ONE,), frozenset(), 0),
        {"rank": on(rank.Following, rank.EntryReceived, _skip_entry)},
        world="group",
    ),
    Mutation(
        "Receipt before all ranks have read",
        "I6",
        Setup((ONE,), frozenset(), 0),
        {"group": on(group.Leading, group.RankRead, _first_rank_will_do)},
        world="group",
    ),
    Mutation(
        "two attempts of a part open at once",
        "I3",
        Setup((ONE,), _kinds("timeout"), 1, hostile=True, broken=_kinds("two attempts")),
    ),
    Mutation(
        "a forward without room",
        "I7",
        Setup((ONE,), frozenset(), 0),
        {"job": on(jobs.Fetching, jobs.MediaArrived, _queue_without_room)},
    ),
    Mutation(
        "a forward without a grant",
        "I7",
        Setup((ONE,), frozenset(), 0),
        {"job": on(jobs.Absent, jobs.Subscribed, _without_grant)},
    ),
    Mutation(
        "hold and wait between parts",
        "I7",
        Setup(((Part((0,)), Part((0,))),) * 2, frozenset(), 0, pool_slots=2, broken=_kinds("hold and wait")),
    ),
    Mutation(
        "evict a result before those who wait for it can pin it",
        "liveness",
        Setup(
            ((Part((0,)), Part((1,))),),
            frozenset(),
            0,
            rows=(1, 1),
            pool_slots=2,
            broken=_kinds("evict before the pin"),
        ),
    ),
    Mutation(
        "a protocol actor restarted inside its incarnation forgets a lease whose read still runs",
        "I1",
        Setup((ONE,), frozenset(), 0, broken=_kinds("restart buffers")),
    ),
)


def run_mutation(mutation: Mutation) -> MutationResult:
    """Explore until it is found."""
    world = WORLDS[mutation.world](mutation.setup, mutation.patches)
    explored: Explored = explore(world, deadlines=mutation.setup.hostile, liveness=mutation.liveness)
    found = explored.found
    if found is None:
        return MutationResult(
            mutation.name, mutation.invariant, None, 0, explored.states, explored.seconds, ()
        )
    script = script_of(mutation.setup, found.trace, world=mutation.world, patches=mutation.patches)
    return MutationResult(
        mutation.name,
        mutation.invariant,
        str(found.violation),
        len(found.trace),
        explored.states,
        explored.seconds,
        (f"# {found.violation}", *script),
    )
