"""Which device this rank computes on, which backend connects the ranks, and how ranks share a device."""

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final

import torch
import torch.distributed as dist

from samestep.distributed.communicator import Communicator
from samestep.environment.gpus import identify_gpu, nccl_version
from samestep.environment.world import World, shares_gpus
from samestep.errors import WorldError

BACKENDS = ("gloo", "nccl")
_SHARED_GPU_VERSION = (2, 30)  # the first NCCL that allows several ranks per GPU
_SHARED_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHOWN = 4


def choose_device(world: World, cuda: int, mps: bool, backend: str | None) -> torch.device:
    """Choose from the number of visible CUDA devices and whether Apple's GPU is usable; checks the user's `backend`.

    With `srun --gpus-per-task=1`, or CUDA_VISIBLE_DEVICES set per rank, each rank sees its own GPU as device 0.
    """
    if backend is not None and backend not in BACKENDS:
        raise WorldError(f"backend={backend!r} is not supported: use {' or '.join(map(repr, BACKENDS))}")
    if backend == "nccl" and not cuda and world.size == 1:  # otherwise `choose_backend` raises, on all ranks
        raise WorldError("backend='nccl' needs a CUDA device and torch sees none: omit backend")
    if cuda:
        return torch.device("cuda", world.local_rank % cuda)
    return torch.device("mps" if mps and world.size == 1 else "cpu")


@dataclass(frozen=True)
class RankDevice:
    """What one rank computes on and what its NCCL can do, for the choice of a backend."""

    rank: int
    gpu: str = ""  # its UUID, for example "GPU-5ba3..." or "MIG-0a1b..."; empty without a GPU
    nccl: Sequence[int] = ()  # version; empty if this torch has none
    allows_sharing: bool = False  # whether NCCL_MULTI_RANK_GPU_ENABLE=1 is set
    requested: str | None = None  # the backend that the user passed


@dataclass(frozen=True)
class BackendChoice:
    """A backend for all ranks, with the reason."""

    backend: str  # "gloo", "nccl", or "none" for a single rank
    reason: str
    warning: str | None = None
    is_shared: bool = False  # whether ranks share a GPU


def choose_backend(ranks: Sequence[RankDevice]) -> BackendChoice:
    """NCCL with one GPU per rank, also if they share GPUs and NCCL allows it; otherwise gloo.

    Ranks share a GPU if its UUID is the same. How many GPUs a rank sees does not matter, nor which launcher started it.
    """
    requested = _requested_backend(ranks)
    if len(ranks) == 1:
        return BackendChoice("none", "a single rank needs no backend")
    _check_same_kind(ranks)
    by_gpu: defaultdict[str, list[int]] = defaultdict(list)
    for each in ranks:
        by_gpu[each.gpu].append(each.rank)
    if "" in by_gpu and requested == "nccl":
        raise WorldError(
            f"backend='nccl' needs a CUDA device and torch sees none on any of the {len(ranks)} ranks: omit backend to "
            "use gloo"
        )
    if "" in by_gpu:
        return BackendChoice("gloo", f"{len(ranks)} ranks on the CPU: no GPU is visible")
    if requested == "gloo":
        return BackendChoice("gloo", "backend='gloo' was passed to Run")
    if without := [each.rank for each in ranks if not each.nccl]:
        reason, remedy = f"torch has no NCCL on {_format_ranks(without)}", "install a build of torch with NCCL"
        if requested == "nccl":
            raise WorldError(f"backend='nccl' was passed to Run, but {reason}: {remedy}, or omit backend to use gloo")
        return BackendChoice("gloo", reason, f"{reason}: samestep uses gloo; {remedy}")
    shared = {gpu: users for gpu, users in by_gpu.items() if len(users) > 1}
    if not shared:
        return BackendChoice("nccl", f"one GPU for each of the {len(ranks)} ranks")
    return _choose_for_shared_gpus(ranks, len(by_gpu), shared, requested)


def _choose_for_shared_gpus(
    ranks: Sequence[RankDevice], gpus: int, shared: dict[str, list[int]], requested: str | None
) -> BackendChoice:
    gpu, users = next(iter(shared.items()))
    others = f" and {len(shared) - 1} more GPU(s)" if len(shared) > 1 else ""
    reason = f"{len(ranks)} ranks share {gpus} GPU(s): {_format_ranks(users)} use {gpu}{others}"
    version, least = min(tuple(each.nccl) for each in ranks), ".".join(map(str, _SHARED_GPU_VERSION))
    name = f"NCCL {'.'.join(map(str, version))}"
    enabled = all(each.allows_sharing for each in ranks)
    if version >= _SHARED_GPU_VERSION and enabled:
        return BackendChoice("nccl", f"{reason}, which {name} allows with {_SHARED_GPU_VARIABLE}=1", is_shared=True)
    refusal = f"{name} does not allow it" if version < _SHARED_GPU_VERSION else f"{_SHARED_GPU_VARIABLE} is not 1"
    allow = f"NCCL {least} or newer with {_SHARED_GPU_VARIABLE}=1"
    reason = f"{reason}, and {refusal}"
    if requested == "nccl":
        raise WorldError(
            f"backend='nccl' needs one GPU per rank, but {reason}: use --nproc-per-node with one rank per GPU, or "
            f"{allow}, or omit backend to use gloo"
        )
    advice = f"it is slower than NCCL with one GPU per rank, or than {allow}"
    return BackendChoice("gloo", reason, f"{reason}: samestep uses gloo; {advice}", is_shared=True)


def _check_same_kind(ranks: Sequence[RankDevice]) -> None:
    """Raise if some ranks have a GPU and others have none: they compute and exchange in different ways."""
    without = [each.rank for each in ranks if not each.gpu]
    if without and len(without) < len(ranks):
        raise WorldError(
            f"a GPU is visible to {len(ranks) - len(without)} of {len(ranks)} ranks, but not to "
            f"{_format_ranks(without)}: check CUDA_VISIBLE_DEVICES and the GPUs that each node allocates; to train on "
            "the CPU, hide the GPUs of all ranks with CUDA_VISIBLE_DEVICES=-1"
        )


def _requested_backend(ranks: Sequence[RankDevice]) -> str | None:
    first = ranks[0]
    for each in ranks:
        if each.requested != first.requested:
            raise WorldError(
                f"rank {first.rank} has Run(backend={first.requested!r}) and rank {each.rank} has "
                f"Run(backend={each.requested!r}): pass the same backend on all ranks"
            )
    return first.requested


def _format_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def describe_rank(world: World, device: torch.device, requested: str | None) -> RankDevice:
    """What this rank posts for the choice of the backend."""
    if device.type != "cuda":
        return RankDevice(world.rank, requested=requested)
    return RankDevice(world.rank, identify_gpu(device.index), nccl_version(), shares_gpus(), requested)


def agree_on_backend(
    store: dist.Store, size: int, own: RankDevice, wait: Callable[[list[str]], object]
) -> BackendChoice:
    """The backend that rank 0 chooses from the devices of all ranks, before there is a process group.

    Every rank posts one value and reads one; rank 0 reads those of all ranks. `wait` returns when all keys are in the
    store, and raises if another rank has failed before it posted its value.
    """
    store.set(f"device/{own.rank}", json.dumps(asdict(own)))
    if own.rank == 0:
        keys = [f"device/{rank}" for rank in range(size)]
        wait(keys)
        posted = store.multi_get(keys)
        try:
            choice = choose_backend([RankDevice(**json.loads(text)) for text in posted])
        except WorldError as error:
            store.set("backend", json.dumps({"error": str(error)}))
            raise
        store.set("backend", json.dumps(asdict(choice)))
        return choice
    wait(["backend"])
    chosen = json.loads(store.get("backend"))
    if "error" in chosen:
        raise WorldError(chosen["error"])
    return BackendChoice(**chosen)


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
    name = identify_gpu(device.index or 0) if device.type == "cuda" else str(device)
    return float(zlib.crc32(name.encode()))


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
