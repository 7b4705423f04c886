"""Placements `gpu` and `cpu`: the whole teacher in one place."""

from typing import Any

import torch
from torch import nn

from samestep.errors import TeacherError
from samestep.ranks.sharing import Share, shares
from samestep.teacher.carry import carry
from samestep.teacher.frozen import Frozen, settle
from samestep.teacher.ground import Ground, Placed, Wish
from samestep.teacher.shared import host_room, map_files, share_memory
from samestep.teacher.together import together
from samestep.units import bytes_text

_CPU = torch.device("cpu")


class Whole:
    """A module that computes where it lies; inputs are brought to it and outputs back, gradients the other way."""

    def __init__(self, ground: Ground, module: nn.Module, device: torch.device, told: str) -> None:
        self.module, self._home, self._told = module, ground.device, told
        if any(tensor.device != self._home for tensor in (*module.parameters(), *module.buffers())):
            _bring(module, device, self._home)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's outputs, on this rank's device."""
        return carry(self.module(*args, **kwargs), self._home)

    def describe(self) -> str:
        """Where the weights lie."""
        return self._told

    def close(self) -> None:
        """Let go of the weights."""
        self.module = nn.Identity()


def place_on_device(ground: Ground, frozen: Frozen, wish: Wish) -> Placed:
    """A full copy on each rank's device."""
    size, act = frozen.bytes_in(wish.dtype), "loading the teacher"
    share = shares(ground.link, act, ground.device, float(device_room(ground.device)))[ground.link.world.rank]

    def load() -> nn.Module:
        """A copy, where there is room for it."""
        _refuse_too_large(ground.device, size, share)
        module = frozen.load(ground.device, wish.dtype)
        frozen.weights.release()
        return module

    module = together(ground.link, act, load)
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


def _bring(module: nn.Module, device: torch.device, home: torch.device) -> None:
    """Let every call of a module find its inputs on `device`, and leave its outputs at home."""

    def there(_: nn.Module, args: Any, kwargs: Any) -> Any:
        """The inputs of a call, where they are needed."""
        return carry((args, kwargs), device)

    def back(_: nn.Module, args: object, outputs: Any) -> Any:
        """The outputs of a call, at home."""
        return carry(outputs, home)

    # First of all hooks: a module that is spread brings its inputs to its own first device after this.
    module.register_forward_pre_hook(there, with_kwargs=True, prepend=True)
    module.register_forward_hook(back)


def _refuse_too_large(device: torch.device, size: int, share: Share) -> None:
    if size > share.free:
        raise TeacherError(
            f"placement='gpu' needs {bytes_text(size)} on {device} for each of {share.ranks} rank(s) there and "
            f"{bytes_text(share.free * share.ranks)} are free: use placement='sharded' or 'offload' (on the CPU "
            "'cpu'), or a smaller dtype="
        )
