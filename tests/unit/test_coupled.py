"""All machines coupled, in random walks: everything ends, nothing is left, what is delivered is whole.

The worlds are the model checker's, too large to be explored: five requests of several parts and pictures,
two encoders, mailboxes between the actors. A failing walk is printed as a script.
"""

from collections import Counter
from random import Random

import pytest

from epd.check.faults import ALL, HOSTILE
from epd.check.script import script_of
from epd.check.setup import Part, Setup
from epd.check.walk import walk
from epd.check.world import World

REQUESTS = (
    (Part((0, 1)), Part((2,), 1)),
    (Part((1,)),),
    (Part((3,)), Part((0,), 1)),
    (Part((0,)),),
    (Part((2, 3), 1),),
)
MILD = Setup(
    REQUESTS,
    frozenset({"cut", "crash", "evict"}),
    6,
    rows=(1, 2, 1, 2),
    encoders=2,
    staging_slots=3,
    pool_slots=5,
    attempts=9,
    mailboxes="both",
)
"""What a request must survive: nothing of this may fail it."""
ROUGH = MILD._replace(kinds=ALL - HOSTILE - {"crash-prefill"}, faults=12)


def told_in(setup: Setup, seeds: range) -> Counter[str]:
    """What the consumers were told in all of these walks."""
    told: Counter[str] = Counter()
    for seed in seeds:
        if seed % 20 == 0:
            world = World(setup)  # it remembers every step: not for ever
        state, found = walk(world, Random(seed), 600, fault_chance=0.02)
        if found is not None:
            script = "\n".join(script_of(setup, found.trace))
            pytest.fail(f"seed {seed}: {found.violation}\n{script}")
        told.update(word for words in world.told(state) for word in words)
    return told


@pytest.mark.slow
def test_without_faults_and_under_mild_ones_every_request_is_delivered() -> None:
    assert set(told_in(MILD._replace(faults=0), range(40))) == {"delivered"}
    assert set(told_in(MILD, range(200))) == {"delivered"}


@pytest.mark.slow
def test_under_rough_faults_every_request_ends_once_and_nothing_is_left() -> None:
    told = told_in(ROUGH, range(400))
    assert told["delivered"] > told.total() / 5
    assert {"cancelled", "media_mismatch"} <= set(told)
