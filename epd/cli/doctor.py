"""`epd doctor`: what is installed and usable here, and for every miss the line that fixes it."""

import json
import os
import sys

import click

from epd.cli.doctor_checks import Check, Transport, checks, transports
from epd.cli.doctor_selftest import PLANES, SelfTest, self_test

_EXPOSED = (
    "Mooncake's TCP port listens on every interface and authenticates nobody: whoever reaches it can read\n"
    "what an encoder exports (not write it). Trusted networks only. RDMA and CUDA need the receive pool\n"
    "registered as well."
)


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def doctor_command(as_json: bool) -> None:
    """Check this machine: what a node can use, and what is missing.

    Exit status 1 if a data plane that is installed does not work, or if none does.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # before anything imports Mooncake
    found = list(checks())
    ways = transports()
    installed = [plane for plane in PLANES if plane == "shm" or _is_ok(found, "mooncake")]
    tests = [self_test(plane) for plane in installed]
    ok = all(test.ok for test in tests)
    if as_json:
        report = {
            "ok": ok,
            "checks": [check._asdict() for check in found],
            "data_planes": [test._asdict() for test in tests],
            "transports": [way._asdict() for way in ways],
            "exposed": _EXPOSED.replace("\n", " "),
        }
        click.echo(json.dumps(report))
    else:
        _print(found, ways, tests)
    sys.exit(0 if ok else 1)


def _is_ok(found: list[Check], name: str) -> bool:
    return any(check.name == name and check.status == "ok" for check in found)


def _print(found: list[Check], ways: list[Transport], tests: list[SelfTest]) -> None:
    width = max(len(check.name) for check in found)
    for check in found:
        click.echo(f"{check.status:<8} {check.name:<{width}}  {check.found}")
        if check.fix:
            click.echo(f"{'':<9}{'':<{width}}  fix: {check.fix}")
    click.echo()
    for test in tests:
        what = f"{test.nbytes} B read from another process, all equal" if test.ok else test.error
        click.echo(f"{'ok' if test.ok else 'FAILED':<8} self-test of {test.data_plane}: {what}")
    click.echo()
    for way in ways:
        click.echo(f"{'here' if way.is_here else '-':<8} {way.name}: {way.was_run}")
    click.echo(f"\n{_EXPOSED}")
