"""Placement `sharded`: FSDP2 over the training ranks; each holds 1/N of the teacher and gathers layers when needed."""

from collections import Counter

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from samestep.context import RunContext
from samestep.distributed.once import run_on_every_rank
from samestep.errors import TeacherError
from samestep.messages import format_bytes
from samestep.parallel.fsdp import local_tensor, mesh_of_ranks
from samestep.parallel.materialize import copy_part
from samestep.parallel.submodules import repeated_blocks
from samestep.teacher.frozen_model import FrozenModel, set_tensor
from samestep.teacher.options import TeacherOptions


class ShardedTeacher:
    """A teacher that is sharded over all ranks. Every call is a collective, with inputs of any shape on each rank.

    The ranks first make a small exchange. It names a rank that calls the teacher more often than the others or from
    another line; without it the all-gather of the weights would hang, or match a collective of training.
    """

    lockstep = True

    def __init__(self, context: RunContext, frozen: FrozenModel, options: TeacherOptions) -> None:
        self._comm, dtype = context.comm, options.dtype
        self._module = frozen.load(context.device, dtype) if self._comm.alone else _shard(context, frozen, dtype)
        here, total = format_bytes(self.local_bytes), format_bytes(frozen.total_bytes(dtype))
        ranks = self._comm.world.size
        self.description = f"sharded: {here} of {total} on this rank of {ranks}, layers gathered when needed"

    @property
    def local_bytes(self) -> int:
        """Bytes of weights on this rank between two calls."""
        return sum(local_tensor(parameter).nbytes for parameter in self._module.parameters())

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the module's outputs for this rank's inputs."""
        self._comm.exchange("teacher(...)", [])
        with torch.no_grad():
            return self._module(*args, **kwargs)

    def close(self) -> None:
        """Free the weights."""
        self._module = nn.Identity()


def _shard(context: RunContext, frozen: FrozenModel, dtype: torch.dtype | None) -> nn.Module:
    """Shard the module and load this rank's part of each tensor from the mapped files, one tensor at a time."""
    device = context.device
    module = frozen.skeleton()
    parameters = {frozen.stored_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}

    def prepare(name: str) -> torch.Tensor:
        # Parameters stay on the meta device, in their final dtype. Buffers are small: every rank holds them in full.
        if name in parameters:
            return torch.empty(frozen.weights.shape(name), dtype=frozen.dtype(name, dtype), device="meta")
        return frozen.copy_tensor(name, device, dtype)

    frozen.fill(module, prepare)
    buffers = {name: buffer.to(device) for name, buffer in module.named_buffers(remove_duplicate=False)}
    scalars = {parameter for parameter in module.parameters() if parameter.dim() == 0}  # FSDP cannot shard them
    mesh = mesh_of_ranks(context.comm, device)
    for part in (*_untied_blocks(module), module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)

    def load() -> None:
        module.to_empty(device=device)
        for name, buffer in buffers.items():
            set_tensor(module, name, buffer)
        for name, parameter in module.named_parameters():
            copy_part(parameter, frozen.weights.tensor(frozen.stored_name(name)))
        frozen.weights.release()

    run_on_every_rank(context.comm, "loading this rank's part of the teacher", TeacherError, load)
    return module


def _untied_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated layers that can be gathered separately: those that share no weight with another module."""
    owners = Counter(id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False))
    layers = repeated_blocks(module).values()
    return [layer for layer in layers if all(owners[id(parameter)] == 1 for parameter in layer.parameters())]
