"""Which device this rank computes on, which backend connects the ranks, and how ranks share a device."""

import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch

from samestep.distributed.communicator import Communicator
from samestep.environment.world import World
from samestep.errors import WorldError

BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class DeviceChoice:
    """A device and a backend, with the reason."""

    device: torch.device
    backend: str  # "gloo", "nccl", or "none" for a single rank
    reason: str
    warning: str | None = None


def choose_device(world: World, cuda: int, mps: bool, backend: str | None) -> DeviceChoice:
    """Choose from the number of CUDA devices and whether Apple's GPU is usable; `backend` is the user's or None."""
    if backend is not None and backend not in BACKENDS:
        raise WorldError(f"backend={backend!r} is not supported: use {' or '.join(map(repr, BACKENDS))}")
    if backend == "nccl" and not cuda:
        raise WorldError("backend='nccl' needs a CUDA device and torch sees none: omit backend to use gloo")
    if cuda:
        return _choose_cuda(world, cuda, backend)
    if mps and world.size == 1:
        return DeviceChoice(torch.device("mps"), "none", "one rank on Apple's GPU")
    reason = f"{world.size} rank(s) on the CPU: no GPU is visible"
    return DeviceChoice(torch.device("cpu"), _backend(world, "gloo"), reason)


def _choose_cuda(world: World, devices: int, backend: str | None) -> DeviceChoice:
    device = torch.device("cuda", world.local_rank % devices)
    # with `srun --gpus-per-task=1` each rank sees only its own GPU
    one_gpu_per_task = devices == 1 and world.launcher == "slurm" and backend == "nccl"
    if world.local_size <= devices or one_gpu_per_task:
        reason = f"one GPU for each of the {world.local_size} rank(s) of this node"
        return DeviceChoice(device, _backend(world, backend or "nccl"), reason)
    if backend == "nccl":
        raise WorldError(
            f"backend='nccl' needs one GPU per rank, got {world.local_size} ranks on {devices} GPU(s): use "
            f"--nproc-per-node {devices}, or omit backend to use gloo"
        )
    reason = f"{world.local_size} ranks share {devices} GPU(s)"
    warning = f"{reason}: samestep uses gloo, which is slower than NCCL with one GPU per rank"
    return DeviceChoice(device, _backend(world, "gloo"), reason, warning)


def _backend(world: World, name: str) -> str:
    return name if world.size > 1 else "none"


@dataclass(frozen=True, order=True)
class MemoryShare:
    """One rank's share of a device's free memory."""

    free: int  # bytes
    ranks: int  # how many ranks use the device, this one included


def memory_shares(comm: Communicator, operation: str, device: torch.device, free: float) -> list[MemoryShare]:
    """The share of each rank, by rank, if `free` bytes are free on this rank's device; a collective."""
    world = comm.world
    gathered = [part.tolist() for part in comm.exchange(operation, [free, float(world.node), _device_id(device)])]
    ranks_per_device = Counter((node, device_id) for _, node, device_id in gathered)
    return [
        MemoryShare(int(free / ranks_per_device[node, device_id]), ranks_per_device[node, device_id])
        for free, node, device_id in gathered
    ]


def _device_id(device: torch.device) -> float:
    """A number for a device of a node, from its UUID: each rank may see its own GPU as device 0."""
    name = getattr(torch.cuda.get_device_properties(device), "uuid", device) if device.type == "cuda" else device
    return float(zlib.crc32(str(name).encode()))


_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every GPU of this process


def pin(memory: torch.Tensor) -> bool:
    """Pin host memory for direct copies to GPUs; False if the driver refuses, and copies need a staging buffer.

    The memory must be writable. Every rank of a node can pin the pages of one copy in shared memory.
    """
    runtime = torch.cuda.cudart()
    if runtime is not None and int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA reports the failure again at the next kernel: let it be this one
        torch.zeros(1, device="cuda")
    return False


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`; call it before the memory is freed."""
    if (runtime := torch.cuda.cudart()) is not None:
        runtime.cudaHostUnregister(memory.data_ptr())
