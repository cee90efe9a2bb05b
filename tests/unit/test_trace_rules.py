"""The rules that recorded runs are checked against: kept by all of them, each broken once on purpose."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from epd.check.traces.check import check_traces
from epd.check.traces.findings import Finding
from epd.check.traces.node_rules import check_node
from epd.check.traces.pair_rules import check_pairs
from epd.check.unreachable import UNREACHABLE
from epd.cli.replay import run
from epd.observe.timeline.load import NodeTrace, TracedStep, load
from epd.observe.timeline.merge import merge
from epd.observe.timeline.transfers import transfers_of
from epd.protocol import encoder as e
from epd.protocol import group as g
from epd.protocol import jobs as j
from epd.protocol import prefill_types as p
from epd.protocol import rank as k
from epd.protocol import reads as r
from epd.protocol import slots as sl
from epd.protocol import sources as so
from epd.protocol.ids import Incarnation, LeaseId, ReadId, RegionId, Seal
from epd.protocol.machine import Effect, Event, TimerExpired
from epd.protocol.messages import Source
from epd.protocol.trace import StepWritten, encode_block

TRACES = Path(__file__).parent.parent / "traces"
RUNS: dict[str, list[Path]] = {}
for trace in sorted(TRACES.rglob("*.trace")):
    run_name = re.sub(r"-(prefill|encoder(-2)?)$", "", trace.stem)
    RUNS.setdefault(f"{trace.parent.name}/{run_name}", []).append(trace)
OF_0_2_0 = {
    "cancel",
    "encoder-restarted",
    "join-orders",
    "retry",
    "session-remade",
    "shared-job",
    "stopped-encoder",
    "success",
}


def test_every_run_of_this_release_is_there() -> None:
    assert {name.partition("/")[2] for name in RUNS if name.startswith("0.2.0/")} == OF_0_2_0


@pytest.mark.parametrize("name", RUNS)
def test_every_recorded_run_replays_identically_and_keeps_every_rule(name: str) -> None:
    checked = check_traces(RUNS[name])
    assert checked.ok, checked
    assert sum(one.steps for one in checked.replayed) > 100


_OF_THE_MODEL = {
    "prefill": "request",
    "slots": "slot",
    "reads": "read",
    "encoder": "part",
    "jobs": "job",
    "sources": "source",
    "group": "group",
    "rank": "rank",
}
"""The model's names of the machines. Sessions are left out: there frames are sent as they are built."""


@pytest.mark.parametrize("name", RUNS)
def test_real_runs_visit_no_cell_that_the_model_does_not_reach(name: str) -> None:
    visited = {
        (_OF_THE_MODEL[step.kind], type(step.before).__name__, type(step.event).__name__)
        for node in load(RUNS[name]).nodes
        for step in node.steps
        if step.kind in _OF_THE_MODEL
    }
    assert len(visited) > 20
    assert not visited & UNREACHABLE.keys()


def transfers(name: str) -> list[Any]:
    return transfers_of(merge(load(RUNS[f"0.2.0/{name}"]).nodes))


def test_the_runs_are_what_their_names_say() -> None:
    cancelled = [t.phases[-1].state for t in transfers("cancel") if t.outcome == "cancelled"]
    assert cancelled == ["requested", "metadata", "buffer-registered", "forward-done"]
    assert [t.attempts for t in transfers("encoder-restarted")] == [1, 2]
    assert [t.attempts for t in transfers("stopped-encoder")] == [2]
    assert [t.attempts > 1 and t.delivered for t in transfers("retry")] == [True]
    assert [t.outcome for t in transfers("shared-job")] == ["freed", "freed"]
    for name, forwards in (("shared-job", 1), ("join-orders", 1), ("success", 3)):
        steps = load(RUNS[f"0.2.0/{name}"]).nodes[0].steps + load(RUNS[f"0.2.0/{name}"]).nodes[1].steps
        assert sum(isinstance(step.event, j.ForwardStarted) for step in steps) == forwards
    encoder = next(node for node in load(RUNS["0.2.0/join-orders"]).nodes if node.header.role == "encoder")
    facts = [
        type(step.event)
        for step in encoder.steps
        if step.kind == "encoder" and isinstance(step.event, e.GrantReceived | e.JobReady)
    ]
    assert facts == [e.GrantReceived, e.JobReady, e.JobReady, e.GrantReceived]
    for name in ("session-remade", "stopped-encoder"):
        sessions = {
            step.key
            for node in load(RUNS[f"0.2.0/{name}"]).nodes
            for step in node.steps
            if step.kind == "session"
        }
        assert len(sessions) >= 2


# -- each rule, broken -----------------------------------------------------------------------------


class Tampered:
    """A recorded run to be changed."""

    def __init__(self, name: str = "success") -> None:
        self.nodes = load(RUNS[f"0.2.0/{name}"]).nodes

    def drop(self, kind: str, event: type[Event], nth: int = 0) -> None:
        node, at = self._find(lambda step: step.kind == kind and isinstance(step.event, event), nth)
        del node.steps[at]

    def repeat(self, kind: str, effect: type[Effect]) -> None:
        node, at = self._having(kind, effect)
        node.steps.insert(at, node.steps[at])

    def change_event(self, kind: str, event: type[Event], **changes: Any) -> None:
        node, at = self._find(lambda step: step.kind == kind and isinstance(step.event, event), 0)
        node.steps[at] = node.steps[at]._replace(event=replace(node.steps[at].event, **changes))

    def replace_event(self, kind: str, event: type[Event], by: Event) -> None:
        node, at = self._find(lambda step: step.kind == kind and isinstance(step.event, event), 0)
        node.steps[at] = node.steps[at]._replace(event=by)

    def change_effect(self, kind: str, effect: type[Effect], nth: int = 0, **changes: Any) -> None:
        node, at = self._having(kind, effect, nth)
        effects = tuple(
            replace(one, **changes) if isinstance(one, effect) else one for one in node.steps[at].effects
        )
        node.steps[at] = node.steps[at]._replace(effects=effects)

    def drop_effect(self, kind: str, effect: type[Effect]) -> None:
        node, at = self._having(kind, effect)
        effects = tuple(one for one in node.steps[at].effects if not isinstance(one, effect))
        node.steps[at] = node.steps[at]._replace(effects=effects)

    def move_effect(self, kind: str, effect: type[Effect], before: type[Event], nth: int = 0) -> None:
        """Have it done in an earlier step of the same machine."""
        node, at = self._having(kind, effect, nth)
        moved = next(one for one in node.steps[at].effects if isinstance(one, effect))
        key = node.steps[at].key
        to = next(
            n
            for n, s in enumerate(node.steps)
            if (s.kind, s.key) == (kind, key) and isinstance(s.event, before)
        )
        node.steps[to] = node.steps[to]._replace(effects=(*node.steps[to].effects, moved))

    def findings(self) -> list[Finding]:
        merged = merge(self.nodes)
        return [*(f for node in merged.nodes for f in check_node(node)), *check_pairs(merged)]

    def _having(self, kind: str, effect: type[Effect], nth: int = 0) -> tuple[NodeTrace, int]:
        return self._find(
            lambda step: step.kind == kind and any(isinstance(one, effect) for one in step.effects), nth
        )

    def _find(self, matches: Callable[[TracedStep], bool], nth: int) -> tuple[NodeTrace, int]:
        found = [(node, at) for node in self.nodes for at, step in enumerate(node.steps) if matches(step)]
        return found[nth]


def without_a_new_seal(tampered: Tampered) -> None:
    tampered.drop_effect("sources", so.FreeExtent)
    node, at = tampered._having("sources", so.WriteSeal)
    step = node.steps[at]
    node.steps[at] = step._replace(effects=(so.FreeExtent(LeaseId(0)), *step.effects))


SOURCE = Source(RegionId(0), 0, 4, Seal(1))
BROKEN: list[tuple[str, str, Callable[[Tampered], None]]] = [
    ("I1", "freed while reads", lambda t: t.move_effect("slots", sl.FreeExtents, sl.ReadWanted)),
    ("I1", "posted again", lambda t: t.repeat("slots", sl.PostRead)),
    ("I2", "called whole", lambda t: t.change_event("slots", sl.ReadTerminal, outcome="failed")),
    ("I1", "may still be written", lambda t: t.move_effect("reads", r.Finish, r.ReadWanted)),
    ("I2", "the seal is read before", lambda t: t.move_effect("reads", r.ReadSeal, r.ReadWanted)),
    ("I2", "good with seal", lambda t: t.change_event("reads", r.SealRead, value=7)),
    ("I2", "written again", lambda t: t.repeat("sources", so.WriteSeal)),
    ("I2", "freed without a new seal", without_a_new_seal),
    ("I2", "read it", lambda t: t.drop("sources", so.Unpinned)),
    ("I2", "may still write", lambda t: t.move_effect("sources", so.FreeExtent, so.Reserved)),
    ("I3", "told delivered, delivered", lambda t: t.repeat("prefill", p.Deliver)),
    ("I3", "items whole", lambda t: t.drop("prefill", p.ReadEnded)),
    ("I3", "again", lambda t: t.repeat("prefill", p.SendEncodeRequest)),
    ("I8", "which is not open", lambda t: t.change_effect("prefill", p.StartRead, attempt=9)),
    ("I5", "before its consumer", lambda t: t.move_effect("prefill", p.ReturnLease, p.Taken)),
    ("I7", "without its grant", lambda t: t.drop("encoder", e.GrantReceived)),
    ("I2", "not by its pin", lambda t: t.move_effect("encoder", e.SendForwardDone, e.GrantReceived)),
    ("I3", "announced again", lambda t: t.repeat("encoder", e.SendForwardDone)),
    ("I7", "a forward that nobody", lambda t: t.drop("jobs", j.Granted)),
    ("I6", "entry 2 after 2", lambda t: t.change_effect("group", g.Append, number=2)),
    ("I6", "entry", lambda t: t.drop("rank", k.EntryReceived)),
    ("cell", "cannot be", lambda t: t.replace_event("slots", sl.LeaseTaken, TimerExpired())),
    (
        "cell",
        "has no handler and did",
        lambda t: t.replace_event("encoder", e.RequestReceived, e.SessionEnded()),
    ),
    ("channel", "was never sent", lambda t: t.drop_effect("encoder", e.SendForwardDone)),
    ("channel", "was due", lambda t: t.drop("prefill", p.SourcesReady)),
    ("I2", "was not announced", lambda t: t.change_effect("prefill", p.StartRead, source=SOURCE)),
    ("I7", "was not granted", lambda t: t.change_effect("prefill", p.StartRead, lease=77)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "message", "tamper"), BROKEN, ids=[f"{rule} {message}" for rule, message, _ in BROKEN]
)
def test_each_broken_rule_is_found_where_it_was_broken(
    rule: str, message: str, tamper: Callable[[Tampered], None]
) -> None:
    tampered = Tampered()
    tamper(tampered)
    assert [f for f in tampered.findings() if f.rule == rule and message in f.message], tampered.findings()


def test_two_attempts_of_a_part_at_once_are_found() -> None:
    tampered = Tampered("stopped-encoder")
    tampered.drop("prefill", p.SessionEnded)
    assert any(f.rule == "I3" and "beside" in f.message for f in tampered.findings())


def test_replay_says_which_rule_was_broken_and_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace of a node with a bug: a lease that was freed while a read into it ran, then as recorded."""
    path = tmp_path / "bug.trace"
    (source,) = [path for path in RUNS["0.2.0/success"] if "prefill" in path.name]
    lease, group = LeaseId(90), Incarnation(1)
    wrong: list[StepWritten] = [
        ("slots", 90, 1.0, sl.LeaseTaken(lease), ()),
        ("slots", 90, 1.1, sl.ReadTerminal(ReadId(5), "ok"), (sl.FreeExtents(lease),)),
        ("group", 91, 1.2, g.RankLost(group, 0), (g.Append(5, g.Free(lease)),)),
    ]
    path.write_bytes(source.read_bytes() + encode_block(wrong))
    assert run([path], as_json=False) == 1
    out = capsys.readouterr().out
    assert "diverged at step" in out
    assert "violated I6: prefill step" in out
    assert run([path], as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    violation = next(one for one in report["violations"] if one["rule"] == "I6")
    assert (violation["kind"], violation["key"], violation["message"]) == ("group", "91", "entry 5 after 0")
