"""`epd doctor`: each miss comes with the line that fixes it, and a plane that lies is found."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import zmq
from click.testing import CliRunner

from epd.cli import doctor, doctor_checks, doctor_selftest
from epd.cli.doctor_checks import Check
from epd.cli.doctor_selftest import SelfTest
from epd.dataplane.select import open_plane
from epd.memory.available import Available


def check_named(name: str, root: Path) -> Check:
    return next(check for check in doctor_checks.checks(root) if check.name == name)


def test_every_miss_has_a_fix_and_nothing_else_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_version", lambda name: None)
    monkeypatch.setattr(doctor_checks, "_import_error", lambda module: f"No module named {module}")
    monkeypatch.setattr(zmq, "has", lambda feature: False)
    monkeypatch.setattr(doctor_checks, "available_memory", lambda root: Available(4096, "a limit"))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    (tmp_path / "proc/sys/vm").mkdir(parents=True)
    (tmp_path / "proc/sys/vm/max_map_count").write_text("1000\n")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    found = list(doctor_checks.checks(tmp_path))
    missing = {check.name for check in found if check.status == "missing"}
    named = {
        "zeromq",
        "torch",
        "mooncake",
        "rdma",
        "transformers",
        "memory",
        "vm.max_map_count",
        "descriptors",
    }
    assert missing >= named
    assert all(bool(check.fix) == (check.status == "missing") for check in found)


@pytest.mark.parametrize(
    ("error", "packages"),
    [
        ("libibverbs.so.1: cannot open shared object file", "libibverbs1"),
        ("libnuma.so.1: cannot open shared object file", "libnuma1"),
        ("something else", "libibverbs1 libnuma1 libnl-3-200 libnl-route-3-200"),
    ],
)
def test_a_missing_library_is_named_with_its_package(
    error: str, packages: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        doctor_checks, "_import_error", lambda module: error if "mooncake" in module else None
    )
    assert check_named("mooncake", tmp_path).fix == f"apt-get install {packages}"


def test_a_driver_without_a_torch_that_sees_it_is_a_miss(tmp_path: Path) -> None:
    assert check_named("cuda", tmp_path).status == "note"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").write_text("")
    assert check_named("cuda", tmp_path).status == "missing"


def test_transports_that_were_never_run_are_said() -> None:
    said = {way.name: way.was_run for way in doctor_checks.transports()}
    for name in ("mooncake/rdma", "mooncake/efa", "mooncake/ascend"):
        assert said[name].startswith("never run")


def test_a_plane_that_delivers_other_bytes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = open_plane

    def lying(choice: Any, host: str) -> Any:
        plane = real(choice, host)
        read_now = plane.read_now

        def read(session: Any, piece: Any) -> Any:
            return read_now(session, piece._replace(offset=0))

        plane.read_now = read  # type: ignore[method-assign]
        return plane

    assert doctor_selftest.self_test("shm").ok
    monkeypatch.setattr(doctor_selftest, "open_plane", lying)
    failed = doctor_selftest.self_test("shm")
    assert failed == SelfTest("shm", ok=False, nbytes=1024 * 1024, error="other bytes arrived")


def test_an_owner_that_cannot_start_is_a_failed_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_selftest, "__name__", "epd.no_such_module")
    failed = doctor_selftest.self_test("shm")
    assert not failed.ok
    assert failed.error == "the other process has died"


@pytest.mark.slow
def test_the_command_tests_every_plane_that_is_installed() -> None:
    done = CliRunner().invoke(doctor.doctor_command, ["--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert report["ok"] is True
    assert [plane["data_plane"] for plane in report["data_planes"]] == ["shm", "mooncake/tcp"]
    assert all(plane["ok"] and plane["nbytes"] == 1024 * 1024 for plane in report["data_planes"])
    assert {check["status"] for check in report["checks"]} <= {"ok", "note"}


def test_a_failed_plane_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SelfTest("shm", ok=False, nbytes=0, error="other bytes arrived")
    monkeypatch.setattr(doctor, "self_test", lambda plane: failed)
    done = CliRunner().invoke(doctor.doctor_command, [])
    assert done.exit_code == 1
    assert "FAILED   self-test of shm: other bytes arrived" in done.stdout
