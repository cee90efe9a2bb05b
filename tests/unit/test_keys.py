"""Keys in files: what is written, what is refused and in which words, and who may be whom."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from epd.cli.keygen import keygen_command
from epd.protocol.errors import ConfigError
from epd.protocol.messages import Role
from epd.runtime.keys import (
    PeerEntry,
    Peers,
    is_key,
    new_keys,
    read_peers,
    read_public_key,
    read_secret_key,
    write_keys,
)


def test_keygen_writes_a_secret_only_its_owner_can_read(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    before = os.umask(0)
    try:
        result = CliRunner().invoke(keygen_command, [str(path)])
    finally:
        os.umask(before)
    assert result.exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    keys = read_secret_key(str(path))
    assert keys.public == result.output.strip() == read_public_key(f"{path}.pub", key="k")
    assert keys.secret not in repr(keys)


def test_keygen_never_replaces_a_key(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    write_keys(str(path), new_keys())
    text = path.read_text()
    with pytest.raises(ConfigError, match=r"node.key: cannot be written: File exists"):
        write_keys(str(path), new_keys())
    assert path.read_text() == text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_a_secret_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    write_keys(str(path), new_keys())
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"others may read it \(mode {mode:04o}\); chmod 600 it") as caught:
        read_secret_key(str(path))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["", "x" * 40, "short", "\0" * 40, "0" * 10_000, '"' * 40, "%" * 40])
def test_what_is_no_key_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "node.key"
    path.touch(0o600)
    path.write_text(text)
    if is_key(text):  # forty letters may well be one
        assert read_secret_key(str(path)).secret == text
        return
    with pytest.raises(ConfigError) as caught:
        read_secret_key(str(path))
    assert caught.value.message.startswith(f"security.secret_key: {path}: ")
    assert "\n" not in caught.value.message


def test_a_fifo_a_folder_and_nothing_are_refused_without_waiting(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (fifo, tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"not a file|No such file"):
            read_secret_key(str(path))


KEYS = [new_keys().public for _ in range(3)]


def peers_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "peers.toml"
    path.touch(0o644)
    path.write_text(text)
    return str(path)


def entry(number: int, rest: str) -> str:
    return f'[[peer]]\nkey = "{KEYS[number]}"\n{rest}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("peer = 3", "Expected `array`"),
        ("[[peer", "Expected"),
        ("[[peers]]", "'peers' given, allowed is"),
        ('[[peer]]\nkey = "short"\nrole = "client"', "peer 1: key 'short' given"),
        (entry(0, ""), "peer 1: role missing"),
        (entry(0, 'role = "king"'), "Invalid enum value 'king'"),
        (entry(0, 'role = "client"\nnoed = "x"'), "unknown field `noed`"),
        (entry(0, 'role = "client"') * 2, "given twice"),
        (entry(0, 'role = "client"\nnode = "a"') + entry(1, 'role = "client"\nnode = "a"'), "node 'a' given"),
        (entry(0, 'role = "encoder"\naddresses = ["host:1"]'), "tcp://HOST:PORT"),
    ],
)
def test_a_list_of_peers_that_is_wrong_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_peers(peers_file(tmp_path, text))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_list_of_peers_that_others_may_change_is_refused(tmp_path: Path) -> None:
    path = peers_file(tmp_path, "")
    Path(path).chmod(0o664)
    with pytest.raises(ConfigError, match="others may change it"):
        read_peers(path)


def test_a_list_of_peers_says_whose_key_is_where(tmp_path: Path) -> None:
    text = entry(0, 'role = "encoder"\naddresses = ["tcp://10.0.0.7:7101", "tcp://[::1]:7"]')
    peers = read_peers(peers_file(tmp_path, text))
    assert peers.key_at("tcp://10.0.0.7:7101") == peers.key_at("tcp://[::1]:7") == KEYS[0]
    assert peers.key_at("tcp://10.0.0.8:7101") is None
    assert KEYS[0] in peers
    assert KEYS[1] not in peers


@pytest.mark.parametrize(
    ("number", "role", "node", "refused"),
    [
        (0, "prefill", "prefill-a", ""),
        (0, "prefill", "prefill-b", "node 'prefill-a''s"),
        (0, "client", "prefill-a", "role 'prefill', not 'client'"),
        (1, "client", "anything", ""),
        (1, "client", "prefill-a", "node 'prefill-a' has another key"),
        (2, "client", "anything", "not in the list"),
    ],
)
def test_a_key_is_bound_to_role_and_node(number: int, role: Role, node: str, refused: str) -> None:
    peers = Peers([PeerEntry(KEYS[0], "prefill", "prefill-a"), PeerEntry(KEYS[1], "client")])
    assert refused in peers.refusal(KEYS[number], role, node)
    assert bool(refused) == bool(peers.refusal(KEYS[number], role, node))
