"""What a container or a cluster does to a node: its variables, its signals, its missing folders."""

import asyncio
import contextlib
import io
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

import numpy as np
import pytest
from PIL import Image

from epd.client import NodeClient
from epd.data import photographs
from epd.protocol.errors import Draining
from epd.request import ImageItem
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
    def hear() -> None:  # whoever runs the tests may have ignored it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    with started(*NODE, *PREFILL, *SHM, *SMALL, stderr=subprocess.DEVNULL, preexec_fn=hear) as node:
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


def as_anybody() -> list[str]:
    """What to write before a command so that it runs as a user who is not in /etc/passwd. Who is not root
    cannot change, and is such a somebody already. Reading stays allowed everywhere: this Python may lie in a
    folder of root's own."""
    if os.geteuid() != 0:
        return []
    who = ["--reuid=54321", "--regid=54321", "--clear-groups"]
    return ["setpriv", *who, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


def pictures(count: int) -> list[ImageItem]:
    """Each another one, of a megapixel."""
    made = []
    for number in range(count):
        out = io.BytesIO()
        noise = np.random.default_rng(number).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
        Image.fromarray(noise).save(out, "JPEG")
        made.append(ImageItem.from_bytes(out.getvalue(), f"noise {number}"))
    return made


PICTURES = [str(path) for path in photographs()]


def send(prefill: NodeProcess, *paths: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "epd.cli.main", "send", "--to", prefill.listen, "--json", "--", *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


@pytest.mark.slow
def test_nodes_of_any_uid_serve_without_a_home_a_temporary_folder_or_a_place(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    variables = environment(
        TMPDIR=str(tmp_path), PYTHONPATH=os.pathsep.join(path for path in sys.path if path)
    )
    anybody: dict[str, Any] = {"cwd": "/", "env": variables}
    uid = 54_321 if os.geteuid() == 0 else os.geteuid()
    encoder_command = [*as_anybody(), *NODE, "--role", "encoder", *SHM, "--set", "worker.threads=1"]
    with started(*encoder_command, stderr=subprocess.DEVNULL, **anybody) as encoder:
        prefill_command = [*as_anybody(), *NODE, "--role", "prefill", "--encoders", encoder.listen, *SHM]
        with started(*prefill_command, stderr=subprocess.DEVNULL, **anybody) as prefill:
            assert Path(f"/proc/{prefill.pid}").stat().st_uid == uid
            (result,) = send(prefill, PICTURES[0])
            assert result["ok"], result
            assert prefill.terminate() == 0
        assert encoder.terminate() == 0


@pytest.mark.slow
async def test_what_a_draining_encoder_has_not_started_is_done_by_the_other() -> None:
    common = {"data_plane": "shm", "log_format": "json", "worker.threads": 1}
    with (
        node_process(common | {"role": "encoder"}, stderr=subprocess.DEVNULL) as leaves,
        node_process(common | {"role": "encoder"}, stderr=subprocess.DEVNULL) as stays,
        node_process(
            common | {"role": "prefill", "encoders": [leaves.listen, stays.listen]},
            stderr=subprocess.DEVNULL,
        ) as prefill,
    ):
        items = pictures(24)
        async with NodeClient(prefill.listen) as client, NodeClient(leaves.listen) as watcher:
            async with asyncio.TaskGroup() as requests:
                sent = [requests.create_task(client.submit([item], deadline_s=120)) for item in items]
                while (await watcher.inventory()).counts["parts"] < 3:
                    assert not all(task.done() for task in sent)
                leaves.process.terminate()
            assert [task.result().outcome.error for task in sent] == [None] * len(items)
        assert await asyncio.to_thread(leaves.process.wait, 40) == 0


@pytest.mark.slow
def test_who_embeds_nodes_keeps_the_process_as_it_was() -> None:
    """No signal handlers, log set-up, loop policy or process-wide flags: those are `epd-node`'s."""
    code = """
import asyncio, json, logging, os, resource, signal, sys, threading, warnings
from epd import EmbeddingReceiver
from epd.config import load_config
from epd.node import EncoderNode, PrefillNode

def state():
    return {
        "signals": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "handlers": [str(h) for h in logging.getLogger().handlers], "level": logging.getLogger().level,
        "policy": type(asyncio.get_event_loop_policy()).__name__,
        "filters": [str(f) for f in warnings.filters],
        "environment": dict(os.environ), "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "hooks": [str(sys.excepthook), str(threading.excepthook)], "cwd": os.getcwd(), "mask": os.umask(0o22),
        "stdout": str(sys.stdout), "stderr": str(sys.stderr), "switch": sys.getswitchinterval(),
    }

async def main():
    async with EncoderNode(load_config(None, {"role": "encoder", "data_plane": "shm"})) as encoder:
        settings = {"role": "prefill", "data_plane": "shm", "encoders": [encoder.listen]}
        async with PrefillNode(load_config(None, settings)):
            within.append(state())
        receiver = await asyncio.to_thread(EmbeddingReceiver.start, load_config(None, settings))
        within.append(state())
        await asyncio.to_thread(receiver.close)

within = []
before = state()
asyncio.run(main())
changed = [key for now in (*within, state()) for key in before if now[key] != before[key]]
# asyncio.run itself takes SIGINT while it runs.
for now in within:
    now["signals"].pop("2", None)
signals = [now["signals"] == {k: v for k, v in before["signals"].items() if k != "2"} for now in within]
print(json.dumps({"changed": sorted(set(changed) - {"signals"}), "signals": signals,
    "after": state()["signals"] == before["signals"]}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"changed": [], "signals": [True, True], "after": True}
