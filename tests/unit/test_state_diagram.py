"""What the drawing reads out of handlers, on a small machine that has every form of them."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import state_diagram
from msgspec.structs import replace

from epd.protocol.machine import Event, State, Step
from epd.protocol.unhandled import UNHANDLED as REAL
from epd.protocol.unhandled import Reason


class Shut(State):
    deadline_s: None = None


class Ajar(State):
    width: int = 1
    deadline_s: None = None


class Broken(State):
    deadline_s: None = None


class Pushed(Event):
    pass


class Kicked(Event):
    pass


class Looked(Event):
    pass


class Outcome(NamedTuple):
    part: Any
    note: str = ""


def _open(state: Shut, event: Pushed, now_s: float, limits: Any) -> Step:
    if now_s < 0:
        return Step(state, ())
    wide = Ajar(2)
    return Step(wide, ())


def _close(state: Ajar, event: Pushed, now_s: float, limits: Any) -> Step:
    return Step(Shut() if state.width == 1 else replace(state, width=1), ())


def _kick(state: Shut | Ajar, event: Kicked, now_s: float, limits: Any) -> Step:
    broken = _break(state)
    return Step(broken.state, (*broken.effects,))


def _break(state: Shut | Ajar) -> Step:
    if isinstance(state, Shut):
        return Step(Broken(), ())
    return _close(state, Pushed(), 0.0, None)


def _look(state: Any, event: Looked, now_s: float, limits: Any) -> Step:
    next_state = state
    while now_s > 0:
        next_state = replace(next_state)
    return Step(next_state, ())


def _mend(state: Broken, event: Pushed, now_s: float, limits: Any) -> Step:
    return Step(limits.anything(), ())


def _open_part(state: Any, part: Shut, event: Pushed, now_s: float, limits: Any) -> Outcome:
    return Outcome(Ajar() if state else part)


AnyState = Shut | Ajar | Broken
AnyEvent = Pushed | Kicked | Looked
PartState = Shut | Broken
PartEvent = Pushed | Looked

INITIAL = Shut()
TRANSITIONS: dict[tuple[type, type], Callable[..., Step]] = {
    (Shut, Pushed): _open,
    (Ajar, Pushed): _close,
    (Shut, Kicked): _kick,
    (Ajar, Kicked): _kick,
    (Ajar, Looked): _look,
    (Broken, Pushed): _mend,
}
PART_TRANSITIONS: dict[tuple[type, type], Callable[..., Outcome]] = {(Shut, Pushed): _open_part}

HERE = sys.modules[__name__]
BLIND = Reason("ignored", "nobody can look")
GONE = Reason("impossible", "there is no door")
UNHANDLED = {
    ("test_state_diagram", "TRANSITIONS"): {
        (Shut, Looked): BLIND,
        (Broken, Looked): GONE,
        (Broken, Kicked): GONE,
    },
    ("test_state_diagram", "PART_TRANSITIONS"): {
        (Shut, Looked): BLIND,
        (Broken, Pushed): GONE,
        (Broken, Looked): GONE,
    },
}


@pytest.fixture(autouse=True)
def _reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_diagram, "UNHANDLED", {**REAL, **UNHANDLED})


def following(table: state_diagram.Table) -> dict[tuple[str, str], tuple[str, ...]]:
    return {(row.state, row.event): row.following for row in state_diagram.rows(HERE, table)}


def test_every_state_a_handler_may_return_is_found() -> None:
    assert following(TRANSITIONS) == {
        ("Shut", "Pushed"): ("Ajar", "Shut"),
        ("Ajar", "Pushed"): ("Ajar", "Shut"),
        ("Shut", "Kicked"): ("Broken", "Shut"),
        ("Ajar", "Kicked"): ("Ajar", "Broken", "Shut"),
        ("Ajar", "Looked"): ("Ajar",),
        ("Broken", "Pushed"): ("?",),
    }


def test_a_part_is_drawn_with_its_own_state() -> None:
    assert following(PART_TRANSITIONS) == {("Shut", "Pushed"): ("Ajar", "Shut")}


def test_the_diagram_joins_events_and_leaves_out_what_stays() -> None:
    drawn = state_diagram.draw(HERE)
    assert drawn.startswith(
        "```mermaid\n"
        "stateDiagram-v2\n"
        "    [*] --> Shut\n"
        "    Shut --> Ajar: Pushed\n"
        "    Ajar --> Shut: Pushed, Kicked\n"
        "    Shut --> Broken: Kicked\n"
        "    Ajar --> Broken: Kicked\n"
        "```\n"
        "\n"
        "| state | event | handler | then |\n"
        "|---|---|---|---|\n"
        "| Shut | Pushed | `_open` | Ajar, Shut |\n"
    )
    assert "\n`PART_TRANSITIONS`:\n\n```mermaid\nstateDiagram-v2\n    [*] --> Shut\n" in drawn


def test_every_cell_is_drawn_as_handled_or_with_the_reason_why_not() -> None:
    assert (
        "| event | Shut | Ajar | Broken |\n"
        "|---|:-:|:-:|:-:|\n"
        "| Pushed | x | x | x |\n"
        "| Kicked | x | x | b |\n"
        "| Looked | a | x | b |\n"
        "\n"
        "x: handled.\\\n"
        "a: ignored, nobody can look.\\\n"
        "b: impossible, there is no door.\n"
    ) in state_diagram.draw(HERE)


@pytest.mark.parametrize("cell", [(Broken, Kicked), (Shut, Pushed)], ids=["in neither", "in both"])
def test_a_cell_that_is_forgotten_or_contradicts_its_table_is_named(
    monkeypatch: pytest.MonkeyPatch, cell: tuple[type, type]
) -> None:
    where = ("test_state_diagram", "TRANSITIONS")
    reasons = {**UNHANDLED[where], cell: GONE} if cell == (Shut, Pushed) else dict(UNHANDLED[where])
    if cell == (Broken, Kicked):
        del reasons[cell]
    monkeypatch.setattr(state_diagram, "UNHANDLED", {**UNHANDLED, where: reasons})
    with pytest.raises(ValueError, match=rf"TRANSITIONS: \({cell[0].__name__}, {cell[1].__name__}\)"):
        state_diagram.draw(HERE)


def test_every_machine_of_the_protocol_can_be_drawn() -> None:
    machines = state_diagram.machines()
    assert {"prefill", "encoder", "slots", "sources", "jobs"} <= set(machines)
    for module in machines.values():
        for name, table in state_diagram.tables(module).items():
            assert len(state_diagram.rows(module, table)) == len(table)
            states, events = state_diagram.cells(module, name)
            unhandled = state_diagram.unhandled(module, name)
            every = {(state, event) for state in states for event in events}
            assert set(table) | set(unhandled) == every
            assert not set(table) & set(unhandled)


def test_the_slot_of_a_running_read_is_quarantined_before_it_is_free() -> None:
    slots = state_diagram.machines()["slots"]
    found = {(row.state, row.event): row.following for row in state_diagram.rows(slots, slots.TRANSITIONS)}
    assert found["Leased", "LeaseReturned"] == ("Free", "Quarantined")
    assert found["Quarantined", "ReadTerminal"] == ("Free", "Quarantined")
    assert found["Quarantined", "TimerExpired"] == ("Quarantined",)


PAGE = "a\n<!-- states: door -->\nold\n<!-- end -->\nb\n<!-- states: gate -->\n<!-- end -->\n"


def test_blocks_are_filled_and_the_rest_of_the_page_is_kept() -> None:
    drawn = {"door": "D\n", "gate": "G\n"}
    page = state_diagram.redraw(PAGE, drawn)
    assert page == "a\n<!-- states: door -->\nD\n<!-- end -->\nb\n<!-- states: gate -->\nG\n<!-- end -->\n"
    assert state_diagram.redraw(page, drawn) == page


def test_a_machine_without_a_block_and_a_block_without_a_machine_are_named() -> None:
    with pytest.raises(ValueError, match=r"missing.*states: hatch"):
        state_diagram.redraw(PAGE, {"door": "", "gate": "", "hatch": ""})
    with pytest.raises(ValueError, match="no machine is called gate"):
        state_diagram.redraw(PAGE, {"door": ""})


def test_checking_fails_on_an_old_page_and_drawing_mends_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "protocol.md"
    page.write_text("<!-- states: door -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(state_diagram, "PAGE", page)
    monkeypatch.setattr(state_diagram, "machines", lambda: {"door": HERE})
    monkeypatch.setattr(sys, "argv", ["state_diagram.py", "--check"])
    assert state_diagram.main() == 1
    assert "not what the tables say" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["state_diagram.py"])
    assert state_diagram.main() == 0
    monkeypatch.setattr(sys, "argv", ["state_diagram.py", "--check"])
    assert state_diagram.main() == 0
