"""Placements whose weights stay on their devices: `gpu`, `cpu` (one copy per node), `balanced`, `sequential`, `custom`.

`offload` also uses the copy in host memory.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch import nn

from samestep.context import RunContext
from samestep.distributed.device import memory_shares
from samestep.distributed.once import run_on_every_rank
from samestep.environment.hardware import read_limits
from samestep.errors import TeacherError
from samestep.messages import format_bytes
from samestep.parallel.materialize import is_inside
from samestep.parallel.submodules import callable_by_itself
from samestep.teacher.frozen_model import FrozenModel, blocks, move_unsaved_buffers
from samestep.teacher.options import TeacherOptions
from samestep.teacher.outputs import to_device

_CPU: Final = torch.device("cpu")
_ALIGNMENT: Final = 64  # bytes, for vector instructions and DMA
_UNMAP_EVERY: Final = 1 << 30  # bytes of the files that are converted before they are unmapped
_COPYING: Final = "copying the teacher into shared memory"
_WEIGHTS_FRACTION: Final = 0.9  # of the free memory of a device: activations need the rest
_SHOWN: Final = 8  # names in a message


class ModuleTeacher:
    """A module whose weights stay on their devices; inputs move to it, outputs back, gradients the other way."""

    def __init__(self, context: RunContext, module: nn.Module, device: torch.device, description: str) -> None:
        self.module, self._home, self.description = module, context.device, description
        if any(tensor.device != self._home for tensor in (*module.parameters(), *module.buffers())):
            # Before other hooks: a module with a device map then moves its inputs to its own first device.
            module.register_forward_pre_hook(partial(_move_inputs, device), with_kwargs=True, prepend=True)
            module.register_forward_hook(lambda _, args, outputs: to_device(outputs, self._home))

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the module's outputs, on this rank's device."""
        return to_device(self.module(*args, **kwargs), self._home)

    def close(self) -> None:
        """Free the weights."""
        self.module = nn.Identity()


def place_on_device(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> ModuleTeacher:
    """Load a full copy on each rank's device."""
    comm, device, size, what = context.comm, context.device, frozen.total_bytes(options.dtype), "loading the teacher"
    share = memory_shares(comm, what, device, float(free_device_memory(device)))[comm.world.rank]

    def load() -> nn.Module:
        if size > share.free:
            raise TeacherError(
                f"placement='gpu' needs {format_bytes(size)} on {device} for each of its {share.ranks} rank(s), and "
                f"{format_bytes(share.free * share.ranks)} are free: use placement='sharded' or 'offload' (on the CPU "
                "'cpu'), or a smaller dtype="
            )
        module = frozen.load(device, options.dtype)
        frozen.weights.release()
        return module

    module = run_on_every_rank(comm, what, TeacherError, load)
    return ModuleTeacher(context, module, device, f"gpu: a copy of {format_bytes(size)} on {device} for each rank")


def place_in_host_memory(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> ModuleTeacher:
    """Keep one copy per node in host memory and compute on the CPU."""
    convert = frozen.needs_conversion(options.dtype)
    copy = copy_to_shared_memory(context, frozen, options.dtype) if convert else HostCopy(frozen.weights.tensor)

    def load() -> nn.Module:
        module = frozen.skeleton()
        frozen.fill(module, copy.get)
        move_unsaved_buffers(module, lambda name: _CPU)
        return module

    module = run_on_every_rank(context.comm, "placing the teacher", TeacherError, load)
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

    get: Callable[[str], torch.Tensor]  # returns a tensor by its name in the files
    memory: torch.Tensor | None = None  # None: the mapped files, of whose pages the system keeps one copy
    location: str = "mapped from its files"  # for messages


def copy_to_shared_memory(
    context: RunContext, frozen: FrozenModel, dtype: torch.dtype | None, writable: bool = False
) -> HostCopy:
    """Copy the weights to shared memory: each rank of a node fills a part, and all map it. A collective of all ranks.

    The memory has no name in any folder, so nothing is left behind however the processes end. With `writable` it can
    be pinned for a GPU; without, an accidental write stays private to its rank.
    """
    layout = pack(frozen, dtype, frozen.stored_names())
    total = max(1, packed_bytes(layout))
    comm, cleanups = context.comm, list[Callable[[], None]]()

    def reserve() -> str:
        free = free_host_memory()
        if total > free:
            raise TeacherError(
                f"the teacher needs {format_bytes(total)} in the host memory of each node, and {format_bytes(free)} "
                "are free: use placement='disk' or 'sharded', a smaller dtype=, or a node with more memory"
            )
        path, close = _reserve_memory(total)
        cleanups.append(close)  # the main rank of a node keeps it open until all ranks have mapped it
        return path

    try:
        path = context.once(reserve, per="node")
        # The local rank does not serve here: it is 0 on every rank if a user assigns a GPU to each rank by hand.
        nodes = [int(part[0]) for part in comm.exchange(_COPYING, [float(comm.world.node)])]
        rank, ranks = nodes[: comm.world.rank].count(comm.world.node), nodes.count(comm.world.node)
        mine = [tensor for tensor in layout if _copying_rank(tensor.start, total, ranks) == rank]
        run_on_every_rank(comm, _COPYING, TeacherError, _fill_part, frozen, mine, path, total)
        memory = run_on_every_rank(comm, "mapping the shared teacher", TeacherError, _map_memory, path, total, writable)
    finally:
        for close in cleanups:
            close()
    frozen.weights.release()
    return HostCopy({tensor.name: tensor.view(memory) for tensor in layout}.__getitem__, memory, "in shared memory")


@dataclass(frozen=True)
class PackedTensor:
    """One tensor, and its position in memory that holds several."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return this tensor as a view of the memory."""
        return memory[self.start : self.stop].view(self.dtype).view(self.shape)


def pack(frozen: FrozenModel, dtype: torch.dtype | None, names: Iterable[str]) -> list[PackedTensor]:
    """Give each tensor a position in memory, aligned and one after another."""
    layout: list[PackedTensor] = []
    for name in names:
        start = -(-packed_bytes(layout) // _ALIGNMENT) * _ALIGNMENT
        stop = start + frozen.bytes_of(name, dtype)
        layout.append(PackedTensor(name, frozen.weights.shape(name), frozen.dtype(name, dtype), start, stop))
    return layout


def packed_bytes(layout: list[PackedTensor]) -> int:
    """Return the bytes of all tensors."""
    return layout[-1].stop if layout else 0


def _copying_rank(start: int, total: int, ranks: int) -> int:
    """Return which of `ranks` ranks copies a tensor: the one in whose part of the memory it begins.

    >>> [_copying_rank(start, 192, 2) for start in (0, 64, 128)]
    [0, 0, 1]
    """
    return start * ranks // total


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


def _fill_part(frozen: FrozenModel, part: list[PackedTensor], path: str, total: int) -> None:
    memory, mapped = _map_memory(path, total, True), 0
    for tensor in part:
        source = frozen.weights.tensor(tensor.name)
        tensor.view(memory).copy_(source)
        mapped += source.nbytes
        del source
        if mapped > _UNMAP_EVERY:
            frozen.weights.release()
            mapped = 0


def _map_memory(path: str, total: int, writable: bool) -> torch.Tensor:
    storage = torch.UntypedStorage.from_file(path, writable, total)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (total,))  # pyright: ignore[reportCallIssue, reportArgumentType]  # the stub does not know storages


def _move_inputs(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return to_device((args, kwargs), device)


@dataclass(frozen=True)
class DeviceBudget:
    """A device, and how many bytes of the teacher it may hold."""

    device: torch.device
    bytes: int


Split = Callable[[Sequence[int], int, Sequence[DeviceBudget]], list[int]]
"""Given the bytes of each block, the bytes of the rest, and the devices: the index of the device of each block."""


def place_custom(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> ModuleTeacher:
    """Put each module on the device that the user's device map names."""

    def assign(module: nn.Module) -> dict[str, torch.device]:
        if not options.device_map:
            raise TeacherError(
                "placement='custom' needs device_map={module: device, ...}, e.g. device_map={'': 'cuda:0', 'layers.3': "
                "'cuda:1'}; '' means everything that no other name covers"
            )
        _check_device_map(module, options.device_map)
        return {name: torch.device(device) for name, device in options.device_map.items()}

    return _place_parts(context, frozen, options.dtype, "custom", assign)


def place_on_devices(
    context: RunContext,
    frozen: FrozenModel,
    options: TeacherOptions,
    split: Split,
    placement: str,
    budgets: Sequence[DeviceBudget] | None = None,
) -> ModuleTeacher:
    """Put each block on the device that `split` chooses, and everything else on the first device."""
    budgets = budgets or device_budgets(context)

    def assign(module: nn.Module) -> dict[str, torch.device]:
        sizes = {block: frozen.total_bytes(options.dtype, block) for block in blocks(module)}
        rest = max(0, frozen.total_bytes(options.dtype) - sum(sizes.values()))
        chosen = split(list(sizes.values()), rest, budgets)
        used = [rest, *([0] * (len(budgets) - 1))]
        for size, index in zip(sizes.values(), chosen, strict=True):
            used[index] += size
        for size, budget in zip(used, budgets, strict=True):
            if size > budget.bytes:
                raise TeacherError(
                    f"placement={placement!r} would put {format_bytes(size)} of the teacher on {budget.device}, where "
                    f"{format_bytes(budget.bytes)} are free for it: use placement='sharded' or 'offload', a smaller "
                    "dtype=, or more GPUs"
                )
        devices = {block: budgets[index].device for block, index in zip(sizes, chosen, strict=True)}
        return {"": budgets[0].device} | devices

    return _place_parts(context, frozen, options.dtype, placement, assign)


def device_budgets(context: RunContext) -> list[DeviceBudget]:
    """Return this rank's device, then the other visible GPUs; they are divided if each rank gets at least two."""
    if context.device.type != "cuda":
        return [DeviceBudget(context.device, free_device_memory(context.device))]
    count, ranks = torch.cuda.device_count(), context.comm.world.local_size
    own = context.device.index or 0
    others = [(own + step) % count for step in range(1, count)]
    if count >= 2 * ranks:
        others = [index for index in others if index % ranks == own % ranks]
    devices = [torch.device("cuda", index) for index in (own, *others)]
    return [DeviceBudget(device, int(_WEIGHTS_FRACTION * free_device_memory(device))) for device in devices]


def split_evenly(sizes: Sequence[int], rest: int, budgets: Sequence[DeviceBudget]) -> list[int]:
    """Give each device a run of consecutive blocks with about the same bytes."""
    per_device = (sum(sizes) + rest) / len(budgets)
    chosen: list[int] = []
    before = float(rest)
    for size in sizes:
        chosen.append(min(len(budgets) - 1, int((before + size / 2) / per_device)) if per_device else 0)
        before += size
    return chosen


def split_in_order(sizes: Sequence[int], rest: int, budgets: Sequence[DeviceBudget]) -> list[int]:
    """Put each block on the first device that has free memory, never on one before that of the previous block."""
    chosen: list[int] = []
    index, used = 0, rest
    for size in sizes:
        while index + 1 < len(budgets) and used + size > budgets[index].bytes:
            index, used = index + 1, 0
        chosen.append(index)
        used += size
    return chosen


# The blocks on the visible GPUs, evenly by bytes; everything else on this rank's own GPU.
place_balanced = partial(place_on_devices, split=split_evenly, placement="balanced")
# One GPU after another is filled, this rank's own first.
place_sequential = partial(place_on_devices, split=split_in_order, placement="sequential")


def _place_parts(
    context: RunContext,
    frozen: FrozenModel,
    dtype: torch.dtype | None,
    placement: str,
    assign: Callable[[nn.Module], dict[str, torch.device]],
) -> ModuleTeacher:
    """Load each part that `assign` names on its device, and let it move its inputs there."""

    def owner(name: str, devices: Mapping[str, object]) -> str:
        return max((part for part in devices if is_inside(name, part)), key=len)  # the innermost

    def load() -> tuple[nn.Module, dict[str, torch.device]]:
        module = frozen.skeleton()
        devices = assign(module)
        owners = {name: owner(name, devices) for name in _tensor_names(module)}
        for part, device in devices.items():
            copy = partial(frozen.copy_tensor, device=device, dtype=dtype)
            frozen.fill(module, copy, {name for name, holder in owners.items() if holder == part}.__contains__)
        move_unsaved_buffers(module, lambda name: devices[owners[name]])
        for part, device in devices.items():
            for name in _entry_points(module, part, devices):
                _hook_inputs(module.get_submodule(name), device)
        frozen.weights.release()
        return module, devices

    module, devices = run_on_every_rank(context.comm, "placing the teacher", TeacherError, load)
    held = Counter[torch.device]()
    for name in frozen.stored_names():
        held[devices[owner(name, devices)]] += frozen.bytes_of(name, dtype)
    description = ", ".join(f"{format_bytes(size)} on {device}" for device, size in held.items())
    return ModuleTeacher(context, module, context.device, f"{placement}: {description} for each rank")


def _entry_points(module: nn.Module, part: str, parts: Mapping[str, object]) -> list[str]:
    """Return a part, and its outermost submodules that hold no other part: inputs may reach them from other devices."""
    if not any(name != part and is_inside(name, part) for name in parts):
        return [part]
    children = [f"{part}.{name}".lstrip(".") for name, _ in module.get_submodule(part).named_children()]
    return [part, *(at for child in children if child not in parts for at in _entry_points(module, child, parts))]


def _hook_inputs(module: nn.Module, device: torch.device) -> None:
    """Hook a module so that each call moves its inputs; of a list of modules, which is not called, its elements."""
    if callable_by_itself(module):
        module.register_forward_pre_hook(partial(_move_inputs, device), with_kwargs=True)
        return
    for child in module.children():
        _hook_inputs(child, device)


def _check_device_map(module: nn.Module, device_map: Mapping[str, str]) -> None:
    known = [name for name, _ in module.named_modules()]
    visible = [*(f"cuda:{index}" for index in range(torch.cuda.device_count())), "cpu"]
    for name, device in device_map.items():
        if name not in known:
            children = [child for child, _ in module.named_children()]
            close = get_close_matches(str(name), known, n=3, cutoff=0.5) or children
            raise TeacherError(
                f"device_map names {name!r}, which is not a module of the teacher: its names are like "
                f"{close[:_SHOWN]}; '' means everything that no other name covers"
            )
        if str(device) not in visible:
            raise TeacherError(
                f"device_map puts {name!r} on {device!r}, but the devices here are {visible}: use one of them; a "
                "module computes on its device"
            )
    uncovered = [name for name in _tensor_names(module) if not any(is_inside(name, part) for part in device_map)]
    if uncovered:
        missing = list(dict.fromkeys(name.rpartition(".")[0] for name in uncovered))
        raise TeacherError(
            f"device_map has no device for {len(missing)} module(s): {missing[:_SHOWN]}; add them, or {{'': device}} "
            "for everything else"
        )


def _tensor_names(module: nn.Module) -> list[str]:
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [name for name, _ in tensors]
