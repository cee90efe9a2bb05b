"""Processors that may be used: the least of affinity and every cgroup's quota."""

from pathlib import Path

import pytest

from epd.runtime.processors import usable_processors


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("own", "above", "count"),
    [
        ("max 100000", "max 100000", 16),
        ("250000 100000", "max 100000", 3),
        ("max 100000", "400000 100000", 4),
        ("50000 100000", "400000 100000", 1),
        ("9900000 100000", "nonsense", 16),
    ],
)
def test_the_least_quota_of_a_cgroup_and_those_above_it_counts(
    tmp_path: Path, own: str, above: str, count: int
) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path / "sys/fs/cgroup/pod/container/cpu.max", own + "\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", above + "\n")
    assert usable_processors(tmp_path) == count


@pytest.mark.parametrize(("quota", "count"), [("-1", 16), ("200000", 2)])
def test_version_one_of_cgroups_too(tmp_path: Path, quota: str, count: int) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota + "\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert usable_processors(tmp_path) == count


def test_without_cgroups_affinity_alone_counts(tmp_path: Path) -> None:
    assert usable_processors(tmp_path) == 16
