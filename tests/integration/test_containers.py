"""What a container or a cluster does to a node: its variables, its signals, its missing folders."""

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from epd.client import NodeClient
from epd.protocol.errors import Draining
from epd.testing.processes import HeldProcess, NodeProcess, held_encoder, node_process
from epd.testing.synthetic import synthetic_item

NODE = [sys.executable, "-m", "epd.cli.node"]
SHM = ["--data-plane", "shm", "--log-format", "json"]
NOWHERE = ["--role", "prefill", "--encoders", "tcp://127.0.0.1:9, tcp://[::1]:9, nowhere.invalid:9,"]
PREFILL = ["--role", "prefill", "--encoders", "tcp://127.0.0.1:9, tcp://[::1]:9,, tcp://nowhere.invalid:9,"]
SMALL = ["--set", "pool.region_nbytes=4096", "--set", "staging.region_nbytes=4096"]


@contextlib.contextmanager
def started(*command: str, **popen: Any) -> Iterator[NodeProcess]:
    """A node from its command line, up to its ready line."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, **popen) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "ended before it was ready"
            yield NodeProcess(process, json.loads(line))
        finally:
            process.kill()


def environment(**variables: str) -> Mapping[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("EPD_") and k != "HOME"} | variables


@pytest.mark.slow
def test_a_prefill_node_is_ready_without_any_encoder_in_a_bare_container(tmp_path: Path) -> None:
    """No HOME, no temporary folder, POSIX locale, a Service named epd, logs to a full disk."""
    variables = environment(
        EPD_PORT="tcp://10.0.0.7:7000",
        EPD_SERVICE_PORT="7000",
        EPD_PORT_7000_TCP_ADDR="10.0.0.7",
        TMPDIR=str(tmp_path / "gone"),
        LC_ALL="POSIX",
    )
    with (
        open("/dev/full", "wb") as full,
        started(*NODE, *PREFILL, *SHM, *SMALL, env=variables, stderr=full) as node,
    ):

        async def ask() -> int:
            async with NodeClient(node.listen) as client:
                return (await client.inventory()).counts["requests"]

        assert node.ready["role"] == "prefill"
        assert node.process.stdout is not None
        node.process.stdout.close()
        assert asyncio.run(ask()) == 0
        assert node.terminate() == 0


@pytest.mark.slow
def test_hangup_drains_unless_it_was_ignored_at_start() -> None:
    with started(*NODE, *PREFILL, *SHM, *SMALL, stderr=subprocess.DEVNULL) as node:
        node.process.send_signal(signal.SIGHUP)
        assert node.process.wait(30) == 0
    ignoring = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *NODE, *PREFILL, *SHM, *SMALL]
    with started(*ignoring, stderr=subprocess.DEVNULL) as node:
        node.process.send_signal(signal.SIGHUP)

        async def ask() -> int:
            async with NodeClient(node.listen) as client:
                return (await client.inventory()).counts["requests"]

        assert asyncio.run(ask()) == 0
        assert node.terminate() == 0


@pytest.mark.slow
def test_four_kills_leave_nothing_in_shared_memory_or_the_temporary_folder(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    command = [*NODE, "--role", "encoder", *SHM]
    for _ in range(4):
        variables = environment(TMPDIR=str(tmp_path))
        with started(*command, env=variables, stderr=subprocess.DEVNULL) as node:
            children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
            workers = [os.pidfd_open(int(child)) for child in children]
            assert len(workers) == 1
            node.kill()
            for worker in workers:
                # In its own words: readable when the worker has ended.
                ended, _, _ = select.select([worker], [], [], 10.0)
                assert ended, "the worker outlives its node"
                os.close(worker)
    assert os.listdir(tmp_path) == []
    assert set(os.listdir("/dev/shm")) - before == set()


@pytest.fixture
def encoder() -> Iterator[HeldProcess]:
    with held_encoder({"data_plane": "shm", "log_format": "json"}, encoder="synthetic") as process:
        yield process


@pytest.mark.slow
async def test_what_still_runs_when_drain_time_is_over_fails_as_draining_and_its_client_is_told(
    encoder: HeldProcess,
) -> None:
    encoder.hold("forward")
    settings = {"role": "prefill", "data_plane": "shm", "encoders": [encoder.listen], "drain_timeout_s": 1}
    with node_process(settings) as node:
        async with NodeClient(node.listen) as client:
            pending = asyncio.ensure_future(client.submit([synthetic_item(4096)]))
            await asyncio.to_thread(encoder.wait_reached, "forward")
            node.process.terminate()
            error = (await pending).outcome.error
            assert error is not None
            assert (error.code, error.retryable) == (Draining.code, True)
        assert await asyncio.to_thread(node.process.wait, 30) == 0
    encoder.release("forward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--role", "encoder", *SHM, "--set", "staging.region_nbytes=1_099_511_627_776"], "staging"),
        (["--role", "encoder", *SHM, "--model", "/nowhere"], "model"),
        (["--role", "encoder", *SHM, "--trace", "/nowhere/x.trace"], "/nowhere/x.trace"),
        ([*NOWHERE, *SHM], "encoders"),
    ],
)
def test_a_failure_at_start_ends_the_process_with_one_line(arguments: list[str], named: str) -> None:
    done = subprocess.run([*NODE, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode > 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert named in done.stderr


@pytest.mark.slow
def test_too_few_descriptors_are_refused_with_both_numbers_and_the_soft_limit_is_raised() -> None:
    def limited(soft: int, hard: int) -> list[str]:
        return [
            "sh",
            "-c",
            f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"',
            "sh",
            *NODE,
            *PREFILL,
            *SHM,
        ]

    done = subprocess.run(limited(256, 512), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert re.search(r"limits.max_peers: 64 peers need \d+ open files, the limit is 512", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    with started(*limited(256, 4096), *SMALL, stderr=subprocess.DEVNULL) as node:
        limits = Path(f"/proc/{node.pid}/limits").read_text()
        assert re.search(r"Max open files +4096 +4096", limits)


@pytest.mark.slow
def test_ports_that_are_taken_are_named_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for setting in (f"listen=tcp://127.0.0.1:{port}", f"metrics_port={port}"):
            command = [*NODE, *PREFILL, *SHM, *SMALL, "--set", setting]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 2
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert setting.partition("=")[0] in done.stderr
            assert str(port) in done.stderr
