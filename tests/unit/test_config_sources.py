"""Where settings come from: file, variables and flags under the same names; the stronger one wins."""

import json
from pathlib import Path

import example_config
import pytest
from click.testing import CliRunner

from epd.cli.config import config_command
from epd.cli.main import run_command
from epd.config import Config, Settings, load_config, load_settings
from epd.config.schema import KEYS
from epd.config.sources import is_injected, variable_of
from epd.protocol.errors import ConfigError

ENCODER = [("--role", "role", "encoder")]


def from_variables(**variables: str) -> Settings:
    return load_settings(None, variables, ENCODER)


def refusal(**variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_variables(**variables)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_flags_go_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("verify = 'off'\n\n[timeouts]\nroom_s = 1\nmedia_s = 1\n  forward_s = 1\n")
    settings = load_settings(
        str(file),
        {"EPD_TIMEOUTS__ROOM_S": "2", "EPD_TIMEOUTS__MEDIA_S": "2", "HOME": "/"},
        [*ENCODER, ("--set timeouts.room_s", "timeouts.room_s", "3")],
    )
    timeouts = settings.config.timeouts
    assert (timeouts.room_s, timeouts.media_s, timeouts.forward_s) == (3, 2, 1)
    assert settings.origins["timeouts.room_s"] == "flag --set timeouts.room_s"
    assert settings.origins["timeouts.media_s"] == "variable EPD_TIMEOUTS__MEDIA_S"
    assert settings.origins["timeouts.forward_s"] == f"{file}:6"
    assert settings.origins["verify"] == f"{file}:1"
    assert settings.origins["listen"] == "default"
    assert set(settings.origins) == set(KEYS)


def test_a_variable_may_name_the_file_and_a_flag_another(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"node = '{name}'")
    environ = {"EPD_CONFIG": str(tmp_path / "one")}
    assert load_settings(None, environ, ENCODER).config.node == "one"
    assert load_settings(str(tmp_path / "two"), environ, ENCODER).config.node == "two"


def test_text_becomes_the_value_of_its_type() -> None:
    config = from_variables(
        EPD_POOL__REGION_NBYTES="1_048_576",
        EPD_WORKER__THREADS="3",
        EPD_DRAIN_TIMEOUT_S="1.5",
        EPD_INSECURE="true",
        EPD_NODE="7",
        EPD_METRICS_PORT="0",
    ).config
    assert (config.pool.region_nbytes, config.worker.threads, config.drain_timeout_s) == (1_048_576, 3, 1.5)
    assert (config.insecure, config.node, config.metrics_port) == (True, "7", 0)


def test_blanks_and_a_trailing_comma_in_a_list_do_not_count() -> None:
    given = " tcp://a:1 , tcp://[::1]:2,, tcp://a:1 ,"
    config = load_settings(None, {"EPD_ROLE": "prefill"}, [("--encoders", "encoders", given)]).config
    assert config.encoders == ("tcp://a:1", "tcp://[::1]:2", "tcp://a:1")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "EPD_TIMEOUTS__ROM_S",
            "1",
            "EPD_TIMEOUTS__ROM_S: unknown variable; did you mean EPD_TIMEOUTS__ROOM_S?",
        ),
        ("EPD_ROOM_S", "1", "EPD_ROOM_S: unknown variable; did you mean EPD_TIMEOUTS__ROOM_S?"),
        ("EPD_METRIC_PORT", "9400", "EPD_METRIC_PORT: unknown variable; did you mean EPD_METRICS_PORT?"),
        ("EPD_QUUX", "1", "EPD_QUUX: unknown variable; see epd config --show for all keys"),
        (
            "EPD_TIMEOUTS__ROOM_S",
            "0",
            "timeouts.room_s: 0 given, allowed is a number above 0 to 86_400",
        ),
        (
            "EPD_POOL__REGIONS",
            "4\nx = 1",
            r"pool.regions: '4\nx = 1' given, allowed is an integer from 1 to 1_024",
        ),
        ("EPD_POOL__REGIONS", "many", "pool.regions: 'many' given, allowed is an integer from 1 to 1_024"),
        ("EPD_INSECURE", "yes", "insecure: 'yes' given, allowed is true or false"),
        (
            "EPD_POOL__REGIONS",
            "1" * 5000,
            f"pool.regions: '{'1' * 5000}' given, allowed is an integer from 1 to 1_024",
        ),
    ],
)
def test_what_is_wrong_with_a_variable_is_one_line(name: str, text: str, message: str) -> None:
    assert refusal(**{name: text}) == message


INJECTED = {
    "EPD_PORT": "tcp://10.0.0.7:7000",
    "EPD_SERVICE_HOST": "10.0.0.7",
    "EPD_SERVICE_PORT": "7000",
    "EPD_SERVICE_PORT_CONTROL": "7000",
    "EPD_PORT_7000_TCP": "tcp://10.0.0.7:7000",
    "EPD_PORT_7000_TCP_PROTO": "tcp",
    "EPD_PORT_7000_TCP_PORT": "7000",
    "EPD_PORT_7000_TCP_ADDR": "10.0.0.7",
    "EPD_METRICS_PORT": "tcp://10.0.0.8:9400",  # of a Service named epd-metrics
    "EPD_PREFILL_SERVICE_HOST": "10.0.0.9",
}


def test_what_kubernetes_injects_is_ignored_and_not_used() -> None:
    assert all(is_injected(*item) for item in INJECTED.items())
    assert from_variables(**INJECTED).config == Config(role="encoder")


@pytest.mark.parametrize("item", [("EPD_PORT", "7000"), ("EPD_SERVICE_PORT", "x"), ("EPD_PORTS", "1")])
def test_what_only_looks_like_it_is_refused(item: tuple[str, str]) -> None:
    assert not is_injected(*item)
    assert refusal(**dict([item])).startswith(f"{item[0]}: unknown variable")


def test_no_two_keys_share_a_variable_and_none_looks_injected() -> None:
    names = [variable_of(key) for key in KEYS]
    assert len(set(names)) == len(names)
    assert not any(is_injected(name, "1") for name in names)


def test_the_example_file_is_that_of_the_schema_and_says_the_defaults() -> None:
    text = example_config.EXAMPLE.read_text()
    assert text == example_config.render(), "run tools/example_config.py"
    assert load_config(example_config.EXAMPLE, {}) == Config(role="encoder")
    names = {line.removeprefix("# ").partition(" =")[0] for line in text.splitlines()}
    assert {key.rpartition(".")[2] for key in KEYS} <= names


def test_what_config_shows_is_a_file_that_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_TIMEOUTS__ROOM_S", "7")
    given = ["--show", "--role", "prefill", "--encoders", "tcp://a:1,", "--set", "node=näme"]
    shown = CliRunner().invoke(config_command, given)
    assert shown.exit_code == 0, shown.output
    (tmp_path / "shown.toml").write_text(shown.output)
    config = load_config(tmp_path / "shown.toml", {})
    assert (config.timeouts.room_s, config.encoders, config.node) == (7, ("tcp://a:1",), "näme")
    rows = json.loads(CliRunner().invoke(config_command, [*given, "--json"]).output)
    assert rows["timeouts.room_s"] == {"value": 7.0, "origin": "variable EPD_TIMEOUTS__ROOM_S"}
    assert rows["encoders"] == {"value": ["tcp://a:1"], "origin": "flag --encoders"}
    assert set(rows) == set(KEYS)


def test_config_without_a_role_says_in_one_line_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["epd", "--show"])
    assert run_command(config_command) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("config: role: nothing given, ")
    assert "--role" in said.err


def test_a_flag_without_a_value_or_a_key_is_refused() -> None:
    for pair, message in (("room_s", "set: 'room_s' given"), ("rom_s=1", "did you mean timeouts.room_s?")):
        with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
            CliRunner().invoke(
                config_command, ["--show", "--role", "encoder", "--set", pair], catch_exceptions=False
            )
