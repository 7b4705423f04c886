"""Wrapping a model for its ranks: itself on one, DDP or FSDP2 on several, the same start everywhere."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.data.sample_rng import micro_batch_keys
from samestep.distributed.communicator import Communicator
from samestep.errors import WrapError
from samestep.messages import warn
from samestep.parallel.activation_checkpointing import checkpoint_activations
from samestep.parallel.batchnorm import learning, over_all_ranks, unsynchronised
from samestep.parallel.fsdp import Sharding, check_dimensions, find_blocks, shard_model
from samestep.parallel.precision import ComputePrecision, check_weights, compute_in, use_channels_last
from samestep.parallel.replica_check import check_replicas
from samestep.parallel.submodules import frozen_names, frozen_parts, keep_frozen_in_eval
from samestep.parallel.unused_parameters import SearchCost, Use
from samestep.parallel.wrapped_model import WrappedModel, guard_against_bypass
from samestep.torch_private import leave_to_their_own, without_buffer_broadcast

Strategy = Literal["single", "ddp", "fsdp", "hybrid", "zero2"]
UnusedParameters = Literal["error", "allow"]
_SHARDED = ("fsdp", "hybrid", "zero2")


@dataclass(frozen=True)
class WrapOptions:
    """What the user asked for in run.wrap."""

    strategy: Strategy | None = None
    """How ranks share the work; None: chosen."""
    unused: UnusedParameters = "error"
    """What happens when a step leaves a parameter unused."""
    sync_batchnorm: bool = False
    """Let BatchNorm see the rows of all ranks."""
    offload: bool = False
    """FSDP: keep what is not in use in host memory."""
    blocks: tuple[type[nn.Module], ...] = ()
    """FSDP: the classes that are sharded one by one."""
    checkpoint: tuple[type[nn.Module], ...] = ()
    """The classes whose activations are computed twice instead of kept."""
    channels_last: bool = False
    """Store images and the weights of convolutions with their channels last."""
    why: str = "as asked"
    """Why this strategy."""


def wrap(
    link: Communicator,
    model: nn.Module,
    device: torch.device,
    wish: WrapOptions,
    numbers: ComputePrecision,
    in_step: Callable[[], bool],
    say: Callable[[str], None],
) -> WrappedModel:
    """Move `model` to the device, give every rank the first rank's weights and buffers, and join their gradients."""
    check_weights(model, numbers)
    strategy, reason = choose_strategy(link, wish)
    sharded = strategy in _SHARDED
    model = _with_common_norms(link, model, device, wish)
    parts = frozen_parts(model)
    _prepare(model, parts, None if sharded and wish.offload else device, wish, say)
    if strategy == "single":
        _tell_lone_wish(model, wish, say)
    else:
        _begin_alike(link, model, frozen_names(model, parts))
        say(f"strategy: {strategy} ({reason}){_tell_frozen(parts)}")
        _warn_of_batchnorm(link, model)
    core: nn.Module = torch.compile(model) if numbers.compile and not sharded else model  # pyright: ignore[reportAssignmentType]  # of a module, a module
    _set_up_forward(model, core, device, wish, numbers, cast=not sharded or bool(parts))
    if sharded:
        kind = Sharding(strategy == "hybrid", wish.offload, numbers.dtype, wish.blocks, numbers.compile)
        shard_model(model, link.world, device, replace(kind, keep=strategy == "zero2"))
    joined = core
    if strategy == "ddp":
        joined = _join(core, device, wish, parts)
        guard_against_bypass(core, joined, in_step)
        _time_search(joined, core, wish, say)
    use = Use(model) if wish.unused == "error" else None
    return WrappedModel(model, core, joined, strategy, use)


def _tell_lone_wish(model: nn.Module, wish: WrapOptions, say: Callable[[str], None]) -> None:
    """On one rank a strategy for several has nothing to do; what is wrong with it shows on a laptop all the same."""
    if wish.strategy in (None, "single"):
        return
    find_blocks(model, wish.blocks)
    if wish.strategy in _SHARDED:
        check_dimensions(model)
    say(f"strategy: single (on one rank {wish.strategy!r} has nothing to share)")


def choose_strategy(link: Communicator, wish: WrapOptions) -> tuple[Strategy, str]:
    """The strategy and why; what a plan decided comes as a wish."""
    if link.alone:
        return "single", "one rank"
    if wish.strategy == "single":
        raise WrapError(
            f"strategy='single' is for one rank and there are {link.world.size}: use 'ddp', 'fsdp' or 'hybrid', or "
            "leave it out"
        )
    if wish.strategy is not None:
        return wish.strategy, wish.why
    return "ddp", "each rank holds the whole model"


def _with_common_norms(link: Communicator, model: nn.Module, device: torch.device, wish: WrapOptions) -> nn.Module:
    return over_all_ranks(model, device) if wish.sync_batchnorm and not link.alone else model


def _prepare(
    model: nn.Module,
    parts: dict[str, nn.Module],
    device: torch.device | None,
    wish: WrapOptions,
    say: Callable[[str], None],
) -> None:
    """Put frozen parts to sleep, let blocks compute twice where that was asked for, and move all to the device."""
    keep_frozen_in_eval(model, parts)
    if recomputed := checkpoint_activations(model, wish.checkpoint):
        say(f"gradient checkpointing: {recomputed} module(s) compute their activations twice, for less memory")
    if device is not None:
        model.to(device)


def _set_up_forward(
    model: nn.Module, core: nn.Module, device: torch.device, wish: WrapOptions, numbers: ComputePrecision, cast: bool
) -> None:
    """Hang hooks on `core`, outside of what is compiled; FSDP casts by itself, but not what is frozen."""
    if numbers.dtype is not None and cast:
        compute_in(core, device, numbers.dtype)
    if numbers.compile:  # compiled code must find keys that stand, not a way to make them
        core.register_forward_pre_hook(_make_keys)
    if wish.channels_last:
        use_channels_last(model, core)


def _make_keys(*_: object) -> None:
    micro_batch_keys()


def _join(
    model: nn.Module, device: torch.device, wish: WrapOptions, parts: dict[str, nn.Module]
) -> DistributedDataParallel:
    leave_to_their_own(model, frozen_names(model, parts))
    _part_sparse_gradients(model)
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        init_sync=False,  # done by _begin_alike, buffers included
        find_unused_parameters=wish.unused == "allow",
        gradient_as_bucket_view=True,
        **without_buffer_broadcast(),  # pyright: ignore[reportArgumentType]  # one option, by the name this torch has
    )


def _part_sparse_gradients(model: nn.Module) -> None:
    """Give sparse gradients values of their own, since DDP divides them in place.

    Torch lets them share those of the output's gradient, from which layers further back may still have to learn.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            module.weight.register_hook(torch.Tensor.clone)


def _time_search(
    joined: DistributedDataParallel, core: nn.Module, wish: WrapOptions, say: Callable[[str], None]
) -> None:
    if wish.unused == "allow":
        SearchCost(joined, core, say)


def _begin_alike(link: Communicator, model: nn.Module, frozen: list[str]) -> None:
    """The first rank's weights and buffers on all ranks; frozen parts were loaded, not drawn, and are only checked."""
    left = set(frozen)
    named = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if n not in left}
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named.items()]
    for rank, theirs in enumerate(link.exchange_objects("comparing models", shapes)):
        if theirs != shapes:
            mine, other = next(
                ((a, b) for a, b in zip(shapes, theirs, strict=False) if a != b), (len(shapes), len(theirs))
            )
            raise WrapError(
                f"rank {link.world.rank} and rank {rank} built different models: {mine} here, {other} there; build the "
                "model from the same settings on every rank"
            )
    with torch.no_grad(), link.together("sending the first rank's weights"):
        for tensor in named.values():
            dense = tensor.detach().clone()
            if dense.stride() == tensor.stride():
                dist.broadcast(tensor, src=0)
            else:  # expanded or cut out: its elements do not lie side by side, and torch sends them as if they did
                dist.broadcast(dense, src=0)
                tensor.set_(dense)  # pyright: ignore[reportArgumentType]  # the stubs lack this overload
    check_replicas(link, dict((*model.named_parameters(), *model.named_buffers())), "at the start")


def check_options(wish: WrapOptions, model: nn.Module) -> None:
    """Raise where run.wrap was asked for what is not there, or for two things that exclude each other."""
    for name, value, known in (
        ("strategy", wish.strategy, (None, *get_args(Strategy))),
        ("unused", wish.unused, get_args(UnusedParameters)),
    ):
        if value not in known:
            choices = ", ".join(repr(choice) for choice in known if choice is not None)
            raise WrapError(f"run.wrap does not know {name}={value!r}: use one of {choices}")
    _check_classes("blocks", wish.blocks)
    _check_classes("checkpoint", wish.checkpoint)
    if wish.offload and wish.strategy not in _SHARDED:
        raise WrapError(
            "offload=True moves sharded weights to host memory: use it with strategy='fsdp', 'zero2' or 'hybrid'"
        )
    if wish.channels_last and wish.strategy in _SHARDED:
        raise WrapError("channels_last=True needs whole weights, and FSDP cuts them: use strategy='ddp', or neither")
    if not any(p.requires_grad for p in model.parameters()):
        raise WrapError(f"{type(model).__name__} has no parameter that trains: call it as it is, without run.wrap")


def _check_classes(name: str, classes: tuple[type[nn.Module], ...]) -> None:
    if not isinstance(classes, tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]  # what scripts pass is not typed
        told = getattr(classes, "__name__", repr(classes))
        raise WrapError(f"{name}={told} is no tuple of classes: pass {name}=(Block,), with a comma for one class")


def _tell_frozen(parts: dict[str, nn.Module]) -> str:
    if not parts:
        return ""
    count = sum(p.numel() for part in parts.values() for p in part.parameters())
    return f"; frozen and left out: {', '.join(parts)} ({count:,} parameters)"


def _warn_of_batchnorm(link: Communicator, model: nn.Module) -> None:
    """A number that depends on N is never silent; layers that sleep in frozen parts learn nothing from any rank."""
    awake = {id(norm) for norm in learning(model)}
    names = [name for name, norm in unsynchronised(model).items() if id(norm) in awake]
    if names and link.world.is_main:
        warn(
            f"{len(names)} BatchNorm layer(s), {names[0]!r} first, see the rows of their own rank only, so results "
            "depend on the number of ranks: run.wrap(model, sync_batchnorm=True) lets them see all rows, GroupNorm "
            "needs none; their running statistics are averaged over the ranks before evaluation and checkpoints"
        )
