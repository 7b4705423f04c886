"""The rules of `samestep doctor`: what may go wrong on this machine, and how to fix it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from samestep.environment.container import ContainerInfo
from samestep.environment.hardware import BF16_WORKAROUND, OLDEST_TORCH, Bf16Support, Hardware, SlurmInfo, Software
from samestep.environment.network import Network
from samestep.environment.processes import files_of_job
from samestep.environment.world import FIX, World
from samestep.messages import format_bytes

_MIN_SHM = 2**30
_MIN_GPU_MEMORY = 2**30
_RANK_MEMORY, _GPU_RANK_MEMORY = 2**29, 2 * 2**30  # bytes of a process that imports torch, and of one that uses a GPU
_SHM_USE = "data workers pass batches through it, and fail when it is full"


@dataclass(frozen=True)
class MachineInfo:
    """What the rules check."""

    software: Software
    hardware: Hardware
    network: Network
    slurm: SlurmInfo
    world: World | None  # this process among its peers; None if the environment contradicts itself
    world_error: str | None
    bf16: Bf16Support
    open_files: int | None  # that a process may open, sockets included; None for any number
    omp_num_threads: str | None
    cuda_visible_devices: str | None
    hip_visible_devices: str | None = None
    rocr_visible_devices: str | None = None
    container: ContainerInfo = field(default_factory=ContainerInfo)

    @property
    def nodes(self) -> int:
        """Number of nodes of the world or of the SLURM job."""
        return max(self.world.nodes if self.world else 1, self.slurm.nodes or 1)

    @property
    def ranks(self) -> int:
        """Number of ranks that this machine has, or will have with `samestep run`."""
        return max(self.world.local_size if self.world else 1, len(self.hardware.gpus), 1)


@dataclass(frozen=True)
class Problem:
    """One problem that a rule has found."""

    rule: str
    is_error: bool  # whether a run would fail or leave GPUs idle; otherwise it is a warning
    message: str
    fix: str


Finding = tuple[bool, str, str]  # is_error, message and fix of a Problem


def diagnose(machine: MachineInfo) -> list[Problem]:
    """All problems, errors first."""
    problems = [Problem(name, *finding) for name, rule in RULES.items() for finding in rule(machine)]
    return sorted(problems, key=lambda problem: not problem.is_error)


def _torch_missing(machine: MachineInfo) -> Iterator[Finding]:
    if machine.software.torch is None:
        yield True, f"torch cannot be imported: {machine.software.torch_error}", "pip install 'torch>=2.11'"


def _torch_old(machine: MachineInfo) -> Iterator[Finding]:
    version = machine.software.torch
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    oldest = ".".join(map(str, OLDEST_TORCH))
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        yield True, f"torch {version} is too old: samestep needs {oldest} or newer", f"pip install 'torch>={oldest}'"


def _cpu_build(machine: MachineInfo) -> Iterator[Finding]:
    count, software = machine.hardware.nvidia_devices, machine.software
    if count and software.rocm:
        yield (
            True,
            f"torch {software.torch} is built for ROCm, but this machine has {count} NVIDIA device(s)",
            "install a CUDA build with the command from https://pytorch.org/get-started/locally",
        )
    elif count and software.torch and software.cuda is None:
        yield (
            True,
            f"this machine has {count} NVIDIA device(s), but torch {software.torch} is a CPU build, so a run would use "
            "the CPU",
            "install a CUDA build with the command from https://pytorch.org/get-started/locally",
        )


def _no_gpu(machine: MachineInfo) -> Iterator[Finding]:
    hardware, software = machine.hardware, machine.software
    if hardware.gpus or software.cuda is None or not (hardware.nvidia_devices or hardware.nvidia_smi):
        return
    if machine.cuda_visible_devices is not None:
        yield (
            False,
            f"torch finds no GPU with CUDA_VISIBLE_DEVICES={machine.cuda_visible_devices!r}",
            "unset CUDA_VISIBLE_DEVICES to use all GPUs, or list some, as in CUDA_VISIBLE_DEVICES=0,1",
        )
    elif hardware.nvidia_devices:
        yield (
            True,
            f"torch is built for CUDA {software.cuda}, but cannot use the {hardware.nvidia_devices} NVIDIA device(s): "
            f"{software.cuda_error}",
            "run nvidia-smi, which shows the newest CUDA version that the driver supports; update the driver, or "
            "install a torch build for that CUDA version",
        )
    else:
        yield (
            False,
            "nvidia-smi is installed, but there is no NVIDIA device",
            "on a login node this is normal: run `samestep doctor` in a job; start a container with --gpus all",
        )


def _gpu_in_use(machine: MachineInfo) -> Iterator[Finding]:
    for gpu in machine.hardware.gpus:
        if gpu.memory_free < gpu.memory_total / 2:
            others = ",".join(str(other.index) for other in machine.hardware.gpus if other is not gpu)
            avoid = f"exclude it with CUDA_VISIBLE_DEVICES={others}" if others else "wait until they end"
            yield (
                gpu.memory_free < _MIN_GPU_MEMORY,
                f"GPU {gpu.index} ({gpu.name}) has {format_bytes(gpu.memory_free)} of {format_bytes(gpu.memory_total)} "
                "free: other processes use the rest",
                f"list these processes with nvidia-smi, and {avoid}",
            )


def _shm_small(machine: MachineInfo) -> Iterator[Finding]:
    total, free = machine.hardware.shm_total, machine.hardware.shm_free
    if total is not None and total < _MIN_SHM:
        yield (
            False,
            f"/dev/shm has a size of only {format_bytes(total)}: {_SHM_USE}",
            "start the container with --shm-size=8g or --ipc=host, or load data with num_workers=0",
        )
    elif total is not None and free is not None and free < _MIN_SHM:
        yield (
            False,
            f"/dev/shm has only {format_bytes(free)} of {format_bytes(total)} free: {_SHM_USE}",
            "delete files that ended processes left there (ls -l /dev/shm), or load data with num_workers=0",
        )


def _few_cores(machine: MachineInfo) -> Iterator[Finding]:
    cores, gpus = machine.hardware.cores, len(machine.hardware.gpus)
    if cores.usable < gpus:
        yield (
            False,
            f"only {cores.usable} of {cores.installed} core(s) can be used ({cores.reason}) for {gpus} GPUs: the ranks "
            "would wait for each other's Python code",
            f"request at least {gpus}, e.g. with --cpus-per-task in SLURM or --cpus in docker",
        )


def _few_open_files(machine: MachineInfo) -> Iterator[Finding]:
    gpus, world = len(machine.hardware.gpus), machine.world
    ranks, of_node = (max(1, gpus), None) if world is None or world.size < gpus else (world.size, world.local_size)
    needed = files_of_job(ranks, of_node)
    if machine.open_files is not None and machine.open_files < needed:
        yield (
            True,
            f"a process may open {machine.open_files} files, but a process of a job with {ranks} rank(s) opens up to "
            f"{needed}, sockets included",
            f"raise the limit before the run with `ulimit -n {max(4096, 2 * needed)}`, in /etc/security/limits.conf, "
            "or with --ulimit nofile in docker",
        )


def _many_threads(machine: MachineInfo) -> Iterator[Finding]:
    text = machine.omp_num_threads
    if text is None:
        return
    # OpenMP accepts a list with one number per nesting level; the first counts.
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        yield False, f"OMP_NUM_THREADS={text!r} is not a number of threads", "unset OMP_NUM_THREADS"
        return
    cores = machine.hardware.cores.usable
    ranks = machine.ranks
    threads = int(first) * ranks
    if threads > cores:
        yield (
            False,
            f"OMP_NUM_THREADS={first} with {ranks} rank(s) gives {threads} threads on {cores} core(s)",
            f"unset OMP_NUM_THREADS so that `samestep run` chooses it, or set it to {max(1, cores // ranks)}",
        )


def _world_contradicts(machine: MachineInfo) -> Iterator[Finding]:
    if machine.world_error is not None:
        problem, _, fix = machine.world_error.partition(FIX)
        yield True, problem, fix or "unset RANK WORLD_SIZE LOCAL_RANK"


def _host_is_loopback(machine: MachineInfo) -> Iterator[Finding]:
    gloo, host = machine.network.gloo, machine.network.host
    if machine.nodes > 1 and gloo.loopback:
        yield (
            True,
            f"the job has {machine.nodes} nodes, but gloo would listen on {gloo.address}, which other nodes cannot "
            f"reach: {gloo.reason}",
            f"export GLOO_SOCKET_IFNAME={_reachable(machine.network)}, or give {host} its own address in /etc/hosts",
        )


def _interface_unusable(machine: MachineInfo) -> Iterator[Finding]:
    network, several_gpus = machine.network, len(machine.hardware.gpus) > 1 or machine.nodes > 1
    for backend, choice, needed in (("gloo", network.gloo, True), ("NCCL", network.nccl, several_gpus)):
        if choice.address is not None or not (needed or choice.variable):
            continue
        fix = "bring an interface up, as in `ip link set eth0 up`"
        if name := choice.variable:
            fix = f"unset {name}, or choose one that is up: export {name}={_reachable(network)}"
        yield needed, f"{backend} has no usable interface: {choice.reason}", fix


def _reachable(network: Network) -> str:
    """An interface that other nodes may reach, or a placeholder."""
    return next((i.name for i in network.interfaces if i.up and i.addresses and not i.loopback), "INTERFACE")


def _bf16_crashes(machine: MachineInfo) -> Iterator[Finding]:
    if machine.bf16.status == "workaround":
        variables = " ".join(f"{name}={value}" for name, value in BF16_WORKAROUND.items())
        yield False, machine.bf16.detail, f"start with `samestep run`, which sets it, or export {variables}"
    elif machine.bf16.status == "crashes":
        yield True, machine.bf16.detail, "train in float32 or float16 on this CPU"


def _infiniband_hidden(machine: MachineInfo) -> Iterator[Finding]:
    container = machine.container
    if container.infiniband and not container.has_uverbs:
        yield (
            False,
            f"the kernel knows the InfiniBand device(s) {', '.join(container.infiniband)}, but /dev/infiniband has no "
            "device files, so NCCL would use TCP between nodes",
            "start the container with --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1, or Apptainer "
            "without --contain; outside of a container, load the kernel module ib_uverbs",
        )


def _memlock_small(machine: MachineInfo) -> Iterator[Finding]:
    container = machine.container
    if container.has_uverbs and container.memlock is not None:
        yield (
            False,
            f"a process may lock only {format_bytes(container.memlock)} of memory, and InfiniBand needs to lock its "
            "buffers",
            "start the container with --ulimit memlock=-1 --cap-add=IPC_LOCK, or set `ulimit -l unlimited`, in SLURM "
            "for slurmd and with PropagateResourceLimitsExcept=MEMLOCK",
        )


def _ipc_private(machine: MachineInfo) -> Iterator[Finding]:
    world = machine.world
    if not machine.container.has_host_ipc and world and world.launcher == "slurm" and world.local_size > 1:
        yield (
            False,
            f"each of the {world.local_size} ranks on this node may be in a separate container, and this one has a "
            "private IPC namespace: NCCL could not use shared memory between these ranks",
            "start the containers with --ipc=host, or start one container per node with `samestep run` in it",
        )


def _no_init(machine: MachineInfo) -> Iterator[Finding]:
    if machine.container.lacks_init:
        yield (
            False,
            f"process 1 of this container is {machine.container.process_1}, which neither collects ended processes nor "
            "ends by SIGTERM unless it handles it",
            "start the container with `docker run --init`, or with tini as its entry point",
        )


def _memory_limited(machine: MachineInfo) -> Iterator[Finding]:
    limit, ranks, gpus = machine.container.memory_limit, machine.ranks, len(machine.hardware.gpus)
    each = _GPU_RANK_MEMORY if gpus else _RANK_MEMORY
    if limit is not None and limit < each * ranks:
        yield (
            True,
            f"the control group allows {format_bytes(limit)} of memory, with what is in /dev/shm, and {ranks} rank(s) "
            f"need {format_bytes(each)} each before the model and the data: the kernel would kill them",
            "raise the limit, with --memory in docker, resources.limits.memory in Kubernetes, or --mem in SLURM",
        )


def _amd_gpu_unused(machine: MachineInfo) -> Iterator[Finding]:
    software, container = machine.software, machine.container
    if machine.hardware.gpus or not software.torch or not container.amd_gpus:
        return
    count = f"{container.amd_gpus} AMD GPU(s)"
    if software.rocm is None and software.cuda is None:
        yield (
            True,
            f"this machine has {count}, but torch {software.torch} is a CPU build, so a run would use the CPU",
            "install a ROCm build with the command from https://pytorch.org/get-started/locally",
        )
    elif software.rocm and not container.kfd:
        yield (
            True,
            f"torch is built for ROCm {software.rocm} and the kernel knows {count}, but /dev/kfd is missing",
            "start the container with --device=/dev/kfd --device=/dev/dri --group-add video, or with apptainer --rocm",
        )
    elif software.rocm and not container.kfd_is_usable:
        yield (
            True,
            f"torch is built for ROCm {software.rocm} and the kernel knows {count}, but this user may not open "
            "/dev/kfd",
            "add the user to the groups render and video; in docker, pass --group-add with the number of the group of "
            "/dev/kfd on the host",
        )


def _amd_gpu_hidden(machine: MachineInfo) -> Iterator[Finding]:
    hip, rocr = machine.hip_visible_devices, machine.rocr_visible_devices
    if machine.software.rocm is None:
        return
    names = {
        "HIP_VISIBLE_DEVICES": hip,
        "ROCR_VISIBLE_DEVICES": rocr,
        "CUDA_VISIBLE_DEVICES": machine.cuda_visible_devices,
    }
    given = [f"{name}={value}" for name, value in names.items() if value is not None]
    if given and not machine.hardware.gpus:
        yield (
            False,
            f"torch finds no GPU with {', '.join(given)}",
            f"unset {' '.join(name for name, value in names.items() if value is not None)} to use all GPUs",
        )
    elif hip is not None and rocr is not None:
        yield (
            False,
            f"HIP_VISIBLE_DEVICES={hip} counts the GPUs that ROCR_VISIBLE_DEVICES={rocr} leaves, so some may be hidden "
            "twice",
            "set one of them",
        )


RULES: dict[str, Callable[[MachineInfo], Iterator[Finding]]] = {
    "torch-missing": _torch_missing,
    "torch-old": _torch_old,
    "cpu-build": _cpu_build,
    "no-gpu": _no_gpu,
    "gpu-in-use": _gpu_in_use,
    "few-cores": _few_cores,
    "shm-small": _shm_small,
    "few-open-files": _few_open_files,
    "many-threads": _many_threads,
    "world-contradicts": _world_contradicts,
    "host-is-loopback": _host_is_loopback,
    "interface-unusable": _interface_unusable,
    "bf16-crashes": _bf16_crashes,
    "infiniband-hidden": _infiniband_hidden,
    "memlock-small": _memlock_small,
    "ipc-private": _ipc_private,
    "no-init": _no_init,
    "memory-limited": _memory_limited,
    "amd-gpu-unused": _amd_gpu_unused,
    "amd-gpu-hidden": _amd_gpu_hidden,
}
"""Every rule by the name that it has in a Problem."""
