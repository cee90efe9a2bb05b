"""How many processors this process may use: its affinity, and the quota of its cgroups."""

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_processors(root: Path = Path("/")) -> int:
    """At least 1. A quota of 2.5 counts as 3. `root` is where `proc` and `sys` are."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        group = Path(path.lstrip("/"))
        # In a container the path may be the host's: the mount itself always counts.
        for parent in (group, *group.parents):
            if controllers == "":
                yield from _quota(_text(root / "sys/fs/cgroup" / parent / "cpu.max"))
            elif "cpu" in controllers.split(","):
                folder = root / "sys/fs/cgroup/cpu" / parent
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                yield from _quota(" ".join(_text(folder / name).strip() for name in names))


def _quota(text: str) -> Iterator[int]:
    """Of `QUOTA PERIOD`, both in microseconds; `max` or -1 is none, and so is what cannot be read."""
    match text.split():
        case [quota, period] if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            yield math.ceil(int(quota) / int(period))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
