import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import msgspec
import pytest
import toy_door as door
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from epd.cli.replay import replay_command, run
from epd.protocol import slots
from epd.protocol.ids import Attempt, Incarnation, LeaseId, NodeId, Part, ReadId, RegionId, Seal, SessionId
from epd.protocol.machine import Event, TimerExpired
from epd.protocol.messages import Source
from epd.protocol.registry import MACHINES, Former, MachineSpec, machines_of
from epd.protocol.replay import replay
from epd.protocol.trace import LOGIC_VERSION, Record, StepRecord, TraceReader, UnreadableTrace, encode_block
from epd.runtime.machines import MachineFailed, MachineTable
from epd.runtime.recorder import Recorder
from epd.runtime.timers import Timers
from epd.testing.virtual_clock import VirtualClock

TOYS = {"door": MachineSpec(door)}
LIMITS = door.Limits(open_s=3.0)

Feeding = list[tuple[int, Event, float]]


def record(path: Path, kind: str, machine: Any, limits: Any, feeding: Feeding) -> list[Record]:
    """Feed a table on a virtual clock with a recorder; the records that stand in the file."""
    clock = VirtualClock()
    timers = Timers(clock, clock.call_at)
    recorder = Recorder(path, NodeId("node"), "prefill", Incarnation(1), timers, 0.0)
    table = MachineTable(kind, machine, limits, clock, timers, recorder, lambda key, effects: None)
    try:
        for key, event, then_s in feeding:
            table.feed(("house", key), event)
            clock.advance(then_s)
    except MachineFailed:
        pass
    finally:
        recorder.close()
    with path.open("rb") as file:
        return list(TraceReader(file.read))


FEEDING: Feeding = [
    (1, door.Opened("ann"), 1.0),
    (2, door.Opened("bob"), 1.0),
    (1, door.Passed("cat"), 5.0),
    (1, door.Passed("too late"), 0.0),
    (1, door.BrickedUp(), 0.0),
    (2, door.Opened("dan"), 9.0),
]

events = st.one_of(
    st.builds(door.Opened, st.text()),
    st.builds(door.Passed, st.text()),
    st.just(door.WedgedOpen()),
    st.just(door.BrickedUp()),
)


@settings(deadline=None)  # a file and a thread for each example
@given(st.lists(st.tuples(st.integers(0, 3), events, st.floats(0, 5)), max_size=40))
def test_what_was_recorded_replays_identically(
    tmp_path_factory: pytest.TempPathFactory, feeding: Feeding
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-trace"
    assert replay(record(path, "door", door, LIMITS, feeding), TOYS) is None


def test_one_flipped_event_diverges_at_its_record(tmp_path: Path) -> None:
    records = record(tmp_path / "trace", "door", door, LIMITS, FEEDING)
    at = next(n for n, r in enumerate(records) if isinstance(r, StepRecord) and r.key == ("house", 2))
    step = records[at]
    assert isinstance(step, StepRecord)
    records[at] = step._replace(event=msgspec.Raw(msgspec.msgpack.encode(door.Opened("eve"))))
    divergence = replay(records, TOYS)
    assert divergence is not None
    assert divergence.index == at - 1  # the limits come first
    assert (divergence.kind, divergence.key) == ("door", ("house", 2))
    assert divergence.expected == (door.Ring("bob"), door.Light(True))
    assert divergence.got == (door.Ring("eve"), door.Light(True))
    assert divergence.raised is None


def test_a_lost_record_diverges_where_its_state_is_missed(tmp_path: Path) -> None:
    records = record(tmp_path / "trace", "door", door, LIMITS, FEEDING)
    del records[1]
    divergence = replay(records, TOYS)
    assert divergence is not None
    assert divergence.event == door.Passed("cat")


def test_other_effects_in_another_order_diverge(tmp_path: Path) -> None:
    records = record(tmp_path / "trace", "door", door, LIMITS, FEEDING)
    step = records[1]
    assert isinstance(step, StepRecord)
    swapped = msgspec.msgpack.encode((door.Light(True), door.Ring("ann")))
    records[1] = step._replace(effects=msgspec.Raw(swapped))
    divergence = replay(records, TOYS)
    assert divergence is not None
    assert divergence.index == 0


def test_a_machine_starts_again_after_its_final_state(tmp_path: Path) -> None:
    feeding: Feeding = [(1, door.BrickedUp(), 0.0), (1, door.Opened("ann"), 0.0)]
    assert replay(record(tmp_path / "trace", "door", door, LIMITS, feeding), TOYS) is None


def test_a_step_that_raised_raises_again_at_the_same_record(tmp_path: Path) -> None:
    feeding: Feeding = [(1, door.Opened("ann"), 0.0), (1, door.Broken(), 0.0)]
    divergence = replay(record(tmp_path / "trace", "door", door, LIMITS, feeding), TOYS)
    assert divergence is not None
    assert (divergence.index, divergence.event) == (1, door.Broken())
    assert (divergence.expected, divergence.got) == ((), ())
    assert divergence.raised == "ZeroDivisionError: the hinge"


def test_the_recorded_limits_are_used(tmp_path: Path) -> None:
    """Shown by a deadline that another limit would have moved: the machine must not read it."""
    records = record(tmp_path / "trace", "door", door, door.Limits(open_s=0.5), FEEDING)
    assert replay(records, TOYS) is None
    with pytest.raises(UnreadableTrace, match="no limits of 'door' before it") as caught:
        replay(records[1:], TOYS)
    assert caught.value.facts["reason"] == "limits"


def test_unknown_kinds_and_strange_events_are_typed_errors(tmp_path: Path) -> None:
    records = record(tmp_path / "trace", "door", door, LIMITS, FEEDING)
    with pytest.raises(UnreadableTrace, match="unknown machine 'door'"):
        replay(records, {})
    step = records[2]
    assert isinstance(step, StepRecord)
    records[2] = step._replace(event=msgspec.Raw(msgspec.msgpack.encode(["Flooded"])))
    with pytest.raises(UnreadableTrace, match=r"step 1, 'door': .*Flooded"):
        replay(records, TOYS)


# -- the machines of the protocol ----------------------------------------------------------------


def types_within(found: inspect.Type) -> Iterator[inspect.Type]:
    yield found
    children: list[inspect.Type] = []
    match found:
        case inspect.UnionType(types=types):
            children.extend(types)
        case inspect.StructType(fields=fields):
            children.extend(field.type for field in fields)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            children.append(item)
        case inspect.TupleType(item_types=types):
            children.extend(types)
        case inspect.NamedTupleType(fields=fields):
            children.extend(field.type for field in fields)
        case inspect.DictType(key_type=key, value_type=value):
            children.extend((key, value))
        case inspect.SetType(item_type=item) | inspect.FrozenSetType(item_type=item):
            children.append(item)
    for child in children:
        yield from types_within(child)


@pytest.mark.parametrize("kind", MACHINES)
def test_no_event_or_effect_can_hold_media_or_payload_nor_what_a_trace_cannot(kind: str) -> None:
    spec = MACHINES[kind]
    found = list(types_within(inspect.type_info(spec.event_type | spec.effect_type)))
    assert not [t for t in found if isinstance(t, inspect.MemoryViewType | inspect.ByteArrayType)]
    assert not [t for t in found if isinstance(t, inspect.AnyType | inspect.CustomType)]


@pytest.mark.parametrize("kind", MACHINES)
def test_the_event_union_has_every_event_of_the_transition_table(kind: str) -> None:
    spec = MACHINES[kind]
    union = spec.event_type
    members = set(get_args(union)) if isinstance(union, UnionType) else {union}
    transitions: dict[tuple[type, type], Callable[..., Any]] = spec.module.TRANSITIONS  # type: ignore[attr-defined]
    assert {event for _, event in transitions} <= members


def test_a_slot_with_a_late_read_replays_from_its_file(tmp_path: Path) -> None:
    source = Source(RegionId(1), 4096, 100, Seal(2**64 - 1))
    wanted = slots.Wanted(ReadId(3), SessionId(2**63), Part(0), Attempt(1), 0, source, b"\x00" * 16)
    feeding: Feeding = [
        (1, slots.LeaseTaken(LeaseId(1)), 0.0),
        (1, slots.ReadWanted(wanted), 0.0),
        (1, slots.ReadPosted(ReadId(3)), 60.0),
        (1, slots.LeaseReturned(), 1.0),
        (1, slots.ReadTerminal(ReadId(3), "aborted"), 0.0),
    ]
    records = record(tmp_path / "trace", "slots", slots, slots.Limits(), feeding)
    assert replay(records) is None
    steps = [r for r in records if isinstance(r, StepRecord)]
    assert MACHINES["slots"].decode_event(steps[3].event) == TimerExpired()
    assert MACHINES["slots"].decode_effects(steps[-1].effects)[-1] == slots.FreeExtents(LeaseId(1))


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def slot_trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace"
    feeding: Feeding = [(1, slots.LeaseTaken(LeaseId(1)), 0.0), (1, slots.LeaseReturned(), 0.0)]
    record(path, "slots", slots, slots.Limits(), feeding)
    return path


def add_a_wrong_step(path: Path) -> None:
    wrong = ("slots", 5, 1.0, slots.LeaseTaken(LeaseId(5)), (slots.FreeExtents(LeaseId(5)),))
    path.write_bytes(path.read_bytes() + encode_block([wrong]))


def test_the_command_exits_0_when_identical(slot_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([slot_trace], as_json=False) == 0
    assert capsys.readouterr() == ("identical: 2 steps of node\n", "")
    assert run([slot_trace], as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {
        "ok": True,
        "records": 2,
        "divergence": None,
        "violations": [],
    }


def test_the_command_exits_1_and_shows_the_first_difference(
    slot_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_a_wrong_step(slot_trace)
    assert run([slot_trace], as_json=False) == 1
    out = capsys.readouterr().out
    assert out.startswith("diverged at step 2: slots 5\n")
    assert "expected  FreeExtents(lease=5)\ngot       nothing" in out
    assert run([slot_trace], as_json=True) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["records"]) == (False, 3)
    assert result["divergence"]["index"] == 2
    assert result["divergence"]["expected"] == ["FreeExtents(lease=5)"]
    assert result["divergence"]["got"] == []


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"\xff\xd8\xff\xe0JFIF", "not a trace of epd"), (None, "No such file or directory")],
)
def test_the_command_exits_2_with_one_line_on_stderr(
    tmp_path: Path, data: bytes | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "picture.jpg"
    if data is not None:
        path.write_bytes(data)
    assert run([path], as_json=True) == 2
    assert capsys.readouterr() == ("", f"{path}: {reason}\n")


def test_a_trace_with_a_torn_tail_is_replayed_up_to_it(
    slot_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slot_trace.write_bytes(slot_trace.read_bytes()[:-8])
    assert run([slot_trace], as_json=False) == 0
    assert capsys.readouterr().out == "identical: 1 steps of node, the last one was torn\n"


def test_what_can_be_read_of_a_damaged_trace_is_replayed_all_the_same(
    slot_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slot_trace.write_bytes(slot_trace.read_bytes() + b"\xff" * 40)
    assert run([slot_trace], as_json=False) == 2
    out, err = capsys.readouterr()
    assert out == "identical: 2 steps of node before the damage\n"
    assert err == f"{slot_trace}: block 2 is damaged: its prefix\n"
    assert run([slot_trace], as_json=True) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["records"], report["divergence"]) == (False, 2, None)


# -- machines of other versions ------------------------------------------------------------------


def test_a_trace_is_replayed_by_the_machines_of_its_version() -> None:
    """Two changes of one machine and one of another: each version finds what it had."""
    first, second, other = (MachineSpec(door) for _ in range(3))
    former = (Former("slots", 1, first), Former("slots", 3, second), Former("jobs", 2, other))
    assert [machines_of(version, former)["slots"] for version in (1, 2, 3)] == [first, second, second]
    assert machines_of(4, former)["slots"] is MACHINES["slots"]
    assert [machines_of(version, former)["jobs"] for version in (2, 3)] == [other, MACHINES["jobs"]]
    assert machines_of(LOGIC_VERSION) == MACHINES


def test_the_command_asks_for_the_machines_of_the_trace(
    slot_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def machines(version: int) -> Any:
        asked.append(version)
        return MACHINES

    monkeypatch.setattr("epd.check.traces.check.machines_of", machines)
    assert run([slot_trace], as_json=True) == 0
    assert asked == [LOGIC_VERSION]


def test_the_click_command_hands_on_the_exit_status(slot_trace: Path) -> None:
    assert CliRunner().invoke(replay_command, [str(slot_trace), "--json"]).exit_code == 0
    add_a_wrong_step(slot_trace)
    assert CliRunner().invoke(replay_command, [str(slot_trace)]).exit_code == 1
    assert CliRunner().invoke(replay_command, [str(slot_trace) + ".none"]).exit_code == 2
    assert isinstance(TraceReader(BytesIO(slot_trace.read_bytes()).read).header.node, str)
