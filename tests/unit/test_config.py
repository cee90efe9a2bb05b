"""Settings: where they come from, what is refused, and that the refusal teaches."""

import os
from pathlib import Path
from typing import Any

import pytest

from epd.config import Config, MemoryConfig, load_config
from epd.protocol.errors import ConfigError

ENCODER = {"role": "encoder"}
PREFILL = {"role": "prefill", "encoders": ["tcp://127.0.0.1:7001"]}


def refusal(overrides: dict[str, Any], toml: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(toml, overrides)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "node.toml"


def test_the_defaults_are_those_of_the_design() -> None:
    config = load_config(None, ENCODER)
    assert config == Config(role="encoder")
    assert (config.listen, config.data_plane, config.model) == (
        "tcp://127.0.0.1:0",
        "auto",
        "builtin:qwen2-vl",
    )
    assert config.pool == config.staging == MemoryConfig(regions=4, region_nbytes=64 * 1024 * 1024)
    timeouts = config.timeouts
    assert (timeouts.connect_s, timeouts.metadata_s, timeouts.room_s, timeouts.consume_warning_s) == (
        5,
        5,
        30,
        60,
    )
    assert (timeouts.read_base_s, timeouts.media_s, timeouts.forward_s, timeouts.dedup_retention_s) == (
        5,
        30,
        120,
        10,
    )
    assert (timeouts.heartbeat_s, timeouts.suspect_after_s, timeouts.dead_after_s) == (1, 2, 10)
    assert config.drain_timeout_s == 25


def test_overrides_win_over_the_file(toml: Path) -> None:
    toml.write_text(
        """
        role = "prefill"
        encoders = ["tcp://127.0.0.1:7001", "tcp://[::1]:7002"]
        verify = "checksum"
        [timeouts]
        room_s = 7
        [pool]
        regions = 2
        region_nbytes = 1_048_576
        """
    )
    config = load_config(
        toml, {"verify": "checksum", "pool.regions": 3, "listen": None, "trace": Path("a.trace")}
    )
    assert config.encoders == ("tcp://127.0.0.1:7001", "tcp://[::1]:7002")
    assert config.timeouts.room_s == 7.0
    assert config.pool == MemoryConfig(regions=3, region_nbytes=1_048_576)
    assert (config.verify, config.listen, config.trace) == ("checksum", "tcp://127.0.0.1:0", "a.trace")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {},
            "role: nothing given, allowed is 'encoder' or 'prefill' (by --role, EPD_ROLE or a settings file)",
        ),
        ({"role": "decoder"}, "role: 'decoder' given, allowed is 'encoder' or 'prefill'"),
        (
            ENCODER | {"log_format": "xml"},
            "log_format: 'xml' given, allowed is 'auto' or 'console' or 'json'",
        ),
        (
            ENCODER | {"data_plane": "nixl"},
            "data_plane: 'nixl' given, allowed is 'auto' or 'mooncake' or 'shm'",
        ),
        (ENCODER | {"verify": True}, "verify: True given, allowed is 'checksum' or 'off' or 'seal'"),
        (ENCODER | {"model": ""}, "model: '' given, allowed is text that is not empty"),
        (
            ENCODER | {"node": "two\nlines"},
            r"node: 'two\nlines' given, allowed is printable text that is not empty",
        ),
        (ENCODER | {"trace": ""}, "trace: '' given, allowed is printable text that is not empty"),
        (
            ENCODER | {"timeouts.room_s": 0},
            "timeouts.room_s: 0 given, allowed is a number above 0 to 86_400",
        ),
        (
            ENCODER | {"timeouts.room_s": float("nan")},
            "timeouts.room_s: nan given, allowed is a number above 0 to 86_400",
        ),
        (
            ENCODER | {"staging.region_nbytes": 5000},
            "staging.region_nbytes: 5000 given, allowed is an integer from 4_096 to 1_099_511_627_776,"
            " a multiple of 4_096",
        ),
        (ENCODER | {"pool.regions": True}, "pool.regions: True given, allowed is an integer from 1 to 1_024"),
        (ENCODER | {"worker.threads": 0}, "worker.threads: 0 given, allowed is an integer from 1 to 1_024"),
        (
            ENCODER | {"worker.batch_items": 129},  # more would fit no message to the worker
            "worker.batch_items: 129 given, allowed is an integer from 1 to 128",
        ),
        (PREFILL | {"encoders": "tcp://a:1"}, "encoders: 'tcp://a:1' given, allowed is a list of text"),
        (
            {"role": "prefill"},
            "encoders: nothing given, allowed is at least one tcp://HOST:PORT for role 'prefill'",
        ),
        (
            PREFILL | {"role": "encoder"},
            "encoders: ['tcp://127.0.0.1:7001'] given, allowed is nothing for role 'encoder': it is dialled",
        ),
        (
            PREFILL | {"encoders": ["127.0.0.1:1"]},
            "encoders: '127.0.0.1:1' given, allowed is tcp://HOST:PORT with a port of 1 to 65535",
        ),
        (
            ENCODER | {"device": "cuda:0", "data_plane": "shm"},
            "device: 'cuda:0' given, allowed is 'auto' or 'cpu' with data_plane 'shm': it is host memory",
        ),
        (
            ENCODER | {"direction": "push", "data_plane": "shm"},
            "direction: 'push' given, allowed is 'pull' with data_plane 'shm': a mapping in another process "
            "cannot be revoked",
        ),
        (
            ENCODER | {"direction": "push", "device": "cuda:0"},
            "direction: 'push' given, allowed is 'pull' with device 'cuda:0': a handle that a peer has "
            "opened cannot be revoked",
        ),
        (ENCODER | {"device": "gpu"}, "device: 'gpu' given, allowed is 'auto', 'cpu' or 'cuda:N'"),
        (
            ENCODER | {"timeouts.suspect_after_s": 1},
            "timeouts.suspect_after_s: 1 given, allowed is more than timeouts.heartbeat_s (1)",
        ),
        (
            ENCODER | {"timeouts.dead_after_s": 1.5},
            "timeouts.dead_after_s: 1.5 given, allowed is more than timeouts.suspect_after_s (2)",
        ),
        (
            ENCODER | {"limits.media_nbytes": 1000},
            "limits.max_item_media_nbytes: 67_108_864 given, allowed is at most limits.media_nbytes (1_000)",
        ),
        (ENCODER | {"pool": 4}, "pool: 4 given, allowed is a table [pool]"),
    ],
)
def test_a_wrong_setting_is_one_line_with_key_value_and_what_is_allowed(
    overrides: dict[str, Any], message: str
) -> None:
    assert refusal(overrides) == message


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("timeouts.rom_s", "timeouts.room_s"),
        ("room_s", "timeouts.room_s"),
        ("limits.room_s", "timeouts.room_s"),
        ("encoder", "encoders"),
        ("time_outs", "timeouts"),
        ("pool.x.regions", "pool.regions"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(key: str, nearest: str) -> None:
    assert refusal(ENCODER | {key: 1}) == f"{key}: unknown key; did you mean {nearest}?"


def test_a_key_near_nothing_lists_all() -> None:
    message = refusal(ENCODER | {"quux": 1})
    assert message.startswith("quux: unknown key; keys are: role, node, listen")
    assert "limits.max_peers" in message


@pytest.mark.parametrize("key", ["listen", "media_listen"])
@pytest.mark.parametrize("host", ["192.0.2.7", "0.0." + "0.0", "[::]", "node-7.example"])
def test_only_loopback_is_listened_on(key: str, host: str) -> None:
    address = f"tcp://{host}:7000"
    assert refusal(ENCODER | {key: address}) == (
        f"{key}: '{address}' given, allowed is a loopback address such as tcp://127.0.0.1:0, "
        "or any with security.secret_key (or insecure = true, which serves whoever comes)"
    )


@pytest.mark.parametrize("host", ["192.0.2.7", "0.0." + "0.0", "[::]", "node-7.example"])
@pytest.mark.parametrize("told", [{"insecure": True}, {"security.secret_key": "a", "security.peers": "b"}])
def test_other_addresses_are_listened_on_with_keys_or_when_told(host: str, told: dict[str, Any]) -> None:
    address = f"tcp://{host}:7000"
    given = ENCODER | told | {"listen": address, "media_listen": address, "data_plane": "shm"}
    assert load_config(None, given).listen == address


def test_metrics_are_on_loopback_until_an_address_is_named_which_needs_no_keys() -> None:
    """Keys would guard nothing there; a scrape must not need a node that serves anybody."""
    assert load_config(None, ENCODER).metrics_listen == "127.0.0.1"
    config = load_config(None, ENCODER | {"metrics_port": 9400, "metrics_listen": "192.0.2.7"})
    assert (config.metrics_listen, config.insecure) == ("192.0.2.7", False)


@pytest.mark.parametrize("plane", ["auto", "mooncake"])
def test_mooncake_beyond_loopback_needs_a_trusted_network(plane: str) -> None:
    keys = {"security.secret_key": "a", "security.peers": "b"}
    given = ENCODER | keys | {"listen": "tcp://192.0.2.7:7000", "data_plane": plane}
    assert refusal(given).startswith(
        f"data_plane: '{plane}' beside listen 'tcp://192.0.2.7:7000' given, allowed is 'shm', "
        "or security.trusted_network = true"
    )
    config = load_config(None, given | {"security.trusted_network": True})
    assert config.plane_host() == "192.0.2.7"
    everywhere = {"listen": "tcp://[::]:7000", "security.trusted_network": True}
    assert refusal(given | everywhere).startswith("listen: 'tcp://[::]:7000' given, allowed is one address")


@pytest.mark.parametrize(("given", "missing"), [("secret_key", "peers"), ("peers", "secret_key")])
def test_one_half_of_security_is_refused(given: str, missing: str) -> None:
    assert refusal(ENCODER | {f"security.{given}": "file"}) == (
        f"security.{missing}: nothing given, allowed is a file: secret_key and peers belong together"
    )


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:0", "tcp://127.8.9.1:80", "tcp://[::1]:0", "tcp://localhost:7000"]
)
def test_every_loopback_address_may_be_listened_on(address: str) -> None:
    assert load_config(None, ENCODER | {"listen": address}).listen == address


def test_an_address_that_is_none_is_refused_under_its_key() -> None:
    assert refusal(ENCODER | {"listen": "ipc://x"}).startswith(
        "listen: 'ipc://x' given, allowed is tcp://HOST:PORT"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("role = ", "not TOML"),
        ("metrics_port = " + "1" * 5000, "not TOML"),
        ("metrics_port = 0x" + "f" * 5000, "metrics_port: a number of thousands of digits given"),
        ("encoders = " + "[" * 5000, "not TOML"),
        ("[timeouts]\nrom_s = 1", "timeouts.rom_s: unknown key; did you mean timeouts.room_s?"),
        ("[timeout]\nroom_s = 1", "timeout: unknown key; did you mean timeouts?"),
        ("timeouts = 5", "timeouts: 5 given, allowed is a table [timeouts]"),
        ("[role]\nx = 1", "role: {'x': 1} given, allowed is 'encoder' or 'prefill'"),
    ],
)
def test_a_wrong_file_is_one_line_too(toml: Path, text: str, message: str) -> None:
    toml.write_text(text)
    assert message in refusal({}, toml)


def test_a_file_that_cannot_be_read_is_named(toml: Path) -> None:
    assert refusal({}, toml) == f"{toml}: cannot be read: No such file or directory"
    toml.write_bytes(b"\xff")
    assert refusal({}, toml).startswith(f"{toml}: not TOML: ")


def test_a_file_without_an_end_is_refused() -> None:
    assert refusal({}, Path("/dev/zero")) == "/dev/zero: cannot be read: more than 1048576 B"


def test_a_pipe_is_read_to_its_end_and_one_that_nobody_writes_to_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd.config.sources._READ_S", 0.05)
    fifo = tmp_path / "fifo.toml"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(fifo, os.O_WRONLY)
    assert refusal({}, fifo) == f"{fifo}: cannot be read: nothing came within 0.05 s"
    os.write(writer, b'role = "encoder"\n')
    os.close(writer)
    assert load_config(fifo, {}).role == "encoder"
    os.close(reader)


def test_the_worker_has_the_threads_it_was_given_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cpus, threads in ((1, 1), (2, 1), (16, 8)):
        monkeypatch.setattr("epd.config.schema.usable_processors", lambda cpus=cpus: cpus)
        assert load_config(None, ENCODER).worker_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "6,2")
    assert load_config(None, ENCODER).worker_threads() == 6
    assert load_config(None, ENCODER | {"worker.threads": 3}).worker_threads() == 3


def test_a_mailbox_has_room_for_everything_that_may_be_open() -> None:
    small = load_config(None, ENCODER | {"limits.max_open_requests": 1, "limits.max_peers": 1})
    assert small.mailbox_bound() == 7 + 4 + 128 * 4 + 3
