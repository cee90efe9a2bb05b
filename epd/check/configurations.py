"""What `epd model-check` explores: small worlds, each for what it can show, within stated bounds."""

from typing import Final, NamedTuple

from epd.check.explorer import explore
from epd.check.faults import ALL, CHANNEL, CONSUMER, ENCODER, HOSTILE, RANKS, READS, TIMEOUTS
from epd.check.machines import Cell
from epd.check.relation import Transition
from epd.check.script import WORLDS, script_of
from epd.check.setup import Part, Setup

ONE: Final = (Part((0,)),)
"""A request for one picture."""
OTHER: Final = (Part((1,)),)
ORDERED: Final = ALL - HOSTILE


class Result(NamedTuple):
    """What came of one configuration; `violation` and `script` if one was found."""

    name: str
    bounds: dict[str, int]
    states: int
    transitions: int
    depth: int
    complete: bool
    seconds: float
    visited: frozenset[Cell]
    relation: frozenset[Transition]
    violation: str | None
    script: tuple[str, ...]


class Configuration(NamedTuple):
    """`about` says what it is for; `world` which world it is (see `script.WORLDS`)."""

    name: str
    about: str
    setup: Setup
    world: str = "nodes"


CONFIGURATIONS: Final = (
    Configuration("one-by-one", "1 request, 1 encoder, all faults", Setup((ONE,), ORDERED, 3)),
    Configuration(
        "two-by-one-slot",
        "2 requests for different pictures that share one slot of either pool; all faults",
        Setup((ONE, OTHER), ORDERED, 2, rows=(1, 2)),
    ),
    Configuration(
        "retry-elsewhere",
        "1 request, 2 encoders, 3 attempts: encoders die, reads fail",
        Setup((ONE,), frozenset({"crash", "read-fails", "read-timeout"}), 2, encoders=2, attempts=3),
    ),
    Configuration(
        "two-encoders",
        "1 request, 2 encoders, 3 attempts: sessions, reads, sizes, draining",
        Setup((ONE,), CHANNEL | READS | {"timeout", "read-timeout", "drain"}, 1, encoders=2, attempts=3),
    ),
    Configuration(
        "shared-job",
        "2 requests for the same picture: one job, two subscribers",
        Setup((ONE, ONE), ORDERED, 1, pool_slots=2),
    ),
    Configuration(
        "two-parts",
        "1 request in two parts on two encoders, all leased in one go",
        Setup(
            ((Part((0,)), Part((1,), 1)),),
            CHANNEL | {"timeout", "cancel", "drain"},
            1,
            rows=(1, 1),
            encoders=2,
            pool_slots=2,
        ),
    ),
    Configuration(
        "two-items",
        "1 request of two pictures in one part, one staging slot: each is announced by itself",
        Setup(((Part((0, 1)),),), ORDERED, 1, rows=(1, 1), pool_slots=2),
    ),
    Configuration(
        "two-items-two-slots",
        "as before with a staging slot for each: a read fails while the other picture is announced",
        Setup(((Part((0, 1)),),), READS, 1, rows=(1, 1), staging_slots=2, pool_slots=2),
    ),
    Configuration(
        "two-parts-one-fails",
        "1 request in two parts on two encoders; a picture of one is not what was announced",
        Setup(
            ((Part((0,)), Part((1,), 1)),),
            frozenset({"bad-media"}),
            1,
            rows=(1, 1),
            encoders=2,
            pool_slots=2,
        ),
    ),
    Configuration(
        "many-pieces",
        "1 request whose read has more pieces than are posted at once; some fail",
        Setup((ONE,), READS, 1, rows=(5,)),
    ),
    Configuration(
        "mailboxes",
        "1 request, 1 encoder; messages between a node's actors wait in their mailboxes",
        Setup((ONE,), ORDERED, 1, mailboxes="both"),
    ),
    Configuration(
        "mailboxes-shared-job",
        "2 requests for the same picture, 2 staging slots; mailboxes in the encoder",
        Setup((ONE, ONE), CONSUMER | {"evict"}, 1, staging_slots=2, pool_slots=2, mailboxes="encoder"),
    ),
    Configuration(
        "too-large",
        "1 request that would not fit an empty pool",
        Setup(((Part((0, 0)),),), CONSUMER | CHANNEL, 1, rows=(1,)),
    ),
    Configuration(
        "too-large-to-stage",
        "1 request that an encoder's staging would never hold",
        Setup((ONE,), CONSUMER | CHANNEL, 1, staging_rows=1),
    ),
    Configuration(
        "hostile",
        "1 request, 1 encoder; messages are dropped, repeated and reordered",
        Setup((ONE,), HOSTILE | READS | TIMEOUTS | CONSUMER, 2, hostile=True),
    ),
    Configuration(
        "group-of-two",
        "2 requests that share one slot, on 2 ranks; reads end differently on each; a rank is lost",
        Setup((ONE, ONE), READS | CONSUMER | RANKS | {"cut", "timeout", "read-timeout"}, 2),
        "group",
    ),
    Configuration(
        "sessions",
        "2 sessions, one after the other: ended by either side, by silence, by a lost lane",
        Setup((), frozenset({"cut", "close", "probe", "beat", "timeout", "refuse"}), 1),
        "sessions",
    ),
    Configuration(
        "sessions-silent",
        "1 session whose peer is silent, suspected, heard again; both sides may close it at once",
        Setup((), frozenset({"silence", "cut", "close", "probe", "beat"}), 2, attempts=1),
        "sessions",
    ),
    Configuration(
        "sessions-hostile",
        "2 sessions on a wire that drops, repeats, reorders and garbles frames",
        Setup((), HOSTILE | {"reorder", "garble"}, 2),
        "sessions",
    ),
)


def bounds_of(setup: Setup, longest_queue: int) -> dict[str, int]:
    """The bounds of an exploration, by name, for the JSON output."""
    kinds = setup.kinds

    def at_most(*names: str) -> int:
        return setup.faults if kinds & set(names) else 0

    return {
        "requests": len(setup.requests),
        "items": sum(len(part.kinds) for parts in setup.requests for part in parts),
        "encoders": setup.encoders,
        "pool_slots": setup.pool_slots,
        "staging_slots": setup.staging_slots,
        "attempts": setup.attempts,
        "faults": setup.faults,
        "sessions_cut": at_most("cut"),
        "crashes": at_most("crash", "crash-prefill"),
        "drops": at_most("drop"),
        "duplicates": at_most("repeat"),
        "timeouts": at_most(*TIMEOUTS),
        "read_faults": at_most(*READS),
        "encoder_faults": at_most(*ENCODER),
        "cancels": at_most(*CONSUMER),
        "channel_length": longest_queue,
    }


def run_configuration(
    configuration: Configuration, *, max_depth: int | None = None, faults: int | None = None
) -> Result:
    """Explore it; `faults` replaces its own bound. `channel_length` is what the longest queue reached."""
    setup = configuration.setup
    if faults is not None:
        setup = setup._replace(faults=faults)
    world = WORLDS[configuration.world](setup, None)
    explored = explore(world, max_depth=max_depth, deadlines=setup.hostile)
    script: tuple[str, ...] = ()
    violation = None
    if explored.found is not None:
        violation = str(explored.found.violation)
        script = (f"# {violation}", *script_of(setup, explored.found.trace, world=configuration.world))
    return Result(
        configuration.name,
        bounds_of(setup, world.longest_queue),
        explored.states,
        explored.transitions,
        explored.depth,
        explored.complete,
        explored.seconds,
        frozenset(world.machines.visited),
        frozenset(world.machines.relation),
        violation,
        script,
    )


def run_named(name: str, *, max_depth: int | None = None, faults: int | None = None) -> Result:
    """As `run_configuration`, by name: for another process."""
    configuration = next(c for c in CONFIGURATIONS if c.name == name)
    return run_configuration(configuration, max_depth=max_depth, faults=faults)
