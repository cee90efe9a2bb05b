"""What every scenario reports: rows with a reference from the same rounds, and the machine."""

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

_VERSIONS = ("mooncake-transfer-engine-non-cuda", "msgspec", "numpy", "pyzmq", "uvloop")


class Row(NamedTuple):
    """One figure, round by round: ours, and the reference's. Both in `unit`; less is better."""

    name: str
    size_bytes: int
    concurrency: int
    unit: str
    reference: str
    ours: Sequence[float]
    theirs: Sequence[float]

    def as_json(self) -> dict[str, Any]:
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        return {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "concurrency": self.concurrency,
            "unit": self.unit,
            "epd": spread(self.ours),
            "reference": {"name": self.reference} | spread(self.theirs),
            "ratio": spread(ratios),
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "min": round(min(values), 4),
        "median": round(median(values), 4),
        "max": round(max(values), 4),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    versions: dict[str, str | None] = {}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_s(pid: int) -> float:
    """User and system seconds a process has used so far, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
