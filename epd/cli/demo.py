"""`epd demo`: real nodes, real pictures, every byte checked.

Each delivered item is checked twice: the prefill node compares its bytes with the digest that the
encoder's worker computed (`verify = checksum`), and this process compares their SHA-256 with a local
encode of the same picture, one item a batch, with the worker's number of threads.
"""

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from statistics import quantiles
from typing import IO, Any, Final, NamedTuple

import click
import uvloop

from epd.client import NodeClient
from epd.config import load_config
from epd.data import photographs
from epd.encoders.base import MediaItem
from epd.encoders.local import encode_locally
from epd.encoders.registry import load_encoder
from epd.protocol.messages import Outcome
from epd.request import ImageItem
from epd.testing.processes import node_process

_MODEL: Final = "builtin:qwen2-vl"
_ITEMS_PER_REQUEST: Final = 3
_DEADLINE_S: Final = 300.0


class Answered(NamedTuple):
    items: Sequence[ImageItem]
    outcome: Outcome
    latency_s: float


class Run(NamedTuple):
    answers: list[Answered]
    data_plane: str
    states: tuple[str, ...]


@click.command("demo")
@click.option("--images", multiple=True, type=click.Path(path_type=str), help="Instead of our photographs.")
@click.option("--encoders", type=click.IntRange(1, 16), default=1, show_default=True, help="Encoder nodes.")
@click.option("--data-plane", type=click.Choice(["auto", "mooncake", "shm"]), default="auto")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.argument("more_images", nargs=-1, type=click.Path(path_type=str))
def demo_command(
    images: tuple[str, ...], encoders: int, data_plane: str, as_json: bool, more_images: tuple[str, ...]
) -> int:
    """Start real nodes on loopback, send pictures, check every received byte.

    Exit status: 0 only if all is exact.
    """
    paths: Sequence[Any] = (*images, *more_images) or photographs()
    items = [ImageItem.from_file(path) for path in paths]
    click.echo(f"starting nodes: {encoders} of role encoder, one of role prefill", err=True)
    with _logs_if_it_fails() as logs:
        run = uvloop.run(_run(items, encoders, data_plane, logs.fileno()))
        expected = _encode_locally(items)
        report = _report(run, expected)
        if not report["ok"]:
            _print_logs(logs)
    if as_json:
        click.echo(json.dumps(report))
    else:
        if data_plane == "auto" and run.data_plane == "shm":
            click.echo("Mooncake cannot be used here: the bytes went through shared memory (shm).")
        _show(run, expected, report)
    return 0 if report["ok"] else 1


@contextlib.contextmanager
def _logs_if_it_fails() -> Iterator[IO[bytes]]:
    """A file for what the nodes log: shown if the demo fails, of no interest otherwise."""
    with tempfile.TemporaryFile() as logs:
        try:
            yield logs
        except BaseException:
            _print_logs(logs)
            raise


def _print_logs(logs: IO[bytes]) -> None:
    logs.seek(0)
    click.echo(logs.read().decode(errors="replace"), err=True, nl=False)


async def _run(items: Sequence[ImageItem], encoders: int, data_plane: str, log_fd: int) -> Run:
    # The local encode that it is compared with runs on the CPU, and rows of a GPU differ bitwise.
    common = {"data_plane": data_plane, "log_format": "json", "device": "cpu"}
    encoder = common | {"role": "encoder", "verify": "checksum"}
    with contextlib.ExitStack() as stack:
        encoding = [stack.enter_context(node_process(encoder, log_fd)) for _ in range(encoders)]
        addresses = [node.listen for node in encoding]
        settings = common | {"role": "prefill", "encoders": addresses}
        prefill = stack.enter_context(node_process(settings, log_fd))
        groups = [items[n : n + _ITEMS_PER_REQUEST] for n in range(0, len(items), _ITEMS_PER_REQUEST)]
        async with NodeClient(prefill.listen) as client, asyncio.TaskGroup() as requests:
            tasks = [requests.create_task(_ask(client, group)) for group in groups]
        states: set[str] = set()
        for address in (prefill.listen, *addresses):
            async with NodeClient(address) as client:
                states.update((await client.inventory()).states)
        answers = [task.result() for task in tasks]
        for answer in answers:
            states.update(answer.outcome.states)
        for node in (prefill, *encoding):
            node.terminate()  # drains; whatever goes wrong before, the stack kills
        return Run(answers, str(prefill.ready["data_plane"]), tuple(sorted(states)))


async def _ask(client: NodeClient, items: Sequence[ImageItem]) -> Answered:
    start_s = time.monotonic()
    result = await client.submit(items, deadline_s=_DEADLINE_S)
    return Answered(items, result.outcome, time.monotonic() - start_s)


def _encode_locally(items: Sequence[ImageItem]) -> dict[bytes, bytes]:
    """SHA-256 of the embedding of each picture, by the picture's own."""
    pictures = {item.sha256: item for item in items}
    dtype = load_encoder(_MODEL).default_dtype
    media = [MediaItem(item.probe, memoryview(item.media), dtype) for item in pictures.values()]
    threads = load_config(None, {"role": "encoder"}).worker_threads()
    return dict(zip(pictures, encode_locally(_MODEL, media, threads), strict=True))


def _is_exact(answer: Answered, expected: dict[bytes, bytes]) -> bool:
    outcomes = answer.outcome.items
    return len(outcomes) == len(answer.items) and all(
        outcome.verified and outcome.sha256 == expected[item.sha256]
        for item, outcome in zip(answer.items, outcomes, strict=True)
    )


def _report(run: Run, expected: dict[bytes, bytes]) -> dict[str, Any]:
    exact = all(_is_exact(answer, expected) for answer in run.answers)
    latencies_ms = [answer.latency_s * 1000 for answer in run.answers]
    cuts = quantiles(latencies_ms, n=100, method="inclusive") if len(latencies_ms) > 1 else latencies_ms * 99
    return {
        "ok": exact and all(answer.outcome.error is None for answer in run.answers),
        "requests": len(run.answers),
        "items": sum(len(answer.items) for answer in run.answers),
        "bytes": sum(item.nbytes for answer in run.answers for item in answer.outcome.items),
        "bit_exact": exact,
        "data_plane": run.data_plane,
        "latency_ms": {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1)},
        "states": list(run.states),
    }


def _show(run: Run, expected: dict[bytes, bytes], report: dict[str, Any]) -> None:
    click.echo(f"{'request':>7}  {'picture':28} {'pixels':>11} {'rows':>6} {'bytes':>9}  bit-exact")
    for number, answer in enumerate(run.answers, 1):
        error = answer.outcome.error
        if error is not None:
            click.echo(f"{number:>7}  {error.code}: {error.message}")
            continue
        for item, outcome in zip(answer.items, answer.outcome.items, strict=True):
            exact = outcome.verified and outcome.sha256 == expected[item.sha256]
            name = item.name.rpartition("/")[2]
            pixels = f"{item.probe.width}x{item.probe.height}"
            click.echo(
                f"{number:>7}  {name:28.28} {pixels:>11} {outcome.spec.rows:>6} {outcome.nbytes:>9}  "
                f"{'yes' if exact else 'NO'}"
            )
    latency = report["latency_ms"]
    click.echo(
        f"\n{report['requests']} requests, {report['items']} pictures, {report['bytes']} B over "
        f"{report['data_plane']}; latency p50 {latency['p50']} ms, p99 {latency['p99']} ms"
    )
    click.echo(f"states: {', '.join(report['states'])}")
    click.echo("every byte is exact" if report["ok"] else "NOT exact")
