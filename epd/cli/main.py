"""`epd`: the commands for people. A command that is not used is not imported."""

import errno
import importlib
import logging
import sys
from typing import Final

import click

from epd.observe.log import configure_logging
from epd.protocol.errors import ConfigError, EpdError

_COMMANDS: Final = {
    "bench": ("epd.cli.bench", "bench_command"),
    "config": ("epd.cli.config", "config_command"),
    "chaos": ("epd.cli.chaos", "chaos_command"),
    "demo": ("epd.cli.demo", "demo_command"),
    "model-check": ("epd.cli.model_check", "model_check_command"),
    "doctor": ("epd.cli.doctor", "doctor_command"),
    "keygen": ("epd.cli.keygen", "keygen_command"),
    "replay": ("epd.cli.replay", "replay_command"),
    "simulate": ("epd.cli.simulate", "simulate_command"),
    "send": ("epd.cli.send", "send_command"),
    "trace": ("epd.cli.trace", "trace_command"),
}

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write to standard output says when the file under it cannot grow."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = _COMMANDS.get(cmd_name)
        if home is None:
            return None
        command: click.Command = getattr(importlib.import_module(home[0]), home[1])
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="epd")
def epd() -> None:
    """Move vision embeddings from encoder nodes to prefill nodes."""
    configure_logging(level=logging.WARNING)


def run_command(command: click.Command) -> int:
    """Run a command; what goes wrong is one line on standard error. Returns the exit status."""
    try:
        return int(command.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except EpdError as error:
        click.echo(f"{error.code}: {error.message}", err=True)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        if error.errno not in _FULL:
            raise
        click.echo(f"{command.name}: output cannot be written: {error.strerror}", err=True)
        return 1


def main() -> None:
    sys.exit(run_command(epd))


if __name__ == "__main__":
    main()
