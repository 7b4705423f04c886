"""Placements `balanced`, `sequential` and `custom`: the layers of a teacher on several devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.messages import format_bytes
from samestep.parallel.submodules import callable_by_itself
from samestep.teacher.frozen_model import FrozenModel, blocks, inside, settle
from samestep.teacher.options import Ground, PlacedTeacher, TeacherOptions
from samestep.teacher.single_device import Whole, device_room
from samestep.teacher.transfer import carry

_SHARE = 0.9  # of what is free on a device: activations need the rest
_SHOWN = 8  # names in a message


@dataclass(frozen=True)
class Seat:
    """A device that may hold a part of the teacher."""

    device: torch.device
    """The device."""
    room: int
    """Bytes that a teacher may take there."""


Split = Callable[[Sequence[int], int, Sequence[Seat]], list[int]]


def place_balanced(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> PlacedTeacher:
    """Blocks over the visible GPUs, evenly by bytes; all else on this rank's own."""
    return spread(ground, frozen, wish, seats(ground), split_evenly, "balanced")


def place_sequential(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> PlacedTeacher:
    """GPUs filled one after another, this rank's own first."""
    return spread(ground, frozen, wish, seats(ground), split_in_order, "sequential")


def place_custom(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> PlacedTeacher:
    """Modules where the user's device map puts them, each computing there."""

    def load() -> nn.Module:
        """Check the map and fill the module by it."""
        if not wish.device_map:
            raise TeacherError(
                "placement='custom' needs device_map={module: device, ...}, e.g. device_map={'': 'cuda:0', 'layers.3': "
                "'cuda:1'}; '' is all that no other name covers"
            )
        module = frozen.skeleton()
        _check_map(module, wish.device_map)
        return _fill(frozen, wish, module, {name: torch.device(device) for name, device in wish.device_map.items()})

    module = run_on_every_rank(ground.link, "placing the teacher", load)
    return Whole(ground, module, ground.device, f"custom: {_told(frozen, wish, wish.device_map or {})}")


def spread(
    ground: Ground, frozen: FrozenModel, wish: TeacherOptions, where: Sequence[Seat], split: Split, name: str
) -> PlacedTeacher:
    """Blocks on the devices that `split` gives them, all else on the first."""

    def load() -> tuple[nn.Module, dict[str, torch.device]]:
        """Decide what lies where and fill the module by it."""
        module = frozen.skeleton()
        sizes = {part: _bytes_in(frozen, wish, part) for part in blocks(module)}
        rest = frozen.bytes_in(wish.dtype) - sum(sizes.values())
        chosen = split(list(sizes.values()), max(0, rest), where)
        _refuse_overfull(list(sizes.values()), max(0, rest), where, chosen, name)
        mapped = {"": where[0].device, **{part: where[seat].device for part, seat in zip(sizes, chosen, strict=True)}}
        return _fill(frozen, wish, module, mapped), mapped

    module, mapped = run_on_every_rank(ground.link, "placing the teacher", load)
    return Whole(ground, module, ground.device, f"{name}: {_told(frozen, wish, mapped)}")


def split_evenly(sizes: Sequence[int], rest: int, where: Sequence[Seat]) -> list[int]:
    """For each block the number of its seat: runs of blocks whose bytes are as even as whole blocks allow."""
    share = (sum(sizes) + rest) / len(where)
    chosen: list[int] = []
    before = float(rest)
    for size in sizes:
        chosen.append(min(len(where) - 1, int((before + size / 2) / share)) if share else 0)
        before += size
    return chosen


def split_in_order(sizes: Sequence[int], rest: int, where: Sequence[Seat]) -> list[int]:
    """For each block the number of its seat: the first that still has room, never one before the last taken."""
    chosen: list[int] = []
    seat, used = 0, rest
    for size in sizes:
        while seat + 1 < len(where) and used + size > where[seat].room:
            seat, used = seat + 1, 0
        chosen.append(seat)
        used += size
    return chosen


def seats(ground: Ground) -> list[Seat]:
    """The devices of this rank's teacher: its own, then the other visible GPUs, shared out where each rank gets two."""
    if ground.device.type != "cuda":
        return [Seat(ground.device, device_room(ground.device))]
    count, world = torch.cuda.device_count(), ground.link.world
    own = ground.device.index or 0
    others = [(own + step) % count for step in range(1, count)]
    if count >= 2 * world.local_size:
        others = [index for index in others if index % world.local_size == own % world.local_size]
    devices = [torch.device("cuda", index) for index in (own, *others)]
    return [Seat(device, int(_SHARE * device_room(device))) for device in devices]


def _fill(
    frozen: FrozenModel, wish: TeacherOptions, module: nn.Module, mapped: Mapping[str, torch.device]
) -> nn.Module:
    where = {name: mapped[_covering(name, mapped)] for name in _every_tensor(module)}
    for part, device in mapped.items():
        own = {name for name in where if _covering(name, mapped) == part}

        def get(name: str, device: torch.device = device) -> torch.Tensor:
            """A copy on this part's device."""
            has = frozen.weights.tensor(name)
            return has.to(device, frozen.dtype(name, wish.dtype), copy=True)

        frozen.fill(module, get, own.__contains__)
    settle(module, where.__getitem__)
    for part, device in mapped.items():
        for name in _meeting_points(module, part, mapped):
            _bring_inputs(module.get_submodule(name), device)
    frozen.weights.release()
    return module


def _meeting_points(module: nn.Module, part: str, parts: Mapping[str, object]) -> list[str]:
    """A part, and what of it comes after parts that lie elsewhere: the outermost submodules that hold no other part."""
    inside = [name for name in parts if name != part and _is_covered(name, {part: None})]
    if not inside:
        return [part]
    children = [f"{part}.{name}".lstrip(".") for name, _ in module.get_submodule(part).named_children()]
    return [part, *(at for child in children if child not in parts for at in _meeting_points(module, child, parts))]


def _bring_inputs(module: nn.Module, device: torch.device) -> None:
    """Let every call of a module find its inputs on its device; a list of modules is not called, its elements are."""
    if not callable_by_itself(module):
        for child in module.children():
            _bring_inputs(child, device)
        return

    def bring(_: nn.Module, args: Any, kwargs: Any) -> Any:
        """The inputs of a call, on the device."""
        return carry((args, kwargs), device)

    module.register_forward_pre_hook(bring, with_kwargs=True)


def _check_map(module: nn.Module, device_map: Mapping[str, str]) -> None:
    known = [name for name, _ in module.named_modules()]
    children = [name for name, _ in module.named_children()]
    devices = visible_devices()
    for name, device in device_map.items():
        if name not in known:
            near = get_close_matches(str(name), known, n=3, cutoff=0.5) or children
            raise TeacherError(
                f"device_map names {name!r}, which is no module of the teacher: its names are like {near[:_SHOWN]}; "
                "'' is all that no other name covers"
            )
        if str(device) not in devices:
            raise TeacherError(
                f"device_map puts {name!r} on {device!r}: the devices here are {devices}; a module computes where it "
                "lies"
            )
    left = [name for name in _every_tensor(module) if not _is_covered(name, device_map)]
    if left:
        missing = list(dict.fromkeys(name.rpartition(".")[0] for name in left))
        raise TeacherError(
            f"device_map gives no device to {len(missing)} module(s): {missing[:_SHOWN]}; add them, or {{'': device}} "
            "for all that is left"
        )


def visible_devices() -> list[str]:
    """The devices that a device map may name."""
    return [*(f"cuda:{index}" for index in range(torch.cuda.device_count())), "cpu"]


def _every_tensor(module: nn.Module) -> list[str]:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [name for name, _ in named]


def _is_covered(name: str, parts: Mapping[str, object]) -> bool:
    return any(inside(name, part) for part in parts)


def _covering(name: str, parts: Mapping[str, object]) -> str:
    return max((part for part in parts if inside(name, part)), key=len)


def _bytes_in(frozen: FrozenModel, wish: TeacherOptions, part: str) -> int:
    return sum(frozen.bytes_of(name, wish.dtype) for name in frozen.names() if inside(name, part))


def _refuse_overfull(sizes: Sequence[int], rest: int, where: Sequence[Seat], chosen: Sequence[int], name: str) -> None:
    used = [rest if seat == 0 else 0 for seat in range(len(where))]
    for size, seat in zip(sizes, chosen, strict=True):
        used[seat] += size
    for size, seat in zip(used, where, strict=True):
        if size > seat.room:
            raise TeacherError(
                f"placement={name!r} would put {format_bytes(size)} of the teacher on {seat.device}, where "
                f"{format_bytes(seat.room)} are free for it: use placement='sharded' or 'offload', a smaller dtype=, or "
                "more GPUs"
            )


def _told(frozen: FrozenModel, wish: TeacherOptions, mapped: Mapping[str, object]) -> str:
    held: dict[str, int] = {}
    for name in frozen.names():
        device = str(mapped[_covering(name, mapped)])
        held[device] = held.get(device, 0) + frozen.bytes_of(name, wish.dtype)
    return ", ".join(f"{format_bytes(size)} on {device}" for device, size in held.items()) + " for each rank"
