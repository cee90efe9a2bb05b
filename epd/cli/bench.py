"""`epd bench SCENARIO`: figures beside a reference of the same run."""

import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import click
import uvloop

from epd.bench import curve, metrics, push, recording, throughput, transfer, verify
from epd.bench.report import Row, machine
from epd.dataplane.select import Choice, open_plane
from epd.protocol.errors import DataPlaneError

Scenario = Callable[..., Awaitable[list[Row]]]
SCENARIOS: dict[str, Scenario] = {
    "transfer": transfer.run,
    "verify": verify.run,
    "throughput": throughput.run,
    "curve": curve.run,
    "metrics": metrics.run,
    "recording": recording.run,
    "push": push.run,
}


@click.command("bench")
@click.argument("scenario", type=click.Choice(sorted(SCENARIOS)))
@click.option("--quick", is_flag=True, help="Fewer sizes, rounds and repetitions.")
@click.option(
    "--data-plane",
    type=click.Choice(["auto", "mooncake", "shm"]),
    default="auto",
    help="Default: every plane that works here.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def bench_command(scenario: str, quick: bool, data_plane: Choice, as_json: bool) -> None:
    """Measure SCENARIO: `transfer` (latency), `throughput` (of no bytes), or what one of the others costs."""
    rows = uvloop.run(_run(SCENARIOS[scenario], _planes(data_plane), quick))
    report = {"scenario": scenario, "rows": [row.as_json() for row in rows], "machine": machine()}
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print(report)


async def _run(scenario: Scenario, data_planes: list[Choice], quick: bool) -> list[Row]:
    return await scenario(data_planes, quick=quick)


def _planes(choice: Choice) -> list[Choice]:
    """Raises `DataPlaneError` for Mooncake where it was chosen and cannot be had."""
    if choice == "shm":
        return ["shm"]
    try:
        open_plane("mooncake", "127.0.0.1").close()
    except DataPlaneError as error:
        if choice == "mooncake":
            raise
        click.echo(f"mooncake is not measured: {error.message}", err=True)
        return ["shm"]
    return ["mooncake"] if choice == "mooncake" else ["mooncake", "shm"]


def _print(report: dict[str, Any]) -> None:
    click.echo(f"{'':44}{'c':>4} {'epd median (min-max)':>30} {'reference':>46} {'ratio':>22}")
    for row in report["rows"]:
        reference = row["reference"]
        click.echo(
            f"{row['name']:44}{row['concurrency']:>4} {_spread(row['epd']):>30} "
            f"{reference['name'] + ' ' + _spread(reference):>46} {_spread(row['ratio']):>22}"
        )
    click.echo(json.dumps(report["machine"]), file=sys.stderr)


def _spread(values: dict[str, Any]) -> str:
    return f"{_figure(values['median'])} ({_figure(values['min'])}-{_figure(values['max'])})"


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
