"""Whole nodes in virtual time: the same again from the same seed, right whatever happens, and not blind."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner

from epd.actors.receive_buffers import LeaseFree, ReceiveBuffers
from epd.check.machines import Patch, StepFunction
from epd.check.mutations import MUTATIONS
from epd.cli.simulate import simulate_command
from epd.node import EncoderNode
from epd.protocol import prefill_types, reads
from epd.protocol.machine import Step
from epd.runtime.machines import MachineTable
from epd.sim.faults import KINDS
from epd.sim.hour import Hour, simulate_hour
from epd.sim.night import be_quiet

HALF_AN_HOUR_S = 1_800.0
RARE = {
    *(f"fault_{kind}" for kind in KINDS),
    *("abort_missed", "drained", "forward_failed", "forward_stuck", "frame_stood", "landed_while_aborted"),
    *("lost_by_close", "no_room", "read_stood", "rejected_session_over", "worker_died"),
    *("read_aborted", "read_failed", "read_ok", "read_refused", "read_seal_mismatch"),
    *("part_cancelled", "part_deadline", "part_draining", "part_forward_failed", "part_session_lost"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What nodes say of being broken is left out here; other tests look at it."""
    handlers = logging.getLogger().handlers[:]
    be_quiet()
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers


def simulate(*arguments: str, hash_seed: int = 0) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "epd.cli.main", "simulate", "--json", *arguments]
    variables = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=variables)
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


@pytest.mark.slow
def test_one_seed_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    reports, traces = [], []
    for hash_seed in (1, 2):
        folder = tmp_path / str(hash_seed)
        arguments = ("--seed", "7", "--hours", "0.3", "--traces", str(folder))
        status, report = simulate(*arguments, hash_seed=hash_seed)
        assert status == 0, report
        reports.append(report)
        traces.append({path.name: path.read_bytes() for path in (folder / "hour-0").iterdir()})
    assert reports[0] == reports[1]
    assert len(traces[0]) >= 4
    assert traces[0] == traces[1]
    assert simulate("--seed", "8", "--hours", "0.3")[1]["digest"] != reports[0]["digest"]


@pytest.mark.slow
def test_fixed_hours_in_which_all_that_is_rare_happens() -> None:
    status, report = simulate("--seed", "1", "--hours", "6", "--jobs", "2")
    assert status == 0, report
    assert report["ok"] is True
    assert report["virtual_hours"] >= 6
    assert report["delivered"] > 3_000
    assert (report["lost"], report["corrupted_nbytes"], report["residue"]) == (0, 0, 0)
    missing = RARE - report["provoked"].keys()
    assert not missing
    assert {"busy", "cancelled", "deadline", "pool_exhausted"} <= report["failed"].keys()


def break_machines(monkeypatch: pytest.MonkeyPatch, patches: Mapping[str, Patch]) -> None:
    """Take a rule out of the machines of these kinds, in every node."""
    shipped = MachineTable.__init__

    def patched(self: MachineTable, kind: str, *arguments: Any) -> None:
        shipped(self, kind, *arguments)
        if kind in patches:
            self._step = patches[kind](self._step)

    monkeypatch.setattr(MachineTable, "__init__", patched)
    if "reads" in patches:  # stepped by the poller itself
        monkeypatch.setattr(reads, "step", patches["reads"](reads.step))


def seeded_bug(name: str) -> Mapping[str, Patch]:
    """One that the model checker finds as well."""
    (mutation,) = (one for one in MUTATIONS if one.name == name)
    kinds = {"slot": "slots", "read": "reads", "source": "sources", "job": "jobs"}
    return {kinds[kind]: patch for kind, patch in mutation.patches.items()}


def first_bad(hours: range) -> Hour:
    """Half an hour of each; without those whose traces are checked, which are a check of their own."""
    for number in hours:
        hour = simulate_hour(11, number, HALF_AN_HOUR_S)
        if not hour.ok:
            return hour
    raise AssertionError("nothing was noticed")


@pytest.mark.slow
def test_room_given_back_under_a_running_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    break_machines(monkeypatch, seeded_bug("lease a slot while its read may still land"))
    assert any("into which somebody still writes" in what for what in first_bad(range(1, 10)).violations)


@pytest.mark.slow
def test_a_late_writer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    break_machines(monkeypatch, seeded_bug("treat a timed-out read as ended"))
    assert any("another read still writes" in what for what in first_bad(range(1, 10)).violations)


@pytest.mark.slow
def test_wrong_bytes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    break_machines(monkeypatch, seeded_bug("skip the seal check"))
    bad = first_bad(range(1, 10))
    assert bad.corrupted_nbytes > 0
    assert any("wrong" in what for what in bad.violations)


@pytest.mark.slow
def test_a_request_without_an_outcome_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def say_nothing(shipped: StepFunction) -> StepFunction:
        def step(*fed: Any) -> Step:
            after, effects = shipped(*fed)
            return Step(after, tuple(e for e in effects if not isinstance(e, prefill_types.FailRequest)))

        return step

    break_machines(monkeypatch, {"prefill": say_nothing})
    assert first_bad(range(1, 10)).lost > 0


@pytest.mark.slow
def test_what_stays_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = ReceiveBuffers.handle

    def forgetful(self: ReceiveBuffers, message: Any) -> None:
        if not isinstance(message, LeaseFree):
            handle(self, message)

    monkeypatch.setattr(ReceiveBuffers, "handle", forgetful)
    assert first_bad(range(1, 10)).residue


def test_a_task_that_outlives_its_node_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = EncoderNode.drain
    kept = []

    async def forgetful(self: EncoderNode, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        kept.append(loop.create_task(asyncio.Event().wait(), name="forgotten"))
        return await drain(self, timeout_s)

    monkeypatch.setattr(EncoderNode, "drain", forgetful)
    assert any("has left, and forgotten runs on" in what for what in simulate_hour(11, 5, 60.0).violations)


@pytest.mark.slow
def test_a_node_that_fails_is_told_with_the_command_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    break_machines(monkeypatch, seeded_bug("a forward without room"))
    arguments = ["--seed", "11", "--first", "5", "--hours", "0.2", "--jobs", "1"]
    said = CliRunner().invoke(simulate_command, arguments)
    assert said.exit_code == 1
    assert "hour 5 (again: epd simulate --seed 11 --first 5 --hours 0.2):" in said.stderr
    assert "ended: dedup" in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.slow
def test_a_killed_process_of_a_night_is_one_line_and_the_others_go_with_it() -> None:
    command = [
        sys.executable,
        "-m",
        "epd.cli.main",
        "simulate",
        "--seed",
        "1",
        "--hours",
        "400",
        "--jobs",
        "2",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as night:
        children = Path(f"/proc/{night.pid}/task/{night.pid}/children")
        while len(started := spawned(children)) < 2:
            assert night.poll() is None
        os.kill(started[0], signal.SIGKILL)
        out, err = night.communicate(timeout=200)
    assert (night.returncode, out) == (1, "")
    assert err.startswith("night_cut_short: a process was killed") and err.count("\n") == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def spawned(children: Path) -> list[int]:
    """Of those that do the work."""
    pids = [int(pid) for pid in children.read_text().split()]
    return [pid for pid in pids if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
