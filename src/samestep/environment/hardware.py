"""What this process can use within the limits of its control group (cgroup): cores, memory, GPUs, software, SLURM.

A child process checks whether bfloat16 works on this CPU. Some virtual machines advertise AMX instructions that they
do not have. oneDNN then uses them, and the first bfloat16 matrix product ends the process with SIGILL. Limiting the
instruction set that oneDNN may use works around it.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from math import floor
from pathlib import Path
from typing import Literal

import psutil

from samestep.disk import write_atomically
from samestep.environment.world import cache_folder, read_environ
from samestep.messages import read_integer

OLDEST_TORCH = (2, 11)
"""The oldest torch that samestep supports."""
BF16_WORKAROUND = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""Environment variables with which bfloat16 does not crash on a CPU that advertises AMX but lacks it."""

# cgroup v1 writes "no limit" as the largest number of pages it can count.
_UNLIMITED = 2**60
# Files of cgroup v1 and v2: the memory limit, the memory in use, and the entry of memory.stat for file caches.
_MEMORY_FILES = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)
_SRUN_SECONDS = 3
_BF16_SIZE = 64
_BF16_PRODUCT = (
    f"import torch; a = torch.ones({_BF16_SIZE}, {_BF16_SIZE}, dtype=torch.bfloat16); "
    "print(float((a @ a).float().sum()))"
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
    cuda: str | None = None  # of the torch build; None for a build without CUDA
    rocm: str | None = None  # of the torch build; None for a build without ROCm
    cuda_error: str | None = None  # why torch cannot use CUDA although it was built for it
    nccl: str | None = None  # of the torch build
    gloo: bool = False
    mps: bool = False


@dataclass(frozen=True)
class SlurmInfo:
    """What is known of SLURM without a request to its controller."""

    version: str | None  # of srun; None if it is not installed
    job: str | None  # None outside of a job
    partition: str | None
    nodes: int | None


@dataclass(frozen=True)
class Limits:
    """Limits of this process's cgroup, memory in bytes; None for no limit."""

    cores: float | None = None  # e.g. 1.5
    memory: int | None = None
    memory_left: int | None = None  # counting file caches as free, which the kernel can drop


@dataclass(frozen=True)
class Bf16Support:
    """The result of one bfloat16 matrix product on this CPU."""

    status: Literal["works", "workaround", "crashes", "unknown"]
    """`workaround`: crashes with SIGILL unless BF16_WORKAROUND is set. `crashes`: even with it."""
    detail: str

    @property
    def workaround(self) -> dict[str, str]:
        """Environment variables that prevent the crash; empty if none are needed or none help."""
        return dict(BF16_WORKAROUND) if self.status == "workaround" else {}


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


def count_oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for memory in this process's cgroup; without cgroups, on this system."""
    rows = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup") if line.count(":") >= 2]
    cgroups = {name: path for _, names, path in rows for name in names.split(",")}
    files = [
        folder / name
        for folder in _folders(root, cgroups, "memory")
        for name in ("memory.events", "memory.oom_control")
    ]
    for path in (*files, root / "proc/vmstat"):
        for line in _lines(path):
            if line.startswith("oom_kill "):
                return read_integer(line.split()[1]) or 0
    return 0


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


def read_slurm(environ: Mapping[str, str]) -> SlurmInfo:
    """Read the version of srun and the variables of the job."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", ""))
    return SlurmInfo(
        version=_srun_version(),
        job=environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID")),
        partition=environ.get("SLURM_JOB_PARTITION"),
        nodes=read_integer(nodes),
    )


def _srun_version() -> str | None:
    srun = shutil.which("srun")
    if srun is None:
        return None
    try:
        done = subprocess.run([srun, "--version"], capture_output=True, text=True, timeout=_SRUN_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        return f"unknown (srun --version: {lines[-1] if lines else f'exit code {error.returncode}'})"
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return done.stdout.strip().removeprefix("slurm ").removeprefix("slurm-wlm ")


def probe_bf16(environ: Mapping[str, str] | None = None) -> Bf16Support:
    """Run one bfloat16 product in a child process, which takes seconds; the result is cached per CPU and torch."""
    if find_spec("torch") is None:
        return Bf16Support("unknown", "not probed, since torch is not installed")
    variables = read_environ() if environ is None else environ
    cache = _bf16_cache_path(variables)
    try:
        return Bf16Support(**json.loads(cache.read_text()))
    except (OSError, ValueError, TypeError):  # not probed yet, or not our file
        support = _run_bf16_products(variables)
    if support.status != "unknown":
        with suppress(OSError):  # without a writable home the next launch probes again, which costs two seconds
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(cache, json.dumps(asdict(support)))
    return support


def _run_bf16_products(environ: Mapping[str, str]) -> Bf16Support:
    first = _multiply_bf16(environ)
    if first == 0:
        return Bf16Support("works", "a bfloat16 product works on this CPU")
    if first != -signal.SIGILL:
        return Bf16Support("unknown", f"the bfloat16 probe ended with {first}, which does not show a CPU problem")
    workaround = " ".join(f"{name}={value}" for name, value in BF16_WORKAROUND.items())
    if _multiply_bf16({**environ, **BF16_WORKAROUND}) == 0:
        detail = f"bfloat16 crashes on this CPU (SIGILL: it advertises AMX but lacks it); {workaround} prevents this"
        return Bf16Support("workaround", detail)
    detail = f"bfloat16 crashes on this CPU (SIGILL), even with {workaround}: use float32 or float16"
    return Bf16Support("crashes", detail)


def _multiply_bf16(environ: Mapping[str, str]) -> int | str:
    """The child's exit code (negative: the signal that ended it), or what went wrong instead."""
    command, variables = [sys.executable, "-c", _BF16_PRODUCT], {**environ, "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if child.returncode == 0 and child.stdout.strip() != str(float(_BF16_SIZE**3)):
        return f"a wrong sum, {child.stdout.strip()}"
    return child.returncode


def _bf16_cache_path(environ: Mapping[str, str]) -> Path:
    """One file per kind of CPU, since nodes with different CPUs may share a home directory."""
    key = (_cpu(), version("torch"), platform.python_version(), environ.get("ONEDNN_MAX_CPU_ISA", ""))
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    return cache_folder(environ) / f"bf16-{digest}.json"


def cpu_name() -> str:
    """The name of this machine's CPU."""
    names = (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    return "\n".join(sorted({line for line in lines if line.partition("\t")[0].strip() in names}))
