"""The flags that settings have, for every command that takes them."""

import os
from collections.abc import Callable
from typing import Any

import click

from epd.config import Settings, load_settings
from epd.protocol.errors import ConfigError

_FLAGS = (
    click.option("--role", metavar="encoder|prefill", help="What this node does."),
    click.option("--config", "config_file", metavar="FILE.toml", help="Settings; flags go over them."),
    click.option("--node", metavar="NAME", help="For logs. Default: ROLE-HOST-PORT."),
    click.option("--listen", metavar="tcp://HOST:PORT", help="Default: a free loopback port."),
    click.option("--encoders", metavar="tcp://H:P,...", help="Whom a prefill node reads from."),
    click.option("--data-plane", metavar="auto|mooncake|shm", help="Default: auto."),
    click.option("--model", metavar="PATH|builtin:NAME|callable:MODULE:NAME", help="What an encoder runs."),
    click.option("--device", metavar="auto|cpu|cuda:N", help="Where forwards run and pools lie."),
    click.option("--verify", metavar="off|seal|checksum", help="What proves that a read is whole."),
    click.option("--metrics-port", metavar="N", help="For /metrics, /healthz and /readyz; 0: a free one."),
    click.option(
        "--insecure", is_flag=True, default=None, help="Listen beyond loopback without keys: serves anybody."
    ),
    click.option("--trace", metavar="FILE", help="Record every step of every machine."),
    click.option("--log-format", metavar="auto|json|console", help="Logs go to standard error."),
    click.option("--set", "pairs", metavar="KEY=VALUE", multiple=True, help="Any setting by its key."),
)


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags of the settings; it hands what it gets to `settings_of`."""
    for option in reversed(_FLAGS):
        command = option(command)
    return command


def settings_of(config_file: str | None, pairs: tuple[str, ...], **flags: str | bool | None) -> Settings:
    """File, this process's variables and flags, the stronger last. Raises `ConfigError`."""
    given = []
    for key, value in flags.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else value
            given.append((f"--{key.replace('_', '-')}", key, text))
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"set: {pair!r} given, allowed is KEY=VALUE", key="set", given=pair)
        given.append((f"--set {key.strip()}", key.strip(), text))
    return load_settings(config_file, os.environ, given)
