"""`epd replay`: do today's machines make of a recorded trace what was made of it then?"""

from collections.abc import Iterator

import click
import msgspec

from epd.protocol.registry import machines_of
from epd.protocol.replay import Divergence, replay
from epd.protocol.trace import Record, StepRecord, TraceReader, UnreadableTrace


def run(path: str, as_json: bool) -> int:
    """Replay the trace at `path` and say on stdout how it went.

    Returns 0 if every step came out as recorded, 1 if one did not (the first is shown), 2 if the
    trace cannot be read (one line on stderr says why).
    """
    steps = 0

    def counted(records: Iterator[Record]) -> Iterator[Record]:
        nonlocal steps
        for record in records:
            steps += isinstance(record, StepRecord)
            yield record

    try:
        with open(path, "rb") as file:
            reader = TraceReader(file.read)
            machines = machines_of(reader.header.logic_version)
            divergence = replay(counted(iter(reader)), machines)
    except OSError as error:
        click.echo(f"{path}: {error.strerror}", err=True)
        return 2
    except UnreadableTrace as error:
        click.echo(f"{path}: {error.message}", err=True)
        return 2
    if as_json:
        shown = None if divergence is None else _as_builtins(divergence)
        result = {"ok": divergence is None, "records": steps, "divergence": shown}
        click.echo(msgspec.json.encode(result).decode())
    elif divergence is None:
        torn = ", the last one was torn" if reader.torn else ""
        click.echo(f"identical: {steps} steps of {reader.header.node}{torn}")
    else:
        click.echo(_as_text(divergence))
    return 0 if divergence is None else 1


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
@click.argument("trace", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def replay_command(context: click.Context, trace: str, as_json: bool) -> None:
    """Feed the events of TRACE to the machines again and compare their effects.

    Exit status: 0 identical, 1 diverged (the first difference is shown), 2 unreadable.
    """
    context.exit(run(trace, as_json))
