"""`tests/scripts`: each comes out as it is written, breaks no invariant and leaves nothing behind."""

import difflib
import re
from pathlib import Path

import pytest

from epd.check.mutations import MUTATIONS, on
from epd.check.script import ScriptError, run
from epd.protocol import slots
from epd.protocol.machine import Step

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "tests" / "scripts").glob("*.txt"))
PAGE = (ROOT / "docs" / "peers-bugs.md").read_text(encoding="utf-8")
SOURCE = re.compile(r"#\d+|\b[WT]\d+\b")
"""An issue or pull request; a finding in SGLang 0.5.23; a trap of Mooncake's interface."""

BROKEN = {
    "lease a slot while its read may still land": "read_ends_after_deadline",
    "treat a timed-out read as ended": "stopped_encoder",
    "skip the seal check": "seal_of_a_killed_encoder",
    "change only the next slot's seal": "early_reuse_is_never_delivered",
    "reuse a slot whose forward timed out but still runs": "stuck_forward",
    "unpin at ForwardDone": "pinned_result_is_not_evicted",
    "drop the job while a sibling still reads": "shared_job_forwards_once",
    "count subscribers instead of naming them": "cancel_names_one_request",
    "deliver twice on a repeated ForwardDone": "late_message_of_an_ended_attempt",
    "deliver a read whose attempt has ended": "late_word_of_a_good_read",
    "go on after a gap in a session": "a_gap_ends_the_session",
    "replace one lost rank alone": "lost_rank_ends_the_group",
    "skip an entry of the group log": "one_rank_fails_to_read",
    "Receipt before all ranks have read": "receipt_after_all_ranks",
    "a forward without room": "cancel_burst",
    "a forward without a grant": "sizes_before_any_work",
}
"""By the rule of a machine that is broken: a script that is there to show it."""


def lines_of(script: Path) -> list[str]:
    return script.read_text(encoding="utf-8").splitlines()


def preface_of(script: Path) -> str:
    """The comments before `world`: what is proved, and where the case comes from."""
    lines = lines_of(script)
    end = next(number for number, line in enumerate(lines) if line.startswith("world"))
    return "\n".join(lines[:end])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_comes_out_as_it_is_written(script: Path, request: pytest.FixtureRequest) -> None:
    written = lines_of(script)
    happened = list(run(written))
    if request.config.getoption("--rewrite-scripts"):
        script.write_text("\n".join(happened) + "\n", encoding="utf-8")
        return
    diff = difflib.unified_diff(written, happened, f"{script.name} as written", "as it happens", lineterm="")
    shown = "\n".join(diff)
    assert not shown, f"\n{shown}\n(if that is right: pytest --rewrite-scripts, and review the diff)"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_says_what_it_proves_and_ends_with_nothing_held(script: Path) -> None:
    lines, preface = lines_of(script), preface_of(script)
    assert lines[0].startswith("# ") and lines[0].endswith("."), "the first line says what is proved"
    assert "\n# From: " in preface, "and one says where the case comes from"
    assert not [line for line in lines if line.startswith("> ! ")]
    assert [line for line in lines if line and not line.startswith((">", "#"))][-1] == "end"
    if "\n# Ends with " not in preface:
        assert lines[-1] == "> nothing"


@pytest.mark.parametrize(("rule", "name"), BROKEN.items())
def test_a_rule_that_is_broken_shows_in_its_script(rule: str, name: str) -> None:
    mutation = next(mutation for mutation in MUTATIONS if mutation.name == rule)
    written = lines_of(ROOT / "tests" / "scripts" / f"{name}.txt")
    try:
        happened = list(run(written, mutation.patches))
    except ScriptError:  # a command that cannot happen any more
        return
    assert happened != written


@pytest.mark.parametrize("command", ["settle", "until read 132", "end"])
def test_a_violated_invariant_is_shown_also_where_moves_are_not(command: str) -> None:
    broken = next(mutation for mutation in MUTATIONS if mutation.name == "unpin at ForwardDone")
    happened = list(run(["world requests=0", "submit r0", command], broken.patches))
    assert "> ! I2: the source of item 0 of part (4, 0, 0) is not pinned" in happened


def test_the_end_shows_what_is_left() -> None:
    keeps = on(slots.Leased, slots.LeaseReturned, lambda state, event, step: Step(state, ()))
    happened = list(run(["world requests=0", "submit r0", "end"], {"slot": keeps}))
    assert happened[-4:-2] == ["> r0: delivered", "> ! I4: prefill still holds lease 1, slot machine 1"]
    assert happened[-2:] == ["> lease 1", "> slot machine 1"]


def test_until_what_does_not_happen_is_an_error_of_the_script() -> None:
    with pytest.raises(ScriptError) as caught:
        list(run(["world requests=0", "submit r0", "until request 1"]))
    assert caught.value.message == "line 3: it came to rest without 'request 1'"


def rows() -> list[tuple[str, str]]:
    """Of the page's tables: what is reported, and what stands against it."""
    lines = [line.strip("|").rsplit("|", 1) for line in PAGE.splitlines() if line.startswith("|")]
    return [
        (reported, here.strip()) for reported, here in lines if here.strip() not in {"here", "now", "---"}
    ]


def has_test(file: Path, name: str) -> bool:
    return file.exists() and f"def {name}(" in file.read_text(encoding="utf-8")


def test_every_script_and_test_that_the_page_names_exists_and_every_script_is_named() -> None:
    assert set(re.findall(r"`(\w+)\.txt`", PAGE)) == {script.stem for script in SCRIPTS}
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert tests
    missing = [f"{file}::{name}" for file, name in tests if not has_test(ROOT / file, name)]
    assert missing == [], "the page names tests that are not there; where did they go?"


def test_every_report_is_answered_by_a_script_a_test_or_a_reason() -> None:
    for reported, here in rows():
        assert re.search(r"\w+\.txt`|\.py::\w+`|^cannot ", here), reported
    first = [reported.split("|")[0].strip() for reported, _ in rows()]
    assert [number for number in first if number.isdecimal()] == [str(n) for n in range(1, 53)]
    assert [name for name in first if re.fullmatch(r"W\d+", name)] == [f"W{n}" for n in range(1, 29)]


def test_a_script_names_the_reports_that_name_it() -> None:
    for reported, here in rows():
        sources = set(SOURCE.findall(reported))
        for name in re.findall(r"`(\w+)\.txt`", here):
            preface = preface_of(ROOT / "tests" / "scripts" / f"{name}.txt")
            assert not sources or sources & set(SOURCE.findall(preface)), f"{name} of {reported}"
