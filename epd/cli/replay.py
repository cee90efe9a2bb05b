"""`epd replay`: do today's machines make of a recorded trace what was made of it then?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from epd.check.traces.check import Checked, Replayed, check_traces
from epd.protocol.replay import Divergence


def run(paths: Sequence[str | Path], as_json: bool) -> int:
    """Replay these traces, check them, and say on stdout how it went.

    Returns 0 if every step came out as recorded and no rule was broken, 1 if not (the first difference
    of a trace, and what broke a rule, are shown), 2 if a trace cannot be read, or not to its end (one
    line on stderr says why; what could be read was replayed and checked).
    """
    checked = check_traces([Path(path) for path in paths])
    damages = [one.damage for one in checked.replayed if one.damage is not None]
    for damage in damages:
        click.echo(str(damage), err=True)
    if any(one.node for one in checked.replayed):
        click.echo(msgspec.json.encode(_report(checked)).decode() if as_json else _text(checked))
    if damages:
        return 2
    return 0 if checked.ok else 1


def _report(checked: Checked) -> dict[str, Any]:
    diverged = next((one for one in checked.replayed if one.divergence is not None), None)
    divergence = None
    if diverged is not None and diverged.divergence is not None:
        divergence = {"trace": str(diverged.path)} | _as_builtins(diverged.divergence)
    return {
        "ok": checked.ok,
        "records": sum(one.steps + (one.divergence is not None) for one in checked.replayed),
        "divergence": divergence,
        "violations": [finding._asdict() for finding in checked.findings],
    }


def _text(checked: Checked) -> str:
    lines = [_line(one) for one in checked.replayed if one.node]
    lines += [f"violated {finding}" for finding in checked.findings]
    return "\n".join(lines)


def _line(one: Replayed) -> str:
    if one.divergence is not None:
        return _as_text(one.divergence)
    torn = ", the last one was torn" if one.torn else ""
    damaged = " before the damage" if one.damage is not None else ""
    return f"identical: {one.steps} steps of {one.node}{damaged}{torn}"


def _as_builtins(divergence: Divergence) -> dict[str, object]:
    return {
        "index": divergence.index,
        "expected": [repr(effect) for effect in divergence.expected],
        "got": _got(divergence),
        "kind": divergence.kind,
        "key": divergence.key,
        "event": repr(divergence.event),
    }


def _as_text(divergence: Divergence) -> str:
    expected = [repr(effect) for effect in divergence.expected]
    return "\n".join(
        (
            f"diverged at step {divergence.index}: {divergence.kind} {divergence.key!r}",
            f"event     {divergence.event!r}",
            "expected  " + ("\n          ".join(expected) or "nothing"),
            "got       " + ("\n          ".join(_got(divergence)) or "nothing"),
        )
    )


def _got(divergence: Divergence) -> list[str]:
    if divergence.raised is not None:
        return [f"raised {divergence.raised}"]
    return [repr(effect) for effect in divergence.got]


@click.command("replay")
@click.argument("traces", nargs=-1, required=True, type=click.Path(), metavar="TRACE...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def replay_command(context: click.Context, traces: tuple[str, ...], as_json: bool) -> None:
    """Feed the events of each TRACE to the machines again and compare their effects.

    The machines are those of the trace's logic version. The invariants are checked too, and with the
    traces of several nodes what one says the other sent. Exit status: 0 identical and no violation;
    1 diverged (the first difference is shown) or violated (which rule, and where); 2 unreadable.
    """
    context.exit(run(traces, as_json))
