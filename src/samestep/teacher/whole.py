"""Placements `gpu` and `cpu`: the whole teacher in one place."""

import torch
from torch import nn

from samestep.errors import TeacherError
from samestep.teacher.carry import carry
from samestep.teacher.frozen import Frozen, settle
from samestep.teacher.ground import Ground, Placed, Wish
from samestep.teacher.shared import host_room, map_files, share_memory
from samestep.teacher.together import together
from samestep.units import bytes_text

_CPU = torch.device("cpu")


class Whole:
    """A module that computes where it lies; inputs are brought to it and outputs back."""

    def __init__(self, ground: Ground, module: nn.Module, device: torch.device, told: str) -> None:
        self._module, self._device, self._home, self._told = module, device, ground.device, told

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's outputs, on this rank's device."""
        if self._device != self._home:
            args, kwargs = carry((args, kwargs), self._device)
        return carry(self._module(*args, **kwargs), self._home)

    def describe(self) -> str:
        """Where the weights lie."""
        return self._told

    def close(self) -> None:
        """Let go of the weights."""
        self._module = nn.Identity()


def place_on_device(ground: Ground, frozen: Frozen, wish: Wish) -> Placed:
    """A full copy on each rank's device."""
    size = frozen.bytes_in(wish.dtype)

    def load() -> nn.Module:
        """A copy, where there is room for it."""
        _refuse_too_large(ground, size)
        module = frozen.load(ground.device, wish.dtype)
        frozen.weights.release()
        return module

    module = together(ground.link, "loading the teacher", load)
    return Whole(ground, module, ground.device, f"gpu: a copy of {bytes_text(size)} on {ground.device} for each rank")


def place_in_host_memory(ground: Ground, frozen: Frozen, wish: Wish) -> Placed:
    """One copy a node in host memory, computing on the CPU."""
    copy = share_memory(ground, frozen, wish.dtype) if frozen.converts(wish.dtype) else map_files(frozen)

    def load() -> nn.Module:
        """A module whose weights are views of the one copy."""
        module = frozen.skeleton()
        frozen.fill(module, copy.get)
        settle(module, lambda name: _CPU)
        return module

    module = together(ground.link, "placing the teacher", load)
    size = bytes_text(frozen.bytes_in(wish.dtype))
    ranks = ground.link.world.local_size
    return Whole(ground, module, _CPU, f"cpu: one copy of {size} {copy.told} for {ranks} rank(s) of the node")


def device_room(device: torch.device) -> int:
    """Bytes that can still be taken on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_room()


def _refuse_too_large(ground: Ground, size: int) -> None:
    room, device, local = device_room(ground.device), ground.device, ground.link.world.local_size
    seats = torch.cuda.device_count() if device.type == "cuda" else 1
    copies = -(-local // max(1, seats))  # ranks that share this device
    if size * copies > room:
        raise TeacherError(
            f"placement='gpu' needs {bytes_text(size)} on {device} for each of {copies} rank(s) there and "
            f"{bytes_text(room)} are free: use placement='sharded' or 'offload' (on the CPU 'cpu'), or a smaller dtype="
        )
