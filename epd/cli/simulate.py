"""`epd simulate`: nights of whole nodes in virtual time, with everything going wrong, from one seed."""

import json
import secrets
import sys
from pathlib import Path

import click

from epd.cli.report import print_report
from epd.runtime.processors import usable_processors
from epd.sim.night import Night, be_quiet, simulate


@click.command("simulate")
@click.option("--seed", type=click.IntRange(min=0), help="The same seed, the same night. Default: random.")
@click.option(
    "--hours",
    type=click.FloatRange(min=0, min_open=True, max=1e6),
    default=1.0,
    show_default=True,
    help="Virtual hours. Each is another cluster; less than one is the beginning of one.",
)
@click.option(
    "--first", type=click.IntRange(min=0), default=0, show_default=True, help="The number of the first hour."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes. Default: one for each processor.")
@click.option(
    "--traces",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for the trace of every node; one for each hour in it.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def simulate_command(
    seed: int | None, hours: float, first: int, jobs: int | None, traces: Path | None, as_json: bool
) -> None:
    """Run whole nodes in virtual time, in one thread for each hour: processes die, stand still and come back,
    links are parted and slow, frames are lost, reads fail, hang and tear; then there is peace, and
    everything must have ended, with every byte right. Exit status 1 if not."""
    seed = secrets.randbelow(2**31) if seed is None else seed
    be_quiet()
    night = simulate(seed, hours, first, jobs or usable_processors(), traces, _tell)
    report = night.report()
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_report(report)
    sys.exit(0 if night.ok else 1)


def _tell(night: Night) -> None:
    """What went wrong in the hour that has just ended, at once: the night may be long."""
    hour = night.last
    if not hour.ok:
        again = f"epd simulate --seed {night.seed} --first {hour.hour} --hours {hour.load_s / 3600:g}"
        click.echo(f"hour {hour.hour} (again: {again}):", err=True)
        for violation in (*hour.violations, *(f"{name}: {count}" for name, count in hour.residue.items())):
            click.echo(f"  {violation}", err=True)
