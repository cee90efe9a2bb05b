"""Nodes with keys as an operator runs them: from files alone, as processes, asked from the command line."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from epd.data import photographs
from epd.testing.processes import NodeProcess, node_process

PICTURE = str(photographs()[0])


def epd(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "epd.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


class Secured(NamedTuple):
    folder: Path
    prefill: NodeProcess


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Two nodes and a client that know each other, by `epd keygen` and one list of peers."""
    folder = tmp_path_factory.mktemp("keys")
    public = {}
    for name in ("encoder-1", "prefill-a", "alice", "mallory"):
        made = epd("keygen", str(folder / f"{name}.key"))
        assert made.returncode == 0, made.stderr
        public[name] = made.stdout.strip()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    peers = folder / "peers.toml"
    peers.write_text(
        f'[[peer]]\nkey = "{public["encoder-1"]}"\nrole = "encoder"\nnode = "encoder-1"\n'
        f'addresses = ["{address}"]\n'
        f'[[peer]]\nkey = "{public["prefill-a"]}"\nrole = "prefill"\nnode = "prefill-a"\n'
        f'[[peer]]\nkey = "{public["alice"]}"\nrole = "client"\n'
    )
    peers.chmod(0o600)
    common = {"data_plane": "shm", "log_format": "json", "security.peers": str(peers)}
    encoder = common | {"role": "encoder", "node": "encoder-1", "listen": address, "worker.threads": 1}
    prefill = common | {"role": "prefill", "node": "prefill-a", "encoders": [address]}
    key_of = "security.secret_key"
    with (
        node_process(encoder | {key_of: str(folder / "encoder-1.key")}, stderr=subprocess.DEVNULL),
        node_process(prefill | {key_of: str(folder / "prefill-a.key")}, stderr=subprocess.DEVNULL) as node,
    ):
        yield Secured(folder, node)


def send(secured: Secured, *keys: str) -> "subprocess.CompletedProcess[str]":
    return epd("send", "--to", secured.prefill.listen, *keys, "--json", "--", PICTURE)


@pytest.mark.slow
def test_who_is_on_the_list_is_served(secured: Secured) -> None:
    server = str(secured.folder / "prefill-a.key.pub")
    done = send(secured, "--key", str(secured.folder / "alice.key"), "--server-key", server)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert result["ok"]
    assert secured.prefill.ready["security"] == "curve"


@pytest.mark.slow
@pytest.mark.parametrize(
    "who", ["without a key", "with a key that nobody knows", "with another server's key"]
)
def test_strangers_get_nothing_and_others_are_served(secured: Secured, who: str) -> None:
    server = str(secured.folder / "prefill-a.key.pub")
    keys: dict[str, tuple[str, ...]] = {
        "without a key": (),
        "with a key that nobody knows": (
            "--key",
            str(secured.folder / "mallory.key"),
            "--server-key",
            server,
        ),
        "with another server's key": (
            *("--key", str(secured.folder / "alice.key")),
            *("--server-key", str(secured.folder / "encoder-1.key.pub")),
        ),
    }
    refused = send(secured, *keys[who])
    assert (refused.returncode, refused.stdout) == (2, "")
    assert len(refused.stderr.splitlines()) == 1
    served = send(secured, "--key", str(secured.folder / "alice.key"), "--server-key", server)
    assert served.returncode == 0, served.stderr


@pytest.mark.slow
def test_a_secret_that_others_can_read_is_refused_in_one_line(secured: Secured) -> None:
    open_key = secured.folder / "open.key"
    open_key.write_bytes((secured.folder / "alice.key").read_bytes())
    os.chmod(open_key, 0o644)
    done = send(secured, "--key", str(open_key), "--server-key", str(secured.folder / "prefill-a.key.pub"))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "open.key" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "told"),
    [("0.0." + "0.0", "insecure"), ("127.0.0.1", "loopback")],
    ids=["everywhere", "loopback"],
)
def test_a_node_that_serves_anybody_says_so_in_its_log_and_its_ready_line(
    host: str, told: str, tmp_path: Path
) -> None:
    """Where only this host can come, `insecure` opens nothing, and nothing is said."""
    settings = {
        "role": "prefill",
        "encoders": ["tcp://127.0.0.1:9"],
        "data_plane": "shm",
        "log_format": "json",
        "insecure": True,
        "listen": f"tcp://{host}:0",
        "media_listen": f"tcp://{host}:0",
    }
    log = tmp_path / "log"
    with log.open("wb") as stderr, node_process(settings, stderr=stderr.fileno()) as node:
        assert node.ready["security"] == told
        assert node.terminate() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    warned = [line for line in lines if line["event"].startswith("INSECURE: nobody is authenticated")]
    assert [(line["level"], line["listen"]) for line in warned] == (
        [("warning", node.listen)] if told == "insecure" else []
    )
