"""What `epd doctor` looks at: each check says what it found and, for a miss, the line that fixes it."""

import fcntl
import importlib
import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import zmq

from epd.config import MemoryConfig
from epd.memory.available import available_memory

MIB: Final = 1024 * 1024
MIN_MAP_COUNT: Final = 65_530
"""The kernel's default. A pool is a few mappings; what is mapped besides is torch's and Mooncake's."""
MIN_DESCRIPTORS: Final = 4_096

Status = Literal["ok", "missing", "note"]


class Check(NamedTuple):
    """`missing`: something a node can use is not there, and `fix` gets it. `note`: worth knowing."""

    name: str
    status: Status
    found: str
    fix: str | None = None


class Transport(NamedTuple):
    """A way of the bytes. `was_run`: whether this project has ever run it, and where."""

    name: str
    is_here: bool
    was_run: str


_MOONCAKE_BUILDS: Final = {
    "mooncake-transfer-engine-non-cuda": "cpu",
    "mooncake-transfer-engine": "cuda12",
    "mooncake-transfer-engine-cuda13": "cuda13",
}
"""Distributions, with the extra of ours that installs each."""
_LIBRARIES: Final = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
}
"""Shared libraries that Mooncake's wheels expect, with Debian's packages."""


def checks(root: Path = Path("/")) -> Iterator[Check]:
    """All of them, in the order in which people read them. `root` is where `proc` and `sys` are."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    yield _package("epd", "")
    yield _libzmq()
    yield from _torch(root)
    yield _mooncake()
    yield _rdma(root)
    yield from _models()
    yield _memory(root)
    yield _memfd()
    yield _map_count(root)
    yield _descriptors()


def transports(root: Path = Path("/")) -> list[Transport]:
    """Of every data plane; what is not here may still be installed."""
    mooncake = _import_error("mooncake.engine") is None
    rdma = bool(_rdma_devices(root))
    cuda = _has_nvidia(root)
    never = "never run by this project: no such hardware"
    return [
        Transport("shm", True, "run in every test"),
        Transport("mooncake/tcp", mooncake, "run in every test"),
        Transport("mooncake/rdma", mooncake and rdma, never),
        Transport(
            "mooncake/nvlink (one host, CUDA)", mooncake and cuda, "run by hand; see docs/benchmarks.md"
        ),
        Transport("mooncake/efa", False, never),
        Transport("mooncake/ascend", False, never),
        Transport("mooncake/cxl", False, never),
    ]


def _package(name: str, extra: str) -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", "not installed", f"pip install 'epd{extra}'")


def _libzmq() -> Check:
    found = f"libzmq {zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}"
    if zmq.has("curve"):
        return Check("zeromq", "ok", found + ", with CURVE")
    fix = "pip install --force-reinstall pyzmq  # its wheel brings a libzmq with CURVE"
    return Check("zeromq", "missing", found + ", without CURVE: nodes cannot be authenticated", fix)


def _has_nvidia(root: Path) -> bool:
    return (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists()


def _torch(root: Path) -> Iterator[Check]:
    error = _import_error("torch")
    if error is not None:
        yield Check("torch", "missing", error, "pip install torch")
        return
    import torch

    yield Check("torch", "ok", torch.__version__)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Check("cuda", "ok", ", ".join(names))
    elif _has_nvidia(root):
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield Check("cuda", "missing", f"a driver, but torch {torch.__version__} sees no device", fix)
    else:
        yield Check("cuda", "note", "no NVIDIA driver: the CPU is used")


def _mooncake() -> Check:
    found = [
        f"{name} {importlib.metadata.version(name)}"
        for name in _MOONCAKE_BUILDS
        if _version(name) is not None
    ]
    error = _import_error("mooncake.engine")
    if not found and error is not None:
        fix = "pip install 'epd[cpu]'  # or epd[cuda12], epd[cuda13] on a GPU"
        return Check("mooncake", "missing", "not installed: only shm is left, on one host", fix)
    if error is not None:
        packages = [package for library, package in _LIBRARIES.items() if library in error]
        packages = packages or list(_LIBRARIES.values())
        return Check("mooncake", "missing", f"{found[0]}: {error}", "apt-get install " + " ".join(packages))
    if len(found) > 1:
        fix = "pip uninstall " + " ".join(_MOONCAKE_BUILDS) + "  # then install one of them"
        return Check("mooncake", "missing", "several builds of one module: " + ", ".join(found), fix)
    return Check("mooncake", "ok", found[0] if found else "built from source")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return str(error).splitlines()[0]
    return None


def _rdma_devices(root: Path) -> list[str]:
    try:
        return sorted(path.name for path in (root / "sys/class/infiniband").iterdir())
    except OSError:
        return []


def _rdma(root: Path) -> Check:
    devices = _rdma_devices(root)
    if not devices:
        return Check("rdma", "note", "no device in /sys/class/infiniband: between hosts TCP is used")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    names = ", ".join(devices)
    if soft != resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited  # LimitMEMLOCK=infinity in a systemd unit"
        return Check("rdma", "missing", f"{names}, but only {soft} B may be locked", fix)
    return Check("rdma", "ok", f"{names}; this project has never run RDMA")


def _models() -> Iterator[Check]:
    for name in ("transformers", "safetensors", "pillow"):
        found = _version(name)
        if found is None:
            fix = "pip install 'epd[hf]'"
            yield Check(name, "missing", "not installed: an encoder node cannot run a model", fix)
        else:
            yield Check(name, "ok", found)


def _memory(root: Path) -> Check:
    available = available_memory(root)
    needed = MemoryConfig().regions * MemoryConfig().region_nbytes
    found = f"{available.nbytes // MIB} MiB available, by {available.reason}"
    if available.nbytes >= needed:
        return Check("memory", "ok", found)
    fix = "lower pool.regions (prefill) or staging.regions (encoder), or raise the limit"
    return Check("memory", "missing", f"{found}; a default pool takes {needed // MIB} MiB", fix)


def _memfd() -> Check:
    """Shared regions are memfds: they count as memory, and the size of /dev/shm does not limit them."""
    try:
        fd = os.memfd_create("epd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        fix = "allow memfd_create in the container's seccomp profile"
        return Check("memfd", "missing", f"memfd_create: {error.strerror}", fix)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return Check("memfd", "ok", "can be made and sealed; limited by memory, not by /dev/shm")
    except OSError as error:
        return Check("memfd", "missing", f"sealing: {error.strerror}", "use a kernel from 3.17 on")
    finally:
        os.close(fd)


def _map_count(root: Path) -> Check:
    try:
        count = int((root / "proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return Check("vm.max_map_count", "note", "cannot be read")
    if count < MIN_MAP_COUNT:
        return Check("vm.max_map_count", "missing", str(count), f"sysctl -w vm.max_map_count={MIN_MAP_COUNT}")
    return Check("vm.max_map_count", "ok", str(count))


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (soft), {'no limit' if hard == resource.RLIM_INFINITY else hard} (hard)"
    if hard != resource.RLIM_INFINITY and hard < MIN_DESCRIPTORS:
        fix = f"ulimit -Hn {MIN_DESCRIPTORS}  # LimitNOFILE={MIN_DESCRIPTORS} in a systemd unit"
        return Check("descriptors", "missing", found, fix)
    return Check("descriptors", "ok", found)
