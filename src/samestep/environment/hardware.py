"""Cores, memory, GPUs and versions that this process can use, within the limits of its control group (cgroup)."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import floor
from pathlib import Path

import psutil

from samestep.messages import read_integer

OLDEST_TORCH = (2, 11)
"""The oldest torch that samestep supports."""
# cgroup v1 writes "no limit" as the largest number of pages it can count.
_UNLIMITED = 2**60
# Files of cgroup v1 and v2: the memory limit, the memory in use, and the entry of memory.stat for file caches.
_MEMORY_FILES = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use; memory in bytes."""

    index: int  # among the visible GPUs, as in `cuda:0`
    name: str
    memory_total: int
    memory_free: int  # when it was queried
    capability: tuple[int, int]  # CUDA compute capability, e.g. (9, 0)


@dataclass(frozen=True)
class GpuLink:
    """The connection between two GPUs, given by their indices."""

    first: int
    second: int  # larger than `first`
    kind: str  # as in `nvidia-smi topo -m`: NV18 (18 NVLinks), or for PCIe PIX, PXB, PHB, NODE, SYS by distance


@dataclass(frozen=True)
class Cores:
    """How many cores this process may use."""

    usable: int  # at least 1
    installed: int
    reason: str  # why fewer are usable, or `no limit`


@dataclass(frozen=True)
class Hardware:
    """What this process can use, which may be less than the machine has; memory in bytes."""

    cores: Cores
    memory_total: int  # or the limit of the cgroup if that is lower
    memory_available: int
    shm_total: int | None  # /dev/shm, through which DataLoader workers pass batches; None if it does not exist
    shm_free: int | None
    nvidia_devices: int  # device files of NVIDIA's driver, whether or not torch can use them
    nvidia_smi: bool
    gpus: tuple[Gpu, ...] = ()
    links: tuple[GpuLink, ...] = ()  # connections between them, if nvidia-smi reports them


@dataclass(frozen=True)
class Software:
    """Versions, and what torch supports."""

    python: str = field(default_factory=platform.python_version)
    system: str = field(default_factory=platform.platform)
    torch: str | None = None  # None if it cannot be imported
    torch_error: str | None = None
    cuda: str | None = None  # of the torch build, or ROCm; None for a CPU build
    cuda_error: str | None = None  # why torch cannot use CUDA although it was built for it
    nccl: str | None = None  # of the torch build
    gloo: bool = False
    mps: bool = False


@dataclass(frozen=True)
class Limits:
    """Limits of this process's cgroup, memory in bytes; None for no limit."""

    cores: float | None = None  # e.g. 1.5
    memory: int | None = None
    memory_left: int | None = None  # counting file caches as free, which the kernel can drop


def read_hardware(gpus: tuple[Gpu, ...] = (), links: tuple[GpuLink, ...] = (), root: Path = Path("/")) -> Hardware:
    """Read the hardware without importing torch; samestep.environment.gpus detects the GPUs."""
    limits, memory = read_limits(root), psutil.virtual_memory()
    total, available = usable_memory(memory.total, memory.available, limits)
    shm = root / "dev/shm"
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return Hardware(
        cores=usable_cores(os.cpu_count() or 1, affinity, limits.cores),
        memory_total=total,
        memory_available=available,
        shm_total=usage.total if usage else None,
        shm_free=usage.free if usage else None,
        nvidia_devices=len(devices),
        nvidia_smi=shutil.which("nvidia-smi") is not None,
        gpus=gpus,
        links=links,
    )


def usable_cores(installed: int, affinity: int, quota: float | None) -> Cores:
    """The whole cores, but at least one, that the CPU affinity and the quota of the cgroup allow.

    >>> usable_cores(64, 64, 4.5)
    Cores(usable=4, installed=64, reason='the control group allows 4.5')
    """
    if quota is not None and quota < affinity:
        return Cores(max(1, floor(quota)), installed, f"the control group allows {quota:g}")
    if affinity < installed:
        return Cores(affinity, installed, "CPU affinity of this process")
    return Cores(installed, installed, "no limit")


def usable_memory(total: int, available: int, limits: Limits) -> tuple[int, int]:
    """Total and available bytes within the limits of the cgroup."""
    if limits.memory is None or limits.memory_left is None:
        return total, available
    return min(total, limits.memory), min(available, limits.memory_left)


def read_limits(root: Path = Path("/")) -> Limits:
    """Read the lowest limits of this process's cgroups, v1 or v2; a system without cgroups has none."""
    rows = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup") if line.count(":") >= 2]
    cgroups = {name: path for _, names, path in rows for name in names.split(",")}  # v2 has the empty name
    quotas = [quota for folder in _folders(root, cgroups, "cpu") if (quota := _quota(folder)) is not None]
    memory = [limit for folder in _folders(root, cgroups, "memory") for limit in _memory_limits(folder)]
    return Limits(
        cores=min(quotas, default=None),
        memory=min((limit for limit, _ in memory), default=None),
        memory_left=min((left for _, left in memory), default=None),
    )


def _folders(root: Path, cgroups: dict[str, str], controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of its parents, whose limits apply too."""
    for mount, path in (
        (root / "sys/fs/cgroup" / controller, cgroups.get(controller)),
        (root / "sys/fs/cgroup/unified", cgroups.get("")),
        (root / "sys/fs/cgroup", cgroups.get("")),
    ):
        if path is None or not mount.is_dir():
            continue
        # In a container the path may be the host's, although only the container's own cgroup is mounted.
        below = Path(path.lstrip("/"))
        known = ".." not in below.parts and (mount / below).is_dir()
        yield from (mount / part for part in ((below, *below.parents) if known else (Path(),)))


def _quota(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    quota, period = map(read_integer, words) if len(words) == 2 else (None, None)  # None for `max` and -1: no limit
    return quota / period if quota and period else None


def _memory_limits(folder: Path) -> Iterator[tuple[int, int]]:
    """Limit and remaining bytes of one cgroup, if it has a limit."""
    for limit_file, usage_file, cache in _MEMORY_FILES:
        limit, used = read_integer(_read(folder / limit_file)), read_integer(_read(folder / usage_file))
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        stat = {name: value for name, _, value in (line.partition(" ") for line in _lines(folder / "memory.stat"))}
        yield limit, max(0, limit - used + (read_integer(stat.get(cache, "")) or 0))


def _lines(path: Path) -> list[str]:
    return _read(path).splitlines()


def _read(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
