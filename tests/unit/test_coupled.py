"""All machines coupled, thousands of seeds: everything ends, nothing is left, what is delivered is whole.

A failing seed is repeated by `run(seed, FAULTS)`.
"""

from collections import Counter

import pytest
from coupled_base import Faults
from coupled_world import World

MILD = Faults(session_ends=2, crashes=1, evictions=12, drains=2)
"""What a request must survive: nothing of this may fail it."""
ROUGH = Faults(
    session_ends=5,
    crashes=2,
    evictions=12,
    cancels=1,
    drains=2,
    read_fails=0.05,
    read_hangs=0.1,
    forward_fails=0.1,
    forward_hangs=0.1,
    media_fail=0.05,
    early_timers=True,
)


def run(seed: int, faults: Faults, requests: int = 5) -> World:
    world = World(seed, faults, requests)
    try:
        world.run(faulty_steps=400)
        assert world.residue() == {}
        outcomes = world.prefill.outcomes
        assert len(outcomes) == requests
        assert all(len(told) == 1 for told in outcomes.values()), "each request has one outcome"
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    return world


@pytest.mark.slow
def test_without_faults_and_under_mild_ones_every_request_is_delivered() -> None:
    for seed in range(400):
        faults = MILD if seed % 4 else Faults()
        world = run(seed, faults)
        told = Counter(code for codes in world.prefill.outcomes.values() for code in codes)
        assert set(told) == {"delivered"}, f"seed {seed}: {told}"


@pytest.mark.slow
def test_under_rough_faults_every_request_ends_once_and_nothing_is_left() -> None:
    told: Counter[str] = Counter()
    for seed in range(600):
        world = run(seed, ROUGH)
        told.update(code for codes in world.prefill.outcomes.values() for code in codes)
    assert told["delivered"] > sum(told.values()) / 3
    assert {"cancelled", "media_mismatch"} <= set(told)
