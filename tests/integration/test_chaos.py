"""`epd chaos`: real processes are broken while they work, and nothing is lost, wrong or left behind."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from node_pairs import PLANES

REPORT_KEYS = {
    *("ok", "seed", "requests", "delivered", "failed", "lost", "corrupted_bytes", "residue", "stale_reads"),
    *("faults", "recovery_ms", "data_plane"),
}
SEED = 1
REQUESTS = 200


def chaos(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "epd.cli.main", "chaos", "--json", "--seed", str(SEED)]
    command += ["--requests", str(REQUESTS), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    if "log" in report:
        os.unlink(report["log"])
    return done.returncode, report


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_nothing_is_lost_wrong_or_left(plane: str) -> None:
    status, report = chaos("--data-plane", plane)
    assert status == 0, report
    assert set(report) >= REPORT_KEYS
    assert report["ok"] is True
    assert report["delivered"] + sum(report["failed"].values()) == REQUESTS
    assert set(report["failed"]) <= {"cancelled", "deadline"}
    assert report["data_plane"].startswith(plane)
    for kind in ("sigkill", "sigstop", "cut", "drop", "duplicate", "delay", "early_reuse"):
        assert report["faults"][kind] >= 1
    assert report["stale_reads"] > 0


@pytest.mark.slow
def test_the_same_seed_without_the_seals_corrupts() -> None:
    status, report = chaos("--verify", "off")
    assert status == 1
    assert report["corrupted_bytes"] > 0
    assert report["lost"] == 0
