"""`epd trace`: shows recorded runs; traces of several nodes are put into one order."""

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from epd.observe.timeline.load import Damage, load
from epd.observe.timeline.merge import Merged, merge
from epd.observe.timeline.page import as_page
from epd.observe.timeline.perfetto import as_perfetto
from epd.observe.timeline.summary import as_json, as_text
from epd.observe.timeline.transfers import Transfer, transfers_of

_OUT = click.Path(dir_okay=False, path_type=Path)


@click.command("trace")
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE...")
@click.option("--summary", is_flag=True, help="Every transfer: states, durations, who waited for whom.")
@click.option("--json", "json_wanted", is_flag=True, help="The summary as one JSON object on stdout.")
@click.option("--perfetto", type=_OUT, metavar="OUT.json", help="Trace events for the Perfetto UI.")
@click.option("--html", type=_OUT, metavar="OUT.html", help="One page: timeline, messages, filter.")
@click.pass_context
def trace_command(
    context: click.Context,
    traces: Sequence[Path],
    summary: bool,
    json_wanted: bool,
    perfetto: Path | None,
    html: Path | None,
) -> None:
    """Show recorded runs. Give the traces of all nodes of a run (and FILE.1, ... of long ones) together.

    Exit status: 0; 2 if a trace, or a part of one, cannot be read (one line each on stderr); what can be
    read is shown all the same.
    """
    loaded = load(traces)
    merged = merge(loaded.nodes)
    transfers = transfers_of(merged)
    for damage in loaded.damages:
        click.echo(str(damage), err=True)
    if loaded.nodes:
        written = _write_files(merged, transfers, perfetto, html)
        if summary or json_wanted or not written:
            _print_summary(merged, transfers, loaded.damages, json_wanted)
    context.exit(2 if loaded.damages else 0)


def _write_files(
    merged: Merged, transfers: Sequence[Transfer], perfetto: Path | None, html: Path | None
) -> bool:
    """Whether there was any to write."""
    try:
        if perfetto is not None:
            perfetto.write_bytes(msgspec.json.encode(as_perfetto(merged, transfers)))
        if html is not None:
            html.write_text(as_page(merged, transfers), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from error
    return perfetto is not None or html is not None


def _print_summary(
    merged: Merged, transfers: Sequence[Transfer], damages: Sequence[Damage], json_wanted: bool
) -> None:
    if json_wanted:
        click.echo(msgspec.json.encode(as_json(merged, transfers, damages)).decode())
    else:
        click.echo("\n".join(as_text(merged, transfers)))
