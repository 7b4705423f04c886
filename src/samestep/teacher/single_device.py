"""Placements `gpu` and `cpu`: the whole teacher in one place."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch import nn

from samestep.distributed.communicator import Communicator
from samestep.distributed.device import MemoryShare, memory_shares
from samestep.distributed.once import run_on_every_rank
from samestep.environment.hardware import read_limits
from samestep.errors import TeacherError
from samestep.messages import format_bytes
from samestep.teacher.frozen_model import FrozenModel, settle
from samestep.teacher.options import Ground, PlacedTeacher, TeacherOptions
from samestep.teacher.transfer import carry

_ALIGNMENT: Final = 64  # what vector instructions and DMA like
_BREATH: Final = 1 << 30  # bytes of source that are converted before their mapping is given back
_COPYING: Final = "copying the teacher into shared memory"


@dataclass(frozen=True)
class Copy:
    """Tensors in host memory that all ranks of a node see."""

    get: Callable[[str], torch.Tensor]
    """Gives a tensor by its name in the files."""
    memory: torch.Tensor | None
    """All of it as bytes, where it lies in memory of its own; None where the files themselves are mapped."""
    told: str
    """Where it lies, in words."""


def map_files(frozen: FrozenModel) -> Copy:
    """The files themselves, mapped: the system keeps one copy of their pages for all processes."""
    return Copy(frozen.weights.tensor, None, "mapped from its files")


def share_memory(ground: Ground, frozen: FrozenModel, dtype: torch.dtype | None, writable: bool = False) -> Copy:
    """A copy in shared memory that the ranks of a node fill, each its part, and all map; a common act of all ranks.

    The memory has no name in any folder, so that nothing is left of it when the last process ends, however it ends.
    With `writable` it can be pinned for a GPU; without, what a rank writes by mistake stays its own.
    """
    layout, total = _lay_out(frozen, dtype)
    link, keep = ground.link, list[Callable[[], None]]()  # what the first rank of a node holds until all have mapped

    def reserve() -> str:
        """Make the memory; where others find it."""
        _check_host_memory(total)
        path, close = _make_room(total)
        keep.append(close)
        return path

    try:
        path = str(ground.once(reserve, per="node"))
        mine = _part(layout, total, *_turn(link))
        run_on_every_rank(link, _COPYING, _fill, frozen, dtype, mine, path, total)
        memory = run_on_every_rank(link, "mapping the shared teacher", _map, path, total, writable)
    finally:
        for close in keep:
            close()
    frozen.weights.release()

    def get(name: str) -> torch.Tensor:
        """A view of the shared memory."""
        return _view(memory, layout[name], frozen.weights.shape(name), frozen.dtype(name, dtype))

    return Copy(get, memory, "in shared memory")


def aligned(length: int) -> int:
    """Bytes that a tensor takes among others, so that the next begins where it should."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def host_room() -> int:
    """Bytes of host memory that can still be taken, by this machine's count and by its control group's."""
    left = read_limits().memory_left
    free = int(psutil.virtual_memory().available)
    return free if left is None else min(free, left)


def _lay_out(frozen: FrozenModel, dtype: torch.dtype | None) -> tuple[dict[str, int], int]:
    at, starts = 0, dict[str, int]()
    for name in frozen.names():
        starts[name] = at
        at += aligned(frozen.bytes_of(name, dtype))
    return starts, max(at, 1)


def _turn(link: Communicator) -> tuple[int, int]:
    """Which this rank is of how many on its node; a common act of all ranks.

    Its local rank would not do: that is 0 on each of them where every rank is given a GPU of its own by hand.
    """
    nodes = [int(part[0]) for part in link.exchange(_COPYING, [float(link.world.node)])]
    return nodes[: link.world.rank].count(link.world.node), nodes.count(link.world.node)


def _part(layout: dict[str, int], total: int, rank: int, ranks: int) -> dict[str, int]:
    """The tensors that one of so many ranks copies: those that begin in its stretch of the memory.

    >>> [_part({"a": 0, "b": 64, "c": 128}, 192, rank, 2) for rank in (0, 1)]
    [{'a': 0, 'b': 64}, {'c': 128}]
    """
    return {name: start for name, start in layout.items() if start * ranks // total == rank}


def _check_host_memory(total: int) -> None:
    room = host_room()
    if total > room:
        raise TeacherError(
            f"the teacher takes {format_bytes(total)} in the memory of each node and {format_bytes(room)} are free: use "
            "placement='disk' or 'sharded', a smaller dtype=, or a node with more memory"
        )


def _make_room(total: int) -> tuple[str, Callable[[], None]]:
    """Memory under a path that the other ranks of this node can open, and what takes the path away again."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("samestep-teacher")
        try:
            os.posix_fallocate(number, 0, total)  # all of it now: a page that is missing later would kill the process
        except BaseException:
            os.close(number)
            raise
        return f"/proc/{os.getpid()}/fd/{number}", lambda: os.close(number)
    number, path = tempfile.mkstemp(prefix="samestep-teacher-")
    os.truncate(number, total)
    os.close(number)
    return path, lambda: Path(path).unlink()


def _fill(frozen: FrozenModel, dtype: torch.dtype | None, layout: dict[str, int], path: str, total: int) -> None:
    memory, since = _map(path, total, True), 0
    for name, start in layout.items():
        source = frozen.weights.tensor(name)
        _view(memory, start, tuple(source.shape), frozen.dtype(name, dtype)).copy_(source)
        since += source.nbytes
        del source
        if since > _BREATH:
            frozen.weights.release()
            since = 0


def _map(path: str, total: int, writable: bool) -> torch.Tensor:
    storage = torch.UntypedStorage.from_file(path, writable, total)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (total,))  # pyright: ignore[reportCallIssue, reportArgumentType]  # the stub knows no storage


def _view(memory: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    length = torch.Size(shape).numel() * dtype.itemsize
    return memory[start : start + length].view(dtype).view(shape)


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


def place_on_device(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> PlacedTeacher:
    """A full copy on each rank's device."""
    size, act = frozen.bytes_in(wish.dtype), "loading the teacher"
    share = memory_shares(ground.link, act, ground.device, float(device_room(ground.device)))[ground.link.world.rank]

    def load() -> nn.Module:
        """A copy, where there is room for it."""
        _check_device_memory(ground.device, size, share)
        module = frozen.load(ground.device, wish.dtype)
        frozen.weights.release()
        return module

    module = run_on_every_rank(ground.link, act, load)
    return Whole(ground, module, ground.device, f"gpu: a copy of {format_bytes(size)} on {ground.device} for each rank")


def place_in_host_memory(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> PlacedTeacher:
    """One copy a node in host memory, computing on the CPU."""
    copy = share_memory(ground, frozen, wish.dtype) if frozen.converts(wish.dtype) else map_files(frozen)

    def load() -> nn.Module:
        """A module whose weights are views of the one copy."""
        module = frozen.skeleton()
        frozen.fill(module, copy.get)
        settle(module, lambda name: _CPU)
        return module

    module = run_on_every_rank(ground.link, "placing the teacher", load)
    size = format_bytes(frozen.bytes_in(wish.dtype))
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


def _check_device_memory(device: torch.device, size: int, share: MemoryShare) -> None:
    if size > share.free:
        raise TeacherError(
            f"placement='gpu' needs {format_bytes(size)} on {device} for each of {share.ranks} rank(s) there and "
            f"{format_bytes(share.free * share.ranks)} are free: use placement='sharded' or 'offload' (on the CPU "
            "'cpu'), or a smaller dtype="
        )
