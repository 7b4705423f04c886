"""FSDP2: weights, gradients and optimizer state sharded over the ranks, block by block."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from samestep.distributed.communicator import Communicator
from samestep.errors import WrapError
from samestep.parallel.materialize import ModelWeights, children_first
from samestep.parallel.submodules import frozen_parts, repeated_blocks
from samestep.torch_private import is_dtensor, reduce_unused_as_zeros, replace_tensors

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shard_model(
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    weights: ModelWeights,
    *,
    dtype: torch.dtype | None,
    blocks: Sequence[type[nn.Module]] = (),
    hybrid: bool = False,
    cpu_offload: bool = False,
    keep_unsharded: bool = False,
    compile: bool = False,
) -> Callable[[nn.Module], object]:
    """Shard `model` in place, with values from `weights`, block by block: a device holds its shards and one block.

    Returns a function that shards a copy of the model, without weights, in the same way.

    `dtype` is that of forward and backward passes and of outputs; gradients are reduced in fp32. `hybrid` shards inside
    a node and replicates between nodes. `keep_unsharded` keeps gathered weights from the forward to the backward pass.
    `compile` compiles block by block, so that gathering stays outside of compiled code.
    """
    # not above: runs without FSDP import samestep, too, and this takes most of a second
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    check_dimensions(model)
    mesh = _hybrid_mesh(comm, device) if hybrid else mesh_of_ranks(comm, device)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    sharded_blocks = find_blocks(model, blocks)
    for block in sharded_blocks if compile else ():
        block.compile()
    names = list(_own_blocks(model, sharded_blocks))  # those of the copy would follow from its tied weights

    def shard(root: nn.Module, name: str, frozen: Sequence[nn.Module]) -> "FSDPModule":
        return fully_shard(
            root.get_submodule(name),
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=False if keep_unsharded and name else None,
            offload_policy=offload,
            ignored_params={parameter for each in frozen for parameter in each.parameters()},
        )

    def shard_all(root: nn.Module, before: Callable[[str, nn.Module], object] | None) -> "FSDPModule":
        frozen = list(frozen_parts(root).values())
        sharded = dict[str, FSDPModule]()
        for name in (*names, ""):
            if before is not None:
                before(name, root.get_submodule(name))
            sharded[name] = shard(root, name, frozen)
        return sharded[""]

    # with weights in files each rank reads its part of them afterwards
    reduce_unused_as_zeros(shard_all(model, weights.place if weights.read is None else None))
    if weights.read is not None:
        weights.load_shards(cpu_offload)
    return lambda copied: shard_all(copied, None)


def fill_copy(copied: nn.Module, model: nn.Module) -> None:
    """Give a copy that was sharded on the meta device the values of the model: each rank copies its own part."""
    sources = dict(model.named_parameters())
    missing = [name for name, parameter in copied.named_parameters() if parameter.is_meta]
    device = sources[missing[0]].device  # that of all sharded parameters: a GPU, or the CPU with cpu_offload

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    replace_tensors(copied, allocate)
    filled = dict(copied.named_parameters())
    with torch.no_grad():
        for name in missing:
            filled[name].copy_(sources[name])


def check_dimensions(model: nn.Module) -> None:
    """Raise if a parameter has no dimension along which it could be sharded."""
    ignored = {p for part in frozen_parts(model).values() for p in part.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 and parameter not in ignored:
            raise WrapError(
                f"parameter {name!r} is a scalar, and FSDP shards every parameter along its first dimension: give it "
                "the shape (1,), as in nn.Parameter(torch.ones(1)), or use strategy='ddp'"
            )


def find_blocks(model: nn.Module, classes: Sequence[type[nn.Module]]) -> list[nn.Module]:
    """The modules that FSDP gathers separately, inner before outer.

    Those of `classes`, or the members of the outermost ModuleLists and Sequentials with at least two members.
    """
    if classes:
        found = [module for module in model.modules() if isinstance(module, tuple(classes)) and module is not model]
        if not found:
            names = ", ".join(sorted(kind.__name__ for kind in classes))
            raise WrapError(
                f"{type(model).__name__} has no submodule of class {names}: pass the classes that repeat in it as "
                "blocks="
            )
        return found[::-1]
    return list(repeated_blocks(model).values())


def _own_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The blocks that are gathered separately, by name, inner before outer and otherwise in the model's order."""
    uses, chosen = _parameter_uses(model), set(map(id, blocks))
    names = {id(module): name for name, module in model.named_modules()}
    ordered = [module for module in children_first(model) if id(module) in chosen]
    return {names[id(block)]: block for block in ordered if _has_own_parameters(block, uses)}


def _parameter_uses(module: nn.Module) -> Counter[int]:
    """In how many submodules each parameter is, by id: tied weights are in several."""
    return Counter(id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False))


def _has_own_parameters(block: nn.Module, uses: Mapping[int, int]) -> bool:
    """Whether a block trains and no weight is tied to one outside of it: tied weights must be gathered together."""
    trains = any(parameter.requires_grad for parameter in block.parameters())
    return trains and all(uses[parameter] == here for parameter, here in _parameter_uses(block).items())


def mesh_of_ranks(comm: Communicator, device: torch.device) -> DeviceMesh:
    """All ranks in one dimension, in the group for tensors of training: with gloo the default group is the script's."""
    if comm.group is None:
        return init_device_mesh(device.type, (comm.world.size,), mesh_dim_names=("shard",))
    # torch keeps meshes across runs of a process and tells them apart by their names, so the name must be the group's
    return DeviceMesh.from_group(comm.group, device.type, mesh_dim_names=(f"shard_{comm.group.group_name}",))


def _hybrid_mesh(comm: Communicator, device: torch.device) -> DeviceMesh:
    """Nodes and the ranks of a node, in groups with the run's backend: torch would create NCCL groups for any GPU."""
    world = comm.world
    if world.nodes < 2 or world.size % world.nodes:
        raise WrapError(
            f"strategy='hybrid' shards inside a node and replicates between nodes, which {world.size} rank(s) on "
            f"{world.nodes} node(s) do not allow: use strategy='fsdp'"
        )
    ranks = torch.arange(world.size).reshape(world.nodes, -1)
    groups = [comm.new_subgroup(ranks.T.tolist()), comm.new_subgroup(ranks.tolist())]
    names = tuple(f"{name}_{group.group_name}" for name, group in zip(("replicate", "shard"), groups, strict=True))
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=names)


def full_tensor(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The full tensor of a sharded one, a collective; or the tensor itself.

    `device` is that of training if the shards may be in host memory, where not every backend gathers them.
    """
    if not is_dtensor(tensor):
        return tensor
    shards = tensor.detach() if device is None else tensor.detach().to(device)
    return shards.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor, which torch types as a Tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, the values of a sparse one, or the tensor itself."""
    if tensor.is_sparse:
        return tensor.coalesce().values()
    to_local = getattr(tensor, "to_local", None)
    return to_local() if callable(to_local) else tensor  # pyright: ignore[reportReturnType]  # DTensor's own method
