"""What limits a pool: the machine, or the tightest cgroup above this process."""

from pathlib import Path

from epd.memory.available import Available, available_memory

MIB = 1024 * 1024


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:  4096 kB\n"}


def test_a_machine_without_limits_gives_what_it_has(tmp_path: Path) -> None:
    write(tmp_path, MACHINE)
    assert available_memory(tmp_path) == Available(4 * MIB, "MemAvailable of this machine")


def test_a_limit_above_the_own_cgroup_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/container/memory.max": "max\n",
        "sys/fs/cgroup/pod/container/memory.current": "4096\n",
        "sys/fs/cgroup/pod/memory.max": f"{3 * MIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{2 * MIB}\n",
    }
    write(tmp_path, MACHINE | files)
    assert available_memory(tmp_path) == Available(MIB, f"a memory limit of {3 * MIB} B on this cgroup")


def test_a_container_sees_its_limit_at_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../../host/path\n",
        "sys/fs/cgroup/memory.max": f"{3 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * MIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {MIB}\n",
    }
    write(tmp_path, MACHINE | files)
    assert available_memory(tmp_path).nbytes == 2 * MIB


def test_the_first_version_of_cgroups_counts_and_its_no_limit_does_not(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n",
        f"{base}/a/memory.limit_in_bytes": f"{MIB}\n",
        f"{base}/a/memory.usage_in_bytes": "4096\n",
        f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/memory.usage_in_bytes": "4096\n",
    }
    write(tmp_path, MACHINE | files)
    assert available_memory(tmp_path).nbytes == MIB - 4096


def test_more_is_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "4096\n",
        "sys/fs/cgroup/memory.current": "8192\n",
    }
    write(tmp_path, MACHINE | files)
    assert available_memory(tmp_path).nbytes == 0


def test_what_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path).nbytes > 2**50
