"""The model checker: what it explores holds, and scripts come out as they went in."""

import pytest

from epd.check.configurations import CONFIGURATIONS
from epd.check.coverage import coverage_of
from epd.check.explorer import explore
from epd.check.mutations import MUTATIONS, Mutation, run_mutation
from epd.check.script import ScriptError, run, script_of
from epd.check.setup import Part, Setup
from epd.check.world import World
from epd.cli.model_check import explore_all


@pytest.mark.slow
def test_every_configuration_holds_within_its_bounds_and_all_cells_are_visited() -> None:
    results = explore_all([c.name for c in CONFIGURATIONS], None, None)
    coverage = coverage_of(results)
    assert coverage.missing == ()
    assert coverage.wrongly_listed == ()
    for result in results:
        assert result.violation is None, "\n".join(result.script)
        assert result.complete, result.name


def test_a_trace_is_a_script_that_comes_out_as_it_went_in() -> None:
    world = World(Setup((((Part((0,)),)),), frozenset(), 0))
    trace = []
    state = world.initial()
    while moves := list(world.moves(state)):
        trace.append(moves[0])
        state = world.apply(state, moves[0])
    script = script_of(world.setup, trace)
    assert "> request 0: Filling->Delivered on ReadEnded  SendReceipt  Deliver" in script
    assert list(run(script)) == script
    assert list(run([*script, "held"]))[-1] == "> nothing"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (["submit r0"], "line 1: 'submit r0' before `world`"),
        (["world requests=x"], "line 1: 'world requests=x': 'x' is no value of 'requests', or"),
        (["world requests=0", "# fine", "take r0"], "line 3: 'take r0' cannot happen here; what can:"),
    ],
)
def test_a_script_that_cannot_happen_names_its_line(script: list[str], says: str) -> None:
    with pytest.raises(ScriptError) as caught:
        list(run(script))
    assert caught.value.message.startswith(says)


def test_an_exploration_that_was_cut_short_is_not_complete() -> None:
    whole = explore(World(Setup((((Part((0,)),)),), frozenset(), 0)))
    short = explore(World(Setup((((Part((0,)),)),), frozenset(), 0)), max_depth=3)
    assert whole.complete and not short.complete
    assert short.states < whole.states


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_seeded_bug_is_found_with_the_invariant_it_breaks(mutation: Mutation) -> None:
    result = run_mutation(mutation)
    assert result.found, f"{result.violation} after {result.states} states"
