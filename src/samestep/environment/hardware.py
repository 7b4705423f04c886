"""Which Python, torch, CUDA and NCCL a run would use."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor
from pathlib import Path

import psutil

# Version 1 writes "no limit" as the largest number of pages it can count.
_UNLIMITED = 2**60


@dataclass(frozen=True)
class Limits:
    """The tightest limits that this process is under; None where there is none."""

    cores: float | None = None
    """Cores' worth of time in a second, e.g. 1.5."""
    memory: int | None = None
    """Bytes that the group may hold."""
    memory_left: int | None = None
    """Bytes that it may still take, counting file caches that would be given up as free."""


@dataclass(frozen=True)
class _Names:
    """How one version of control groups calls the files that are read here."""

    limit: str
    used: str
    cache: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def read_limits(root: Path = Path("/")) -> Limits:
    """Read the limits of this process; a system without control groups has none."""
    groups = _groups(root)
    quotas = [quota for folder in _folders(root, groups, "cpu") if (quota := _quota(folder)) is not None]
    rooms = [room for folder in _folders(root, groups, "memory") for room in _rooms(folder)]
    return Limits(
        cores=min(quotas, default=None),
        memory=min((limit for limit, _ in rooms), default=None),
        memory_left=min((left for _, left in rooms), default=None),
    )


def _groups(root: Path) -> dict[str, str]:
    """The group of this process by controller; version 2 has one for all, under the empty name."""
    lines = (_text(root / "proc/self/cgroup") or "").splitlines()
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {name: path for _, names, path in fields for name in names.split(",")}


def _folders(root: Path, groups: dict[str, str], controller: str) -> Iterator[Path]:
    """The folders that limit this process: its own group's and those above, whose limits hold for it as well."""
    for mount, path in (
        (root / "sys/fs/cgroup" / controller, groups.get(controller)),
        (root / "sys/fs/cgroup/unified", groups.get("")),
        (root / "sys/fs/cgroup", groups.get("")),
    ):
        if path is None or not mount.is_dir():
            continue
        # In a container the path may be told as the host sees it, while only the container's own group is mounted.
        below = Path(path.lstrip("/"))
        known = ".." not in below.parts and (mount / below).is_dir()
        yield from (mount / part for part in ((below, *below.parents) if known else (Path(),)))


def _quota(folder: Path) -> float | None:
    both = _text(folder / "cpu.max")
    if both is not None:
        quota, period = both.split()
    else:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if quota is None or period is None or quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _rooms(folder: Path) -> Iterator[tuple[int, int]]:
    """Limit and rest of one group, if it has a limit."""
    for names in (_V1, _V2):
        limit, used = _text(folder / names.limit), _text(folder / names.used)
        if limit is None or used is None or limit == "max" or int(limit) >= _UNLIMITED:
            continue
        cache = dict(line.split(" ", 1) for line in (_text(folder / "memory.stat") or "").splitlines())
        yield int(limit), max(0, int(limit) - int(used) + int(cache.get(names.cache, "0")))


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use."""

    index: int
    """Its number among the visible ones, as in `cuda:0`."""
    name: str
    """What its maker calls it."""
    memory_total: int
    """Bytes it has."""
    memory_free: int
    """Bytes that nobody had taken when it was asked."""
    capability: tuple[int, int]
    """CUDA's compute capability, e.g. (9, 0)."""


@dataclass(frozen=True)
class GpuLink:
    """What joins two GPUs."""

    first: int
    """Index of the one."""
    second: int
    """Index of the other, which is larger."""
    kind: str
    """As `nvidia-smi topo -m` writes it: NV18 (18 NVLinks), PIX, PXB, PHB, NODE, SYS (ever longer ways over PCIe)."""


@dataclass(frozen=True)
class Cores:
    """How many cores this process may keep busy."""

    usable: int
    """Whole cores, at least 1."""
    installed: int
    """Cores of the machine."""
    reason: str
    """What makes them fewer, or that nothing does."""


@dataclass(frozen=True)
class Hardware:
    """What this process can count on, which may be less than the machine has."""

    cores: Cores
    """Processor cores."""
    memory_total: int
    """Bytes of memory, or the limit of the control group where that is less."""
    memory_available: int
    """Bytes of it that can still be taken."""
    shm_total: int | None
    """Bytes that /dev/shm can hold, through which DataLoader workers hand over batches; None where there is none."""
    shm_free: int | None
    """Bytes of it that are free."""
    nvidia_devices: int
    """Device files that NVIDIA's driver made, whether or not torch can use them."""
    nvidia_smi: bool
    """Whether the command nvidia-smi is here."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs that torch can use."""
    links: tuple[GpuLink, ...] = ()
    """What joins them, as far as nvidia-smi tells."""


def read_hardware(gpus: tuple[Gpu, ...] = (), links: tuple[GpuLink, ...] = (), root: Path = Path("/")) -> Hardware:
    """Look at this machine; the GPUs are given, since only torch can see them all."""
    limits, memory = read_limits(root), psutil.virtual_memory()
    total, available = usable_memory(memory.total, memory.available, limits)
    shm = root / "dev/shm"
    room = shutil.disk_usage(shm) if shm.is_dir() else None
    return Hardware(
        cores=usable_cores(os.cpu_count() or 1, _affinity(), limits.cores),
        memory_total=total,
        memory_available=available,
        shm_total=room.total if room else None,
        shm_free=room.free if room else None,
        nvidia_devices=_count_nvidia(root / "dev"),
        nvidia_smi=shutil.which("nvidia-smi") is not None,
        gpus=gpus,
        links=links,
    )


def usable_cores(installed: int, affinity: int, quota: float | None) -> Cores:
    """The cores that remain under affinity and quota; a part of a core is not counted, but one always is.

    >>> usable_cores(64, 64, 4.5)
    Cores(usable=4, installed=64, reason='the control group allows 4.5')
    """
    if quota is not None and quota < affinity:
        return Cores(max(1, floor(quota)), installed, f"the control group allows {quota:g}")
    if affinity < installed:
        return Cores(affinity, installed, "this process is bound to them")
    return Cores(installed, installed, "no limit")


def usable_memory(total: int, available: int, limits: Limits) -> tuple[int, int]:
    """Total and available bytes under the limits of the control group."""
    if limits.memory is None or limits.memory_left is None:
        return total, available
    return min(total, limits.memory), min(available, limits.memory_left)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_nvidia(folder: Path) -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in folder.glob("nvidia*"))


OLDEST_TORCH = (2, 11)
"""The oldest torch that samestep supports."""


@dataclass(frozen=True)
class Software:
    """Versions, and what torch says of itself."""

    python: str
    """Python's version."""
    system: str
    """The operating system and its kernel."""
    torch: str | None
    """Torch's version, or None where it cannot be imported."""
    torch_error: str | None = None
    """Why it cannot be imported."""
    cuda: str | None = None
    """The CUDA (or ROCm) version that torch was built for, or None for a build without."""
    cuda_error: str | None = None
    """Why torch cannot use CUDA although it was built for it."""
    nccl: str | None = None
    """The NCCL version inside torch, or None for a build without."""
    gloo: bool = False
    """Whether torch has gloo."""
    mps: bool = False
    """Whether Apple's GPU can be used."""


def software_without_torch(error: str) -> Software:
    """What is left to tell where torch cannot be imported."""
    return Software(platform.python_version(), platform.platform(), None, error)
