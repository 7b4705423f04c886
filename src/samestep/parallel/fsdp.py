"""FSDP2: weights, gradients and optimizer state sharded over the ranks, block by block."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from samestep.environment.world import World
from samestep.errors import WrapError
from samestep.parallel.submodules import frozen_parts, repeated_blocks
from samestep.torch_private import send_unused_as_zeros


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded."""

    hybrid: bool
    """Shard inside a node and replicate between nodes."""
    offload: bool
    """Keep what is not in use in host memory."""
    dtype: torch.dtype | None
    """What weights are computed in; gradients are reduced in fp32 all the same. None: as they are."""
    blocks: tuple[type[nn.Module], ...]
    """Classes that are sharded one by one; empty: the repeated children of the largest containers."""
    compile: bool = False
    """Compile block by block: what gathers weights stays outside of what is compiled."""
    keep: bool = False
    """Keep gathered weights from the forward to the backward pass: gathered once, but all of them held."""


def check_dimensions(model: nn.Module) -> None:
    """Raise where a parameter has no dimension along which ranks could share it."""
    left = {p for part in frozen_parts(model).values() for p in part.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 and parameter not in left:
            raise WrapError(
                f"parameter {name!r} is a number without a dimension, and FSDP cuts every parameter along its first: "
                "give it the shape (1,), as in nn.Parameter(torch.ones(1)), or use strategy='ddp'"
            )


def shard_model(model: nn.Module, world: World, device: torch.device, sharding: Sharding) -> None:
    """Shard `model` in place; the first rank's weights must already stand on every rank."""
    check_dimensions(model)
    mesh = _mesh(world, device, sharding.hybrid)
    fp32 = torch.float32 if sharding.dtype else None
    policy = MixedPrecisionPolicy(param_dtype=sharding.dtype, reduce_dtype=fp32)
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if sharding.offload else OffloadPolicy()
    ignored = {p for part in frozen_parts(model).values() for p in part.parameters()}
    blocks = find_blocks(model, sharding.blocks)
    for part in blocks if sharding.compile else ():
        part.compile()
    back, places = _give_back(sharding), _places(model)
    for block in blocks:
        if _stands_alone(block, places):
            fully_shard(
                block,
                mesh=mesh,
                reshard_after_forward=back,
                mp_policy=policy,
                offload_policy=offload,
                ignored_params=ignored,
            )
    whole = MixedPrecisionPolicy(param_dtype=sharding.dtype, reduce_dtype=fp32, output_dtype=fp32)  # losses in fp32
    send_unused_as_zeros(fully_shard(model, mesh=mesh, mp_policy=whole, offload_policy=offload, ignored_params=ignored))


def _places(module: nn.Module) -> Counter[int]:
    """In how many of its submodules each parameter stands, by id: tied weights stand in several."""
    return Counter(id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False))


def _stands_alone(block: nn.Module, places: Mapping[int, int]) -> bool:
    """Whether a block trains, and no weight of it is tied to one outside: those must be gathered together."""
    trains = any(parameter.requires_grad for parameter in block.parameters())
    return trains and all(places[parameter] == here for parameter, here in _places(block).items())


def _give_back(sharding: Sharding) -> bool | None:
    """Whether a block's weights go back to the ranks after its forward pass; None: as FSDP does by itself."""
    return False if sharding.keep else None


def find_blocks(model: nn.Module, classes: Sequence[type[nn.Module]]) -> list[nn.Module]:
    """The modules that are gathered one at a time, inner before outer, as FSDP wants them.

    Those of `classes`, or the members of the outermost ModuleLists and Sequentials that have two and more.
    """
    if classes:
        found = [module for module in model.modules() if isinstance(module, tuple(classes)) and module is not model]
        if not found:
            names = ", ".join(sorted(kind.__name__ for kind in classes))
            raise WrapError(
                f"{type(model).__name__} has no submodule of class {names}: give blocks= the classes that repeat in it"
            )
        return found[::-1]
    return list(repeated_blocks(model).values())


def _mesh(world: World, device: torch.device, hybrid: bool) -> DeviceMesh:
    if not hybrid:
        return init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    if world.nodes < 2 or world.size % world.nodes:
        raise WrapError(
            f"strategy='hybrid' shards inside a node and replicates between nodes: {world.size} rank(s) on "
            f"{world.nodes} node(s) cannot "
            "be split so; use strategy='fsdp'"
        )
    return init_device_mesh(
        device.type, (world.nodes, world.size // world.nodes), mesh_dim_names=("replicate", "shard")
    )
