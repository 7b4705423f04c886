"""What a container may hide from a run: devices, shared memory between processes, limits, an init process."""

import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from samestep.environment.hardware import read_limits

# Programs that are often started as process 1 although they neither collect ended processes of others nor end by a
# signal that they do not handle, as an init does.
_NO_INIT: Final = re.compile(
    r"python[\d.]*|samestep|torchrun|accelerate|deepspeed|jupyter.*|sh|dash|sleep|tail|timeout"
)
_HOST_IPC: Final = "ipc:[4026531839]"  # Linux gives the first namespace of a machine this number
_IPC_LOCK: Final = 14  # the bit of this capability
_RUNTIME_FILES: Final = ((".dockerenv", "Docker"), ("run/.containerenv", "Podman"), (".singularity.d", "Apptainer"))
_RUNTIME_VARIABLES: Final = (
    ("APPTAINER_CONTAINER", "Apptainer"),
    ("SINGULARITY_CONTAINER", "Apptainer"),
    ("KUBERNETES_SERVICE_HOST", "Kubernetes"),
)


@dataclass(frozen=True)
class ContainerInfo:
    """What this process sees of its machine; on other systems than Linux, nothing."""

    runtime: str | None = None  # such as Docker; None if no container was found
    process_1: str = ""  # the name of process 1 here; empty if it is not known
    is_process_1: bool = False
    has_host_ipc: bool = True  # whether it shares memory segments with processes outside of the container
    infiniband: tuple[str, ...] = ()  # devices that the kernel knows
    has_uverbs: bool = False  # whether their device files are here
    memlock: int | None = None  # bytes that a process may lock in memory; None for any number
    memory_limit: int | None = None  # bytes, of the control group; None for no limit
    amd_gpus: int = 0  # that the kernel knows
    kfd: bool = False  # whether AMD's device file is here
    kfd_is_usable: bool = False  # whether this user may open it

    @property
    def lacks_init(self) -> bool:
        """Whether process 1 of a container is a program that cannot replace an init."""
        return (self.runtime is not None or self.is_process_1) and _NO_INIT.fullmatch(self.process_1) is not None


def read_container(environ: Mapping[str, str], root: Path = Path("/")) -> ContainerInfo:
    """Read what the files below `root` and the limits of this process say."""
    files = (name for path, name in _RUNTIME_FILES if (root / path).exists())
    variables = (name for variable, name in _RUNTIME_VARIABLES if variable in environ)
    kfd = root / "dev/kfd"
    return ContainerInfo(
        runtime=next(files, None) or next(variables, None),
        process_1=_read(root / "proc/1/comm"),
        is_process_1=os.getpid() == 1,
        has_host_ipc=_link(root / "proc/self/ns/ipc") in (_HOST_IPC, ""),
        infiniband=tuple(sorted(path.name for path in _entries(root / "sys/class/infiniband"))),
        has_uverbs=any(path.name.startswith("uverbs") for path in _entries(root / "dev/infiniband")),
        memlock=None if _may_lock_memory(_read(root / "proc/self/status")) else _memlock(),
        memory_limit=read_limits(root).memory,
        amd_gpus=sum(_is_amd_gpu(node) for node in _entries(root / "sys/class/kfd/kfd/topology/nodes")),
        kfd=kfd.exists(),
        kfd_is_usable=os.access(kfd, os.R_OK | os.W_OK),
    )


def _is_amd_gpu(node: Path) -> bool:
    return _read(node / "gpu_id") not in ("", "0")  # a CPU has the id 0


def _may_lock_memory(status: str) -> bool:
    """Whether this process has the capability to lock memory without a limit."""
    masks = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(next(masks, "0"), 16) >> _IPC_LOCK & 1)


def _memlock() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
