"""A teacher in parts: FSDP2 over the training ranks, each holds 1/N and gathers a layer when it is needed."""

from collections import Counter

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from samestep.distributed.once import run_on_every_rank
from samestep.environment.world import World
from samestep.messages import format_bytes
from samestep.parallel.submodules import repeated_blocks
from samestep.parallel.wrapped_model import local_tensor
from samestep.teacher.frozen_model import FrozenModel, put, target_dtype
from samestep.teacher.options import Ground, TeacherOptions


class Sharded:
    """The teacher over all ranks. Every call is one of all ranks, each for its own inputs, of any shape.

    Before a call the ranks meet in one small exchange. One that comes more often than the others, or from another line,
    is named there; without it the gathering of weights would hang, or pair with a collective of training.
    """

    lockstep = True

    def __init__(self, ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> None:
        self._ground, self._bytes = ground, frozen.bytes_in(wish.dtype)
        self._module: nn.Module | None
        if ground.link.alone:
            self._module = frozen.load(ground.device, wish.dtype)
        else:
            self._module = _shard(ground, frozen, wish.dtype)

    @property
    def local_bytes(self) -> int:
        """Bytes of weights that lie on this rank between two calls."""
        if self._module is None:
            return 0
        held = [local_tensor(parameter) for parameter in self._module.parameters()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's outputs for this rank's inputs."""
        self._ground.link.exchange("teacher(...)", [])
        assert self._module is not None, "the teacher is closed"
        with torch.no_grad():
            return self._module(*args, **kwargs)

    def describe(self) -> str:
        """One line for the log."""
        here, size = format_bytes(self.local_bytes), self._ground.link.world.size
        return f"sharded: {here} of {format_bytes(self._bytes)} on this rank of {size}, layers gathered when needed"

    def close(self) -> None:
        """Let the weights go."""
        self._module = None


def place(ground: Ground, frozen: FrozenModel, wish: TeacherOptions) -> Sharded:
    """The teacher over all ranks, each with its part."""
    return Sharded(ground, frozen, wish)


def _shard(ground: Ground, frozen: FrozenModel, wish: torch.dtype | None) -> nn.Module:
    """A module of which this rank holds its part: the parts are cut from the mapped files, one tensor at a time."""
    module = frozen.skeleton()
    parameters = {frozen.source(name) for name, _ in module.named_parameters(remove_duplicate=False)}

    def prepare(source: str) -> torch.Tensor:
        """Parameters stay without memory, in the dtype they are to have; buffers are small and whole on every rank."""
        if source in parameters:
            return torch.empty(frozen.weights.shape(source), dtype=frozen.dtype(source, wish), device="meta")
        there = frozen.weights.tensor(source)
        return there.to(ground.device, target_dtype(there.dtype, wish), copy=True)

    frozen.fill(module, prepare)
    buffers = {name: buffer.to(ground.device) for name, buffer in module.named_buffers(remove_duplicate=False)}
    whole = {parameter for parameter in module.parameters() if parameter.dim() == 0}  # nothing to cut
    mesh = init_device_mesh(ground.device.type, (ground.link.world.size,), mesh_dim_names=("teacher",))
    for part in (*_own_blocks(module), module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=whole)

    def fill() -> None:
        """Take memory for this rank's parts alone, and read them."""
        module.to_empty(device=ground.device)
        for name, buffer in buffers.items():
            put(module, name, buffer)
        for name, parameter in module.named_parameters():
            _fill(parameter, frozen.weights.tensor(frozen.source(name)), ground.link.world)
        frozen.weights.release()

    run_on_every_rank(ground.link, "loading this rank's part of the teacher", fill)
    return module


def _own_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers, each to be gathered alone; one that shares a weight with others goes with the rest."""
    owners = Counter(
        id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False)
    )  # a tied weight is met under each of its owners
    blocks = repeated_blocks(module).values()
    return [block for block in blocks if all(owners[id(parameter)] == 1 for parameter in block.parameters())]


def _fill(parameter: torch.Tensor, source: torch.Tensor, world: World) -> None:
    """Copy this rank's part of a mapped tensor: only its pages are read."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            parts = source.chunk(world.size, dim=0)
            source = parts[world.rank] if world.rank < len(parts) else source[:0]
        local_tensor(parameter).copy_(source)
