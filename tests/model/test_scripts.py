"""`tests/scripts`: each comes out as it is written, breaks no invariant and leaves nothing behind."""

import difflib
from pathlib import Path

import pytest

from epd.check.script import run

SCRIPTS = sorted((Path(__file__).parents[1] / "scripts").glob("*.txt"))


def lines_of(script: Path) -> list[str]:
    return script.read_text(encoding="utf-8").splitlines()


def comments_of(script: Path) -> list[str]:
    """The first lines: what is proved, and where the case comes from."""
    return [line for line in lines_of(script) if line.startswith("#")]


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
    lines = lines_of(script)
    assert lines[0].startswith("# ") and lines[0].endswith("."), "the first line says what is proved"
    assert any(line.startswith("# From: ") for line in lines), "and one says where the case comes from"
    assert not [line for line in lines if line.startswith("> ! ")]
    assert [line for line in lines if line and not line.startswith((">", "#"))][-1] == "end"
    if not any(line.startswith("# Ends with ") for line in lines):
        assert lines[-1] == "> nothing"
