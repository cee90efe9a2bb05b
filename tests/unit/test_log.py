import json
import logging
import os
import pty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import structlog
from structlog.testing import capture_logs

from epd.cli.main import run_command
from epd.observe.log import (
    LogFormat,
    LogWriter,
    configure_logging,
    log_info,
    log_transfer_ended,
    phase_durations,
)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    yield fd, path
    os.close(fd)


def test_json_is_one_object_a_line(log_file: tuple[int, Path]) -> None:
    fd, path = log_file
    configure_logging("json", fd)
    structlog.get_logger().debug("unseen")
    structlog.get_logger().info("seen", peer="enc-\udc80", odd=Path("x"))
    try:
        raise ValueError("why")
    except ValueError:
        structlog.get_logger().exception("failed")
    logging.getLogger("asyncio").error("a task was %s", "lost")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("seen", "info"),
        ("failed", "error"),
        ("a task was lost", "error"),
    ]
    assert "ValueError: why" in lines[1]["exception"]
    assert lines[2]["logger"] == "asyncio"


@pytest.mark.parametrize("log_format", ["auto", "console"])
def test_auto_is_console_on_a_terminal(log_format: LogFormat) -> None:
    ours, terminal = pty.openpty()
    try:
        configure_logging(log_format, terminal)
        structlog.get_logger().info("seen")
        line = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(terminal)
    assert "seen" in line
    assert not line.startswith("{")


def test_auto_is_json_elsewhere(log_file: tuple[int, Path]) -> None:
    fd, path = log_file
    configure_logging("auto", fd)
    structlog.get_logger().info("seen")
    assert json.loads(path.read_text())["event"] == "seen"


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    reader, fd = os.pipe()
    os.close(reader)
    try:
        writer = configure_logging("json", fd)
        structlog.get_logger().info("unread")
        logging.getLogger("asyncio").error("unread")
    finally:
        os.close(fd)
    assert writer.lost == 2


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        writer = configure_logging("json", fd)
        structlog.get_logger().info("unwritten")
    finally:
        os.close(fd)
    assert writer.lost == 1


def test_a_descriptor_that_was_closed_costs_lines_and_nothing_else() -> None:
    reader, fd = os.pipe()
    writer = LogWriter(fd)
    os.close(reader)
    os.close(fd)
    writer.write("a line\n")
    assert writer.lost == 1


@pytest.mark.parametrize("nbytes", [1000, 100_000])
def test_a_reader_that_does_not_read_does_not_stop_the_writer(nbytes: int) -> None:
    reader, fd = os.pipe()
    writer = LogWriter(fd)
    line = "x" * nbytes + "\n"
    for _ in range(100):
        writer.write(line)
    whole = 100 - writer.lost
    assert writer.lost > 30
    got = os.read(reader, 1_000_000)
    writer.write("the next\n")
    os.close(fd)
    with os.fdopen(reader, "rb") as file:
        got += file.read()
    lines = got.decode().split("\n")
    assert lines.count("x" * nbytes) == whole
    assert lines[-2:] == ["the next", ""]


def test_a_phase_lasts_until_the_next_is_entered() -> None:
    phases_s = {"requested": 10.0, "metadata": 10.5, "buffer-registered": 12.0}
    assert phase_durations(phases_s, 15.0) == {"requested": 0.5, "metadata": 1.5, "buffer-registered": 3.0}
    assert phase_durations({}, 15.0) == {}


@pytest.mark.parametrize(
    ("outcome", "last", "level"), [("freed", "freed", "info"), ("read_failed", "failed", "warning")]
)
def test_an_ended_transfer_is_one_line_with_its_phases(outcome: str, last: str, level: str) -> None:
    with capture_logs() as logs:
        log_transfer_ended(
            request="req-1",
            transfer=7,
            peers=["enc-1"],
            outcome=outcome,
            started_s=9.0,
            phases_s={"requested": 10.0, "buffer-registered": 10.25, last: 12.0},
            ended_s=12.0,
        )
    assert logs == [
        {
            "event": "transfer ended",
            "log_level": level,
            "request": "req-1",
            "transfer": 7,
            "peers": ["enc-1"],
            "outcome": outcome,
            "total_s": 3.0,
            "requested_s": 0.25,
            "buffer_registered_s": 1.75,
        }
    ]


def test_an_embedding_process_that_configured_no_logs_sees_only_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    structlog.reset_defaults()
    log_info("seen by nobody")
    ended: dict[str, Any] = {"transfer": 1, "peers": [], "started_s": 0.0, "phases_s": {}, "ended_s": 1.0}
    log_transfer_ended(request="good", outcome="freed", **ended)
    assert capsys.readouterr().out == ""
    log_transfer_ended(request="bad", outcome="deadline", **ended)
    assert "bad" in capsys.readouterr().out


def test_output_that_a_full_disk_cannot_hold_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["shout"])

    @click.command("shout")
    def shout() -> None:
        with open("/dev/full", "w") as full:
            full.write("unwritten")

    assert run_command(shout) == 1
    assert capfd.readouterr().err == "shout: output cannot be written: No space left on device\n"
