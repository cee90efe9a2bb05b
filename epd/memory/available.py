"""How much memory a pool may take: what the machine has free, and what this process's cgroup allows.

Memory that is pre-faulted beyond either is not refused by the kernel: it kills a process instead.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_UNLIMITED: Final = 2**60
"""What version 1 calls no limit is larger than this."""


class Available(NamedTuple):
    """`nbytes` that may be taken now, and `reason`: what limits it, for people."""

    nbytes: int
    reason: str


def available_memory(root: Path = Path("/")) -> Available:
    """The least of what the machine and each cgroup above this process leave.

    `root` is where `proc` and `sys` are. What cannot be read limits nothing.
    """
    return min(_limits(root), default=Available(_UNLIMITED, "nothing that can be read"))


def _limits(root: Path) -> Iterator[Available]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield Available(int(rest.split()[0]) * 1024, "MemAvailable of this machine")
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from _up(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _up(
                root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes"
            )


def _up(mount: Path, path: str, limit_name: str, used_name: str) -> Iterator[Available]:
    """The limits of a cgroup and of all above it. In a container the path may be the host's and its
    own group be the mount itself, which is why the mount always counts."""
    group = Path(path.lstrip("/"))
    for parent in (group, *group.parents):
        limit = _number(mount / parent / limit_name)
        used = _number(mount / parent / used_name)
        if limit is not None and used is not None and limit < _UNLIMITED:
            # Files in the page cache count as used and are given up first, but how many is a guess.
            cached = _cached_nbytes(mount / parent)
            yield Available(max(0, limit - used + cached), f"a memory limit of {limit} B on this cgroup")


def _cached_nbytes(group: Path) -> int:
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == "inactive_file" and value.strip().isdecimal():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
