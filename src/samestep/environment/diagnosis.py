"""What looks wrong with a machine and what to do about it: a table of rules over its facts."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from samestep.environment.hardware import OLDEST_TORCH, Hardware, Software
from samestep.environment.network import Network
from samestep.environment.slurm_variables import SlurmInfo
from samestep.environment.world import World
from samestep.messages import format_bytes

_ENOUGH_SHM = 2**30
_LEAST_GPU_MEMORY = 2**30
_WORKERS_AND_SHM = "DataLoader workers hand over batches through it, and die of a bus error when it is full"


@dataclass(frozen=True)
class MachineInfo:
    """Everything the rules look at."""

    software: Software
    """Versions."""
    hardware: Hardware
    """Cores, memory, GPUs."""
    network: Network
    """Interfaces, and which would be used."""
    slurm: SlurmInfo
    """The cluster and the job, if any."""
    world: World | None
    """This process among its peers, or None where the environment contradicts itself."""
    world_error: str | None
    """How it contradicts itself."""
    bf16: Literal["works", "workaround", "crashes", "unknown"]
    """What became of a bfloat16 product on the CPU."""
    bf16_detail: str
    """The same in words."""
    omp_num_threads: str | None
    """The variable OMP_NUM_THREADS."""
    cuda_visible_devices: str | None
    """The variable CUDA_VISIBLE_DEVICES."""

    @property
    def nodes(self) -> int:
        """How many nodes the run has, by its world or its job."""
        return max(self.world.nodes if self.world else 1, self.slurm.nodes or 1)


@dataclass(frozen=True)
class Problem:
    """One thing that looks wrong."""

    rule: str
    """The rule that found it."""
    breaks: bool
    """Whether a run would fail or leave the GPUs idle; otherwise it is advice."""
    what: str
    """What is."""
    remedy: str
    """What to do."""


def diagnose(facts: MachineInfo) -> list[Problem]:
    """Everything that looks wrong; what breaks a run comes first."""
    found = [Problem(name, *row) for name, rule in RULES.items() for row in rule(facts)]
    return sorted(found, key=lambda symptom: not symptom.breaks)


Row = tuple[bool, str, str]
Rule = Callable[[MachineInfo], Iterator[Row]]


def _torch_missing(facts: MachineInfo) -> Iterator[Row]:
    if facts.software.torch is None:
        yield True, f"torch cannot be imported: {facts.software.torch_error}", "pip install 'torch>=2.11'"


def _torch_old(facts: MachineInfo) -> Iterator[Row]:
    version = facts.software.torch
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    oldest = ".".join(map(str, OLDEST_TORCH))
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        yield (
            True,
            f"torch {version} is older than {oldest}, the oldest that samestep supports",
            f"pip install 'torch>={oldest}'",
        )


def _cpu_build(facts: MachineInfo) -> Iterator[Row]:
    count, software = facts.hardware.nvidia_devices, facts.software
    if count and software.torch and software.cuda is None:
        yield (
            True,
            f"this machine has {count} NVIDIA device(s) and torch {software.torch} is a build without CUDA: "
            "a run would use the CPU",
            "install a build with CUDA, by the command that https://pytorch.org/get-started/locally gives",
        )


def _no_gpu(facts: MachineInfo) -> Iterator[Row]:
    hardware, software = facts.hardware, facts.software
    if hardware.gpus or software.cuda is None or not (hardware.nvidia_devices or hardware.nvidia_smi):
        return
    if facts.cuda_visible_devices is not None:
        yield (
            False,
            f"torch sees no GPU with CUDA_VISIBLE_DEVICES={facts.cuda_visible_devices!r}",
            "unset CUDA_VISIBLE_DEVICES to use them all, or name those to use, as in CUDA_VISIBLE_DEVICES=0,1",
        )
    elif hardware.nvidia_devices:
        yield (
            True,
            f"torch is built for CUDA {software.cuda} and cannot use the {hardware.nvidia_devices} NVIDIA device(s) "
            f"here: {software.cuda_error}",
            "run nvidia-smi: it shows the newest CUDA that the driver serves; update the driver, or install a torch "
            "that is built for that CUDA",
        )
    else:
        yield (
            False,
            "nvidia-smi is here and no NVIDIA device is",
            "on a login node this is as it should be: run `samestep doctor` in a job; in a container, start it with "
            "--gpus all",
        )


def _gpu_taken(facts: MachineInfo) -> Iterator[Row]:
    for gpu in facts.hardware.gpus:
        if gpu.memory_free < gpu.memory_total / 2:
            others = ",".join(str(other.index) for other in facts.hardware.gpus if other is not gpu)
            leave = f"leave it out with CUDA_VISIBLE_DEVICES={others}" if others else "wait until they end"
            yield (
                gpu.memory_free < _LEAST_GPU_MEMORY,
                f"GPU {gpu.index} ({gpu.name}) has {format_bytes(gpu.memory_free)} of {format_bytes(gpu.memory_total)} "
                "free: other processes hold the rest",
                f"see whose they are with nvidia-smi, and {leave}",
            )


def _shm_small(facts: MachineInfo) -> Iterator[Row]:
    total, free = facts.hardware.shm_total, facts.hardware.shm_free
    if total is None or free is None:
        return
    if total < _ENOUGH_SHM:
        yield (
            False,
            f"/dev/shm holds {format_bytes(total)}: {_WORKERS_AND_SHM}",
            "start the container with --shm-size=8g or --ipc=host, or load with workers=0",
        )
    elif free < _ENOUGH_SHM:
        yield (
            False,
            f"/dev/shm has {format_bytes(free)} of {format_bytes(total)} free: {_WORKERS_AND_SHM}",
            "remove what ended processes left there (ls -l /dev/shm), or load with workers=0",
        )


def _few_cores(facts: MachineInfo) -> Iterator[Row]:
    cores, gpus = facts.hardware.cores, len(facts.hardware.gpus)
    if cores.usable < gpus:
        yield (
            False,
            f"{cores.usable} core(s) serve {gpus} GPUs ({cores.reason}, of {cores.installed} installed): "
            "ranks would wait for each other's Python",
            f"ask for at least {gpus}, e.g. with --cpus-per-task in SLURM or --cpus in docker",
        )


def _many_threads(facts: MachineInfo) -> Iterator[Row]:
    text = facts.omp_num_threads
    if text is None:
        return
    # OpenMP takes a list, one number for each level of nesting; the first counts.
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        yield False, f"OMP_NUM_THREADS={text!r} is not a number of threads", "unset OMP_NUM_THREADS"
        return
    cores = facts.hardware.cores.usable
    ranks = max(facts.world.local_size if facts.world else 1, len(facts.hardware.gpus), 1)
    threads = int(first) * ranks
    if threads > cores:
        yield (
            False,
            f"OMP_NUM_THREADS={first} for each of {ranks} rank(s) makes {threads} threads on {cores} core(s)",
            f"unset OMP_NUM_THREADS and let `samestep run` choose, or set it to {max(1, cores // ranks)}",
        )


def _world_contradicts(facts: MachineInfo) -> Iterator[Row]:
    if facts.world_error is not None:
        what, _, remedy = facts.world_error.partition(" To repair it: ")
        yield True, what, remedy or "unset RANK WORLD_SIZE LOCAL_RANK"


def _host_is_loopback(facts: MachineInfo) -> Iterator[Row]:
    gloo, host = facts.network.gloo, facts.network.host
    if facts.nodes > 1 and gloo.loopback:
        yield (
            True,
            f"this job has {facts.nodes} nodes and gloo would listen on {gloo.address}, where no other node reaches "
            f"it: {gloo.reason}",
            f"export GLOO_SOCKET_IFNAME={_reachable(facts.network)}, or give {host} its own address in /etc/hosts",
        )


def _interface_unusable(facts: MachineInfo) -> Iterator[Row]:
    network, several_gpus = facts.network, len(facts.hardware.gpus) > 1 or facts.nodes > 1
    for backend, choice, needed in (("gloo", network.gloo, True), ("NCCL", network.nccl, several_gpus)):
        if choice.address is not None or not (needed or choice.variable):
            continue
        remedy = (
            f"unset {choice.variable}, or name one that is up: export {choice.variable}={_reachable(network)}"
            if choice.variable
            else "bring one up, as in `ip link set eth0 up`"
        )
        yield needed, f"{backend} has no interface to use: {choice.reason}", remedy


def _reachable(network: Network) -> str:
    """An interface that other nodes may reach, or a word for one."""
    return next((i.name for i in network.interfaces if i.up and i.addresses and not i.loopback), "INTERFACE")


def _bf16_dies(facts: MachineInfo) -> Iterator[Row]:
    if facts.bf16 == "workaround":
        yield (
            False,
            facts.bf16_detail,
            "start with `samestep run`, which sets it, or export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
        )
    elif facts.bf16 == "crashes":
        yield True, facts.bf16_detail, "train in float32 or float16 on this CPU"


RULES: dict[str, Rule] = {
    "torch-missing": _torch_missing,
    "torch-old": _torch_old,
    "cpu-build": _cpu_build,
    "no-gpu": _no_gpu,
    "gpu-taken": _gpu_taken,
    "few-cores": _few_cores,
    "shm-small": _shm_small,
    "many-threads": _many_threads,
    "world-contradicts": _world_contradicts,
    "host-is-loopback": _host_is_loopback,
    "interface-unusable": _interface_unusable,
    "bf16-dies": _bf16_dies,
}
"""Every rule by the name it has in a Problem."""
