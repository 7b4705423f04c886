"""The rules of `samestep doctor`: what may go wrong on this machine, and how to fix it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from samestep.environment.hardware import BF16_WORKAROUND, OLDEST_TORCH, Bf16Support, Hardware, SlurmInfo, Software
from samestep.environment.network import Network
from samestep.environment.processes import files_of_job
from samestep.environment.world import FIX, World
from samestep.messages import format_bytes

_MIN_SHM = 2**30
_MIN_GPU_MEMORY = 2**30
_SHM_USE = "DataLoader workers pass batches through it, and die with a bus error when it is full"


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

    @property
    def nodes(self) -> int:
        """Number of nodes of the world or of the SLURM job."""
        return max(self.world.nodes if self.world else 1, self.slurm.nodes or 1)


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
    if count and software.torch and software.cuda is None:
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
    ranks = max(machine.world.local_size if machine.world else 1, len(machine.hardware.gpus), 1)
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
}
"""Every rule by the name that it has in a Problem."""
