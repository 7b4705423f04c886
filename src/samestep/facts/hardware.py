"""What this machine has for a run: cores, memory, GPUs and what joins them."""

import os
import re
import shutil
from dataclasses import dataclass
from math import floor
from pathlib import Path

import psutil

from samestep.facts.cgroup import Limits, read_limits


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
class Link:
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
    links: tuple[Link, ...] = ()
    """What joins them, as far as nvidia-smi tells."""


def read_hardware(gpus: tuple[Gpu, ...] = (), links: tuple[Link, ...] = (), root: Path = Path("/")) -> Hardware:
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
