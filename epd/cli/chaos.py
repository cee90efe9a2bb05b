"""`epd chaos`: break real processes while they work, and look at every byte."""

import json
import os
import secrets
import sys
import tempfile

import click
import uvloop

from epd.chaos.run import Options, run
from epd.cli.report import print_report
from epd.dataplane.select import Choice


@click.command("chaos")
@click.option("--seed", type=click.IntRange(min=0), help="The same seed, the same schedule. Default: random.")
@click.option("--requests", type=click.IntRange(min=1), default=1_000, show_default=True)
@click.option("--data-plane", type=click.Choice(["mooncake", "shm"]), default="shm", show_default=True)
@click.option(
    "--verify",
    type=click.Choice(["off", "seal"]),
    default="seal",
    show_default=True,
    help="off: what happens without the seals.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def chaos_command(seed: int | None, requests: int, data_plane: Choice, verify: str, as_json: bool) -> None:
    """Send requests while encoders are killed, stopped and cut off, frames are lost and doubled, sources are
    reused too early and the pool is short. Exit status 1 if a request was lost, a byte wrong or anything
    left behind."""
    seed = secrets.randbelow(2**31) if seed is None else seed
    descriptor, path = tempfile.mkstemp(prefix="epd-chaos-", suffix=".log")
    with os.fdopen(descriptor, "wb") as log:
        report = uvloop.run(run(Options(seed, requests, data_plane, verify), log))
    if report["ok"]:
        os.unlink(path)
    else:
        report["log"] = path
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_report(report)
    sys.exit(0 if report["ok"] else 1)
