"""The model checker: what it explores holds, and scripts come out as they went in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from epd.check.configurations import CONFIGURATIONS, Result
from epd.check.coverage import coverage_of
from epd.check.explorer import explore
from epd.check.mutations import MUTATIONS, Mutation, run_mutation
from epd.check.relation import Transition
from epd.check.script import ScriptError, run, script_of
from epd.check.setup import Part, Setup
from epd.check.traces.explored import wrongly_listed
from epd.check.world import World
from epd.cli import model_check
from epd.protocol import encoder
from epd.protocol.machine import Effect
from epd.protocol.registry import MACHINES
from epd.protocol.trace import LimitsRecord, StepRecord, TraceReader, encode_block, encode_header

TRACES = Path(__file__).parent.parent / "traces"
SUCCESS = TRACES / "0.2.0" / "success-encoder.trace"


@pytest.fixture(scope="module")
def explored() -> list[Result]:
    """All configurations, explored once for all tests."""
    return model_check.explore_all([c.name for c in CONFIGURATIONS], None, None)


@pytest.mark.slow
def test_every_configuration_holds_within_its_bounds_and_all_cells_are_visited(
    explored: list[Result],
) -> None:
    coverage = coverage_of(explored)
    assert coverage.missing == ()
    assert coverage.wrongly_listed == ()
    for result in explored:
        assert result.violation is None, "\n".join(result.script)
        assert result.complete, result.name


def compared(
    explored: list[Result], monkeypatch: pytest.MonkeyPatch, *paths: Path
) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of `epd model-check --traces`, which is to find what was explored already."""
    monkeypatch.setattr(model_check, "explore_all", lambda *_: explored)
    arguments = ["--json", *(word for path in paths for word in ("--traces", str(path)))]
    said = CliRunner().invoke(model_check.model_check_command, arguments)
    return said.exit_code, msgspec.json.decode(said.stdout)


@pytest.mark.slow
def test_whatever_the_kept_runs_did_was_explored_or_is_listed(
    explored: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, report = compared(explored, monkeypatch, TRACES)
    assert report["traces"]["not_explored"] == []
    assert report["relation"]["wrongly_listed"] == []
    assert (status, report["ok"]) == (0, True)
    assert report["traces"]["nodes"] == len(list(TRACES.rglob("*.trace")))
    assert report["traces"]["transitions"] > 100


def rewritten(path: Path, into: Path, change: Callable[[Effect], bool]) -> int:
    """A copy of a trace; its first step with effects of which `change` is true loses them. Its number."""
    with path.open("rb") as file:
        reader = TraceReader(file.read)
        records = list(reader)
    limits = [(record.kind, record.limits) for record in records if isinstance(record, LimitsRecord)]
    steps: list[Any] = []
    found = None
    for record in records:
        if not isinstance(record, StepRecord):
            continue
        spec = MACHINES[record.kind]
        effects = spec.decode_effects(record.effects)
        if found is None and any(map(change, effects)):
            found = len(steps)
            effects = tuple(effect for effect in effects if not change(effect))
        steps.append((record.kind, record.key, record.now_s, spec.decode_event(record.event), effects))
    assert found is not None
    into.write_bytes(encode_header(reader.header) + encode_block(limits) + encode_block(steps))
    return found


@pytest.mark.slow
def test_a_recorded_step_that_the_model_never_makes_is_found(
    explored: list[Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    altered = tmp_path / "altered.trace"
    step = rewritten(SUCCESS, altered, lambda effect: isinstance(effect, encoder.UnpinSource))
    status, report = compared(explored, monkeypatch, altered)
    assert (status, report["ok"]) == (1, False)
    (unknown,) = report["traces"]["not_explored"]
    assert unknown == {
        "transition": "part: Open (Announced->Received) on ReceiptReceived  Unsubscribe",
        "times": 1,
        "trace": str(altered),
        "node": "encoder",
        "step": step,
    }


def test_a_run_is_compared_with_what_was_explored_and_with_nothing_else() -> None:
    """One configuration knows too little of what nodes do."""
    arguments = ["--only", "too-large", "--traces", str(SUCCESS)]
    said = CliRunner().invoke(model_check.model_check_command, arguments)
    assert said.exit_code == 1
    assert "neither explored nor listed: part: Open on GrantReceived  TellGranted" in said.stdout


@pytest.mark.parametrize("damage", ["nothing", "no trace"])
def test_traces_that_cannot_be_read_are_said_before_anything_is_explored(damage: str, tmp_path: Path) -> None:
    if damage == "no trace":
        (tmp_path / "a.trace").write_bytes(b"something else")
    said = CliRunner().invoke(model_check.model_check_command, ["--traces", str(tmp_path)])
    assert said.exit_code == 2
    assert ("not a trace of epd" if damage == "no trace" else "no trace (NAME.trace) in") in said.stderr


SMALLEST = """
job: Absent->Unstarted on Subscribed
job: AwaitingStaging->Queued on StagingReserved  QueueForward
job: Done on Left
job: Done->Absent on TimerExpired  ReleaseStaged
job: Fetching on MediaProgress
job: Fetching->AwaitingStaging on MediaArrived  AskStaging
job: Queued->Running on ForwardStarted
job: Running->Done on ForwardEnded  DropMedia MarkWritten TellReady
job: Unstarted->Fetching on Granted  FetchMedia
part: Idle->Open on RequestReceived  SendMetadata Subscribe
part: Open (Pinning->Announced) on SourcePinned  SendForwardDone(last)
part: Open (Waiting->Pinning) on JobReady  PinSource
part: Open on GrantReceived  TellGranted
part: Open->Idle on ReceiptReceived  AttemptEnded UnpinSource Unsubscribe
read: Idle->Reading on ReadWanted  PostPiece
read: Reading->Sealing on PieceEnded  ReadSeal
read: Sealing->Ended on SealRead  Finish
request: AwaitingRoom->Filling (Sized->Granted) on RoomLeased  SendGrant
request: Consumed->Ended on Released  ReturnLease
request: Delivered->Consumed on Taken
request: Delivered->Ended on Released  ReturnLease
request: Filling (Granted->Granted) on SourcesReady(last)  StartRead
request: Filling->Delivered on ReadEnded  Deliver SendReceipt(last)
request: Negotiating->AwaitingRoom (Requested->Sized) on MetadataReceived  AskRoom
request: New->Negotiating on Submitted  SendEncodeRequest
slot: Free->Leased on LeaseTaken
slot: Leased on ReadPosted
slot: Leased on ReadTerminal  TellReadEnded
slot: Leased on ReadWanted  PostRead
slot: Leased->Free on LeaseReturned  FreeExtents
source: Stable on Unpinned
source: Stable->Vacant on ReleaseWanted  FreeExtent WriteSeal
source: Vacant->Writing on Reserved  WriteSeal
source: Writing on PinWanted
source: Writing->Stable on Written  TellPinned
"""


def test_the_smallest_exploration_makes_these_transitions() -> None:
    """One request for one picture of one row, and nothing goes wrong."""
    world = World(Setup((((Part((0,)),)),), frozenset(), 0, rows=(1,)))
    explore(world)
    assert sorted(map(str, world.machines.relation)) == SMALLEST.split("\n")[1:-1]


@pytest.mark.parametrize(
    "listed",
    [
        Transition("slot", "Free", "LeaseTaken", "Leased"),  # it is explored
        Transition("slot", "Free", "LeaseGiven", "Leased"),
        Transition("slots", "Free", "LeaseTaken", "Leased"),
        Transition("slot", "Free", "LeaseTaken", "Leased", ("Deliver",)),
    ],
)
def test_what_is_listed_as_unexplored_must_exist_and_not_be_explored(listed: Transition) -> None:
    relation = {Transition("slot", "Free", "LeaseTaken", "Leased")}
    true = Transition("slot", "Leased", "ReadPosted", "Leased")
    assert wrongly_listed(relation, {listed: "", true: ""}) == (listed,)


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
