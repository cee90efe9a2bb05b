"""`epd config`: the settings that a node would start with, and where each came from."""

import json
from typing import Any

import click

from epd.cli.settings import settings_of, settings_options
from epd.config import Settings


@click.command("config")
@click.option("--show", is_flag=True, required=True, help="Print every setting.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@settings_options
def config_command(show: bool, as_json: bool, **given: Any) -> None:
    """Print the effective configuration, and check it as epd-node would."""
    settings = settings_of(**given)
    if as_json:
        rows = {k: {"value": settings.value(k), "origin": o} for k, o in settings.origins.items()}
        click.echo(json.dumps(rows))
    else:
        _print(settings)


def _print(settings: Settings) -> None:
    """As TOML that can be used as a file: what is not set, and where values came from, as comments."""
    table = ""
    for key, origin in settings.origins.items():
        prefix, _, name = key.rpartition(".")
        if prefix != table:
            table = prefix
            click.echo(f"\n[{table}]")
        value = settings.value(key)
        line = f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}"
        click.echo(f"{line:<44}  # {origin}")


def toml_value(value: Any) -> str:
    """A setting's value as TOML: its scalars and lists of text are written as in JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
