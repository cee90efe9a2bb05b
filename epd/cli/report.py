"""A report of a run, for people: a line for each of its entries."""

from collections.abc import Mapping
from typing import Any

import click


def print_report(report: Mapping[str, Any]) -> None:
    for key, value in report.items():
        shown = (
            ", ".join(f"{name} {count}" for name, count in value.items())
            if isinstance(value, dict)
            else value
        )
        click.echo(f"{key:<16} {shown}")
