"""Placements `balanced`, `sequential` and `custom`: the layers of a teacher on several devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import torch
from torch import nn

from samestep.context import RunContext
from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.messages import format_bytes
from samestep.parallel.submodules import callable_by_itself
from samestep.teacher.frozen_model import FrozenModel, blocks, is_inside, move_unsaved_buffers
from samestep.teacher.options import TeacherOptions
from samestep.teacher.outputs import to_device
from samestep.teacher.single_device import ModuleTeacher, free_device_memory

_WEIGHTS_FRACTION: Final = 0.9  # of the free memory of a device: activations need the rest
_SHOWN: Final = 8  # names in a message


@dataclass(frozen=True)
class DeviceBudget:
    """A device, and how many bytes of the teacher it may hold."""

    device: torch.device
    bytes: int


Split = Callable[[Sequence[int], int, Sequence[DeviceBudget]], list[int]]
"""Given the bytes of each block, the bytes of the rest, and the devices: the index of the device of each block."""


def place_balanced(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> ModuleTeacher:
    """Split the blocks over the visible GPUs, evenly by bytes; everything else is on this rank's own GPU."""
    return place_on_devices(context, frozen, options, device_budgets(context), split_evenly, "balanced")


def place_sequential(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> ModuleTeacher:
    """Fill one GPU after another, this rank's own first."""
    return place_on_devices(context, frozen, options, device_budgets(context), split_in_order, "sequential")


def place_custom(context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> ModuleTeacher:
    """Put each module on the device that the user's device map names."""

    def load() -> nn.Module:
        if not options.device_map:
            raise TeacherError(
                "placement='custom' needs device_map={module: device, ...}, e.g. device_map={'': 'cuda:0', 'layers.3': "
                "'cuda:1'}; '' means everything that no other name covers"
            )
        module = frozen.skeleton()
        _check_device_map(module, options.device_map)
        devices = {name: torch.device(device) for name, device in options.device_map.items()}
        return _fill(frozen, options.dtype, module, devices)

    module = run_on_every_rank(context.comm, "placing the teacher", load)
    description = f"custom: {_describe_devices(frozen, options.dtype, options.device_map or {})}"
    return ModuleTeacher(context, module, context.device, description)


def place_on_devices(
    context: RunContext,
    frozen: FrozenModel,
    options: TeacherOptions,
    budgets: Sequence[DeviceBudget],
    split: Split,
    placement: str,
) -> ModuleTeacher:
    """Put each block on the device that `split` chooses, and everything else on the first device."""

    def load() -> tuple[nn.Module, dict[str, torch.device]]:
        module = frozen.skeleton()
        sizes = {block: frozen.total_bytes(options.dtype, block) for block in blocks(module)}
        rest = max(0, frozen.total_bytes(options.dtype) - sum(sizes.values()))
        chosen = split(list(sizes.values()), rest, budgets)
        _check_budgets(list(sizes.values()), rest, budgets, chosen, placement)
        devices = {"": budgets[0].device}
        devices |= {block: budgets[index].device for block, index in zip(sizes, chosen, strict=True)}
        return _fill(frozen, options.dtype, module, devices), devices

    module, devices = run_on_every_rank(context.comm, "placing the teacher", load)
    description = f"{placement}: {_describe_devices(frozen, options.dtype, devices)}"
    return ModuleTeacher(context, module, context.device, description)


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


def _check_budgets(
    sizes: Sequence[int], rest: int, budgets: Sequence[DeviceBudget], chosen: Sequence[int], placement: str
) -> None:
    used = [rest, *([0] * (len(budgets) - 1))]
    for size, index in zip(sizes, chosen, strict=True):
        used[index] += size
    for size, budget in zip(used, budgets, strict=True):
        if size > budget.bytes:
            raise TeacherError(
                f"placement={placement!r} would put {format_bytes(size)} of the teacher on {budget.device}, where "
                f"{format_bytes(budget.bytes)} are free for it: use placement='sharded' or 'offload', a smaller "
                "dtype=, or more GPUs"
            )


def _fill(
    frozen: FrozenModel, dtype: torch.dtype | None, module: nn.Module, devices: Mapping[str, torch.device]
) -> nn.Module:
    """Load each part of `devices` on its device, and let each part move its inputs there."""
    owners = {name: _owner(name, devices) for name in _tensor_names(module)}
    for part, device in devices.items():

        def copy(name: str, device: torch.device = device) -> torch.Tensor:
            return frozen.copy_tensor(name, device, dtype)

        frozen.fill(module, copy, {name for name, owner in owners.items() if owner == part}.__contains__)
    move_unsaved_buffers(module, lambda name: devices[owners[name]])
    for part, device in devices.items():
        for name in _entry_points(module, part, devices):
            _move_inputs(module.get_submodule(name), device)
    frozen.weights.release()
    return module


def _entry_points(module: nn.Module, part: str, parts: Mapping[str, object]) -> list[str]:
    """Return a part, and its outermost submodules that hold no other part: inputs may reach them from other devices."""
    if not any(name != part and is_inside(name, part) for name in parts):
        return [part]
    children = [f"{part}.{name}".lstrip(".") for name, _ in module.get_submodule(part).named_children()]
    return [part, *(at for child in children if child not in parts for at in _entry_points(module, child, parts))]


def _move_inputs(module: nn.Module, device: torch.device) -> None:
    """Hook a module so that each call moves its inputs; of a list of modules, which is not called, its elements."""
    if not callable_by_itself(module):
        for child in module.children():
            _move_inputs(child, device)
        return

    def move(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return to_device((args, kwargs), device)

    module.register_forward_pre_hook(move, with_kwargs=True)


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


def _owner(name: str, parts: Mapping[str, object]) -> str:
    """Return the innermost part that holds a tensor."""
    return max((part for part in parts if is_inside(name, part)), key=len)


def _describe_devices(frozen: FrozenModel, dtype: torch.dtype | None, devices: Mapping[str, object]) -> str:
    held: dict[str, int] = {}
    for name in frozen.stored_names():
        device = str(devices[_owner(name, devices)])
        held[device] = held.get(device, 0) + frozen.bytes_of(name, dtype)
    return ", ".join(f"{format_bytes(size)} on {device}" for device, size in held.items()) + " for each rank"
