"""`epd-node`: one node in a process of its own."""

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click
import structlog
import uvloop

from epd.cli.main import run_command
from epd.cli.settings import settings_of, settings_options
from epd.config import Config
from epd.node import EncoderNode, PrefillNode
from epd.observe.log import configure_logging
from epd.protocol.errors import ConfigError, DataPlaneError
from epd.runtime.addresses import is_loopback, parse_address

_log = structlog.get_logger()
_CLOSING_S = 2.5
"""Of the time for draining, kept for the last answers, the sessions and the worker; at most half of it."""


@click.command("epd-node", context_settings={"help_option_names": ["-h", "--help"]})
@settings_options
def node_command(**given: Any) -> int:
    """Run an encoder or a prefill node until SIGTERM, which drains it; a second one stops it at once.

    Prints one JSON line on standard output when ready.
    """
    config = settings_of(**given).config
    configure_logging(config.log_format)
    _raise_descriptor_limit()
    try:
        return uvloop.run(serve(config))
    except DataPlaneError as error:  # chosen, or sized, by the configuration
        key = "device" if config.device.startswith("cuda") else "data_plane"
        raise ConfigError(f"{key}: {error.message}", key=key) from error


async def serve(config: Config) -> int:
    """Run until stopped (0) or until the incarnation has failed (1)."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not stopping.done():
            stopping.set_result(None)

    stop_signals = _stop_signals()
    for number in stop_signals:
        loop.add_signal_handler(number, stop)
    node = EncoderNode(config) if config.role == "encoder" else PrefillNode(config)
    async with node:
        if config.spans:
            from epd.runtime.spans import export_spans

            export_spans()
        _say_ready(node)
        # What exists now stays: without it each full collection would walk over it, for 0.1 s and more.
        gc.collect()
        gc.freeze()
        await asyncio.wait((stopping, node.failure), return_when=asyncio.FIRST_COMPLETED)
        if not node.failure.done():
            await _drain(node, config.drain_timeout_s, stop_signals)
        if node.failure.done() and node.failure.exception() is not None:
            click.echo(f"{node.node_id}: {node.failure.exception()}", err=True)
            return 1
    return 0


async def _drain(node: EncoderNode | PrefillNode, timeout_s: float, stop_signals: Sequence[int]) -> None:
    """Until idle, out of time, stopped by a second signal, or failed."""
    loop = asyncio.get_running_loop()
    _log.info("draining", node=node.node_id, timeout_s=timeout_s)
    drained, draining = False, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as scope:

            def give_up(*_: object) -> None:
                if draining:
                    scope.reschedule(loop.time())

            for number in stop_signals:
                loop.add_signal_handler(number, give_up)
            node.failure.add_done_callback(give_up)
            drained = await node.drain(max(timeout_s - _CLOSING_S, timeout_s / 2))
    draining = False
    _log.info("drained" if drained else "drain given up", node=node.node_id)


def _raise_descriptor_limit() -> None:
    """The soft limit on open files to the hard one: libzmq aborts the process when it runs out."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _stop_signals() -> list[int]:
    """SIGHUP too, unless whoever started us has ignored it (nohup)."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


def _say_ready(node: EncoderNode | PrefillNode) -> None:
    ready = {
        "event": "ready",
        "node": node.node_id,
        "listen": node.listen,
        "role": node.role,
        "data_plane": node.data_plane,
        "pid": os.getpid(),
        "security": security_of(node),
        "metrics": None if node.monitor is None else node.monitor.url,
    }
    with contextlib.suppress(OSError):  # nobody reads our output: not a reason to stop serving
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
    _log.info("ready", **{key: value for key, value in ready.items() if key != "event"})
    if ready["security"] == "insecure":
        _log.warning(
            "INSECURE: nobody is authenticated, nothing is encrypted: whoever reaches this address is served",
            listen=node.listen,
        )
    if node.data_plane.startswith("mooncake"):
        _log.warning(
            "Mooncake listens on every interface and lets whoever reaches its ports read what is exported",
            segment=node.plane.segment,
        )
    if node.config.direction == "push" and node.role == "prefill":
        _log.warning("push: encoders, and whoever reaches Mooncake's ports, can write this node's pool")


def security_of(node: EncoderNode | PrefillNode) -> str:
    """`curve`; without keys `loopback`, or `insecure` if other hosts can come."""
    if node.security is not None:
        return "curve"
    addresses = (node.config.listen, node.config.media_listen)
    alone = all(is_loopback(parse_address(address, to_bind=True).host) for address in addresses)
    return "loopback" if alone else "insecure"


def main() -> None:
    sys.exit(run_command(node_command))


if __name__ == "__main__":
    main()
