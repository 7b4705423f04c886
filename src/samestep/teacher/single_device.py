"""Placements `gpu` and `cpu`: a copy on the device of each rank, or one copy per node in host memory.

`offload` also uses the copy in host memory.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch import nn

from samestep.context import RunContext
from samestep.distributed.communicator import Communicator
from samestep.distributed.device import MemoryShare, memory_shares
from samestep.distributed.once import run_on_every_rank
from samestep.environment.hardware import read_limits
from samestep.errors import TeacherError
from samestep.messages import format_bytes
from samestep.teacher.frozen_model import FrozenModel, move_unsaved_buffers
from samestep.teacher.options import TeacherOptions
from samestep.teacher.outputs import to_device

_CPU: Final = torch.device("cpu")
_ALIGNMENT: Final = 64  # bytes, for vector instructions and DMA
_UNMAP_EVERY: Final = 1 << 30  # bytes of the files that are converted before they are unmapped
_COPYING: Final = "copying the teacher into shared memory"


class ModuleTeacher:
    """A module whose weights stay on their devices; inputs move to it, outputs back, gradients the other way."""

    def __init__(self, context: RunContext, module: nn.Module, device: torch.device, description: str) -> None:
        self.module, self._home, self._description = module, context.device, description
        if any(tensor.device != self._home for tensor in (*module.parameters(), *module.buffers())):
            _move_inputs_and_outputs(module, device, self._home)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the module's outputs, on this rank's device."""
        return to_device(self.module(*args, **kwargs), self._home)

    def describe(self) -> str:
        """Return where the weights are."""
        return self._description

    def close(self) -> None:
        """Free the weights."""
        self.module = nn.Identity()


def place_on_device(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> ModuleTeacher:
    """Load a full copy on each rank's device."""
    comm, device, size, what = context.comm, context.device, frozen.total_bytes(options.dtype), "loading the teacher"
    share = memory_shares(comm, what, device, float(free_device_memory(device)))[comm.world.rank]

    def load() -> nn.Module:
        _check_device_memory(device, size, share)
        module = frozen.load(device, options.dtype)
        frozen.weights.release()
        return module

    module = run_on_every_rank(comm, what, load)
    return ModuleTeacher(context, module, device, f"gpu: a copy of {format_bytes(size)} on {device} for each rank")


def place_in_host_memory(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> ModuleTeacher:
    """Keep one copy per node in host memory and compute on the CPU."""
    convert = frozen.needs_conversion(options.dtype)
    copy = copy_to_shared_memory(context, frozen, options.dtype) if convert else map_files(frozen)

    def load() -> nn.Module:
        module = frozen.skeleton()
        frozen.fill(module, copy.get)
        move_unsaved_buffers(module, lambda name: _CPU)
        return module

    module = run_on_every_rank(context.comm, "placing the teacher", load)
    size, ranks = format_bytes(frozen.total_bytes(options.dtype)), context.comm.world.local_size
    description = f"cpu: one copy of {size} {copy.location} for {ranks} rank(s) of the node"
    return ModuleTeacher(context, module, _CPU, description)


def free_device_memory(device: torch.device) -> int:
    """Return the free bytes of a device."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_host_memory()


def free_host_memory() -> int:
    """Return the free bytes of host memory, limited by the cgroup of this process."""
    left = read_limits().memory_left
    free = int(psutil.virtual_memory().available)
    return free if left is None else min(free, left)


@dataclass(frozen=True)
class HostCopy:
    """Weights in host memory that all ranks of a node share."""

    get: Callable[[str], torch.Tensor]
    """Returns a tensor by its name in the files."""
    memory: torch.Tensor | None
    """All bytes of shared memory; None if the files themselves are mapped."""
    location: str
    """Where it is, for messages."""


def map_files(frozen: FrozenModel) -> HostCopy:
    """Use the mapped files themselves: the system keeps one copy of their pages for all processes."""
    return HostCopy(frozen.weights.tensor, None, "mapped from its files")


def copy_to_shared_memory(
    context: RunContext, frozen: FrozenModel, dtype: torch.dtype | None, writable: bool = False
) -> HostCopy:
    """Copy the weights to shared memory: each rank of a node fills a part, and all map it. A collective of all ranks.

    The memory has no name in any folder, so nothing is left behind however the processes end. With `writable` it can
    be pinned for a GPU; without, an accidental write stays private to its rank.
    """
    starts, total = _layout(frozen, dtype)
    comm, cleanups = context.comm, list[Callable[[], None]]()

    def reserve() -> str:
        _check_host_memory(total)
        path, close = _reserve_memory(total)
        cleanups.append(close)  # the main rank of a node keeps it open until all ranks have mapped it
        return path

    try:
        path = context.once(reserve, per="node")
        mine = _part_of_rank(starts, total, *_position_on_node(comm))
        run_on_every_rank(comm, _COPYING, _fill_part, frozen, dtype, mine, path, total)
        memory = run_on_every_rank(comm, "mapping the shared teacher", _map_memory, path, total, writable)
    finally:
        for close in cleanups:
            close()
    frozen.weights.release()

    def get(name: str) -> torch.Tensor:
        return _view(memory, starts[name], frozen.weights.shape(name), frozen.dtype(name, dtype))

    return HostCopy(get, memory, "in shared memory")


def aligned(length: int) -> int:
    """Return `length` rounded up to the alignment of the next tensor."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _layout(frozen: FrozenModel, dtype: torch.dtype | None) -> tuple[dict[str, int], int]:
    """Return the first byte of each tensor, and the bytes of all."""
    end, starts = 0, dict[str, int]()
    for name in frozen.stored_names():
        starts[name] = end
        end += aligned(frozen.bytes_of(name, dtype))
    return starts, max(end, 1)


def _position_on_node(comm: Communicator) -> tuple[int, int]:
    """Return the number of this rank among the ranks of its node, and their count. A collective of all ranks.

    The local rank does not serve: it is 0 on every rank if a user assigns a GPU to each rank by hand.
    """
    nodes = [int(part[0]) for part in comm.exchange(_COPYING, [float(comm.world.node)])]
    return nodes[: comm.world.rank].count(comm.world.node), nodes.count(comm.world.node)


def _part_of_rank(starts: dict[str, int], total: int, rank: int, ranks: int) -> dict[str, int]:
    """Return the tensors that one of `ranks` ranks copies: those that begin in its part of the memory.

    >>> [_part_of_rank({"a": 0, "b": 64, "c": 128}, 192, rank, 2) for rank in (0, 1)]
    [{'a': 0, 'b': 64}, {'c': 128}]
    """
    return {name: start for name, start in starts.items() if start * ranks // total == rank}


def _reserve_memory(total: int) -> tuple[str, Callable[[], None]]:
    """Return a path to new memory that the other ranks of this node can open, and a function that removes the path."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("samestep-teacher")
        try:
            os.posix_fallocate(descriptor, 0, total)  # now: a page that is missing later would kill the process
        except BaseException:
            os.close(descriptor)
            raise
        return f"/proc/{os.getpid()}/fd/{descriptor}", lambda: os.close(descriptor)
    descriptor, path = tempfile.mkstemp(prefix="samestep-teacher-")
    os.truncate(descriptor, total)
    os.close(descriptor)
    return path, lambda: Path(path).unlink()


def _fill_part(frozen: FrozenModel, dtype: torch.dtype | None, part: dict[str, int], path: str, total: int) -> None:
    memory, mapped = _map_memory(path, total, True), 0
    for name, start in part.items():
        source = frozen.weights.tensor(name)
        _view(memory, start, tuple(source.shape), frozen.dtype(name, dtype)).copy_(source)
        mapped += source.nbytes
        del source
        if mapped > _UNMAP_EVERY:
            frozen.weights.release()
            mapped = 0


def _map_memory(path: str, total: int, writable: bool) -> torch.Tensor:
    storage = torch.UntypedStorage.from_file(path, writable, total)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (total,))  # pyright: ignore[reportCallIssue, reportArgumentType]  # the stub does not know storages


def _view(memory: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    length = torch.Size(shape).numel() * dtype.itemsize
    return memory[start : start + length].view(dtype).view(shape)


def _move_inputs_and_outputs(module: nn.Module, device: torch.device, home: torch.device) -> None:
    """Hook a module so that each call moves its inputs to `device` and its outputs to `home`."""

    def move_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return to_device((args, kwargs), device)

    def move_outputs(_: nn.Module, args: object, outputs: Any) -> Any:
        return to_device(outputs, home)

    # Before other hooks: a module with a device map then moves its inputs to its own first device.
    module.register_forward_pre_hook(move_inputs, with_kwargs=True, prepend=True)
    module.register_forward_hook(move_outputs)


def _check_device_memory(device: torch.device, size: int, share: MemoryShare) -> None:
    if size > share.free:
        raise TeacherError(
            f"placement='gpu' needs {format_bytes(size)} on {device} for each of its {share.ranks} rank(s), and "
            f"{format_bytes(share.free * share.ranks)} are free: use placement='sharded' or 'offload' (on the CPU "
            "'cpu'), or a smaller dtype="
        )


def _check_host_memory(total: int) -> None:
    free = free_host_memory()
    if total > free:
        raise TeacherError(
            f"the teacher needs {format_bytes(total)} in the host memory of each node, and {format_bytes(free)} are "
            "free: use placement='disk' or 'sharded', a smaller dtype=, or a node with more memory"
        )
