"""Ranks that share a device: each has a part of it."""

import zlib
from collections import Counter
from dataclasses import dataclass

import torch

from samestep.distributed.communicator import Communicator
from samestep.environment.world import World
from samestep.errors import WorldError

BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class Accelerators:
    """What torch sees on this node."""

    cuda: int
    """Number of CUDA devices visible to this process."""
    mps: bool
    """Whether Apple's GPU is usable."""


@dataclass(frozen=True)
class DeviceChoice:
    """A device and a backend, with the reason."""

    device: torch.device
    """Where this rank computes."""
    backend: str
    """What connects the ranks: "gloo", "nccl", or "none" for one rank."""
    reason: str
    """Why, in words for a person."""
    warning: str | None = None
    """What the user should know about it, if anything."""


def see_accelerators() -> Accelerators:
    """Ask torch, without creating a context on any device."""
    return Accelerators(cuda=torch.cuda.device_count(), mps=torch.backends.mps.is_available())


def choose_device(world: World, seen: Accelerators, backend: str | None) -> DeviceChoice:
    """Decide device and backend; `backend` is the user's wish or None."""
    if backend is not None and backend not in BACKENDS:
        raise WorldError(f"backend={backend!r} is not one that samestep uses: use {' or '.join(map(repr, BACKENDS))}")
    if backend == "nccl" and not seen.cuda:
        raise WorldError("backend='nccl' needs a CUDA device and torch sees none: leave backend out to use gloo")
    if seen.cuda:
        return _choose_cuda(world, seen.cuda, backend)
    if seen.mps and world.size == 1:
        return DeviceChoice(torch.device("mps"), "none", "one rank on Apple's GPU")
    return DeviceChoice(
        torch.device("cpu"), _backend(world, "gloo"), f"{world.size} rank(s) on the CPU: no GPU is visible"
    )


def _choose_cuda(world: World, devices: int, wish: str | None) -> DeviceChoice:
    device = torch.device("cuda", world.local_rank % devices)
    own_each = (
        devices == 1 and world.launcher == "slurm" and wish == "nccl"
    )  # srun --gpus-per-task=1 shows each rank its own
    if world.local_size <= devices or own_each:
        chosen = _backend(world, wish or "nccl")
        return DeviceChoice(device, chosen, f"a GPU for each of the {world.local_size} rank(s) of this node")
    if wish == "nccl":
        raise WorldError(
            f"backend='nccl' cannot serve {world.local_size} ranks on {devices} GPU(s): NCCL wants a GPU for each "
            "rank; "
            f"use --nproc-per-node {devices}, or leave backend out to use gloo"
        )
    crowd = f"{world.local_size} ranks share {devices} GPU(s)"
    return DeviceChoice(
        device, _backend(world, "gloo"), crowd, f"{crowd}: gloo connects them, slower than NCCL on a GPU each"
    )


def _backend(world: World, name: str) -> str:
    return name if world.size > 1 else "none"


@dataclass(frozen=True)
class MemoryShare:
    """What one rank has of a device."""

    free: int
    """Bytes, of those that are free there."""
    ranks: int
    """How many ranks compute on the device, itself among them."""


def memory_shares(link: Communicator, act: str, device: torch.device, free: float) -> list[MemoryShare]:
    """What each rank has of what is `free` on its device, by rank; a common act of all."""
    told = [part.tolist() for part in link.exchange(act, [free, float(link.world.node), _mark(device)])]
    sharing = Counter((node, mark) for _, node, mark in told)
    return [MemoryShare(int(room / sharing[node, mark]), sharing[node, mark]) for room, node, mark in told]


def smallest_memory_share(link: Communicator, act: str, device: torch.device, free: float) -> MemoryShare:
    """What the rank has that has least; a common act of all."""
    return min(memory_shares(link, act, device, free), key=lambda share: (share.free, share.ranks))


def _mark(device: torch.device) -> float:
    """A number for a device of a node; by its own name, as each rank may see its GPU as the first one."""
    name = getattr(torch.cuda.get_device_properties(device), "uuid", device) if device.type == "cuda" else device
    return float(zlib.crc32(str(name).encode()))
