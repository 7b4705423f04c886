"""`run.wrap`: the model itself on one rank, DDP or FSDP2 on several, with rank 0's weights on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from samestep.data.sample_rng import micro_batch_keys
from samestep.distributed.communicator import Communicator
from samestep.errors import WrapError
from samestep.messages import format_bytes, format_list, warn
from samestep.parallel.batchnorm import sync_batchnorm, unsynced_batchnorm_names
from samestep.parallel.draw_rules import DRAW_RULES
from samestep.parallel.fsdp import check_dimensions, find_blocks, shard_model
from samestep.parallel.gradient_checks import PassOrder, SearchCost, UsedParameters
from samestep.parallel.materialize import ModelWeights, Read
from samestep.parallel.precision import (
    ComputePrecision,
    check_weights,
    compute_in,
    leave_casts_to_fsdp,
    use_channels_last,
)
from samestep.parallel.replica_check import check_replicas
from samestep.parallel.submodules import checkpoint_activations, frozen_names, frozen_parts, keep_frozen_in_eval
from samestep.parallel.wrapped_model import WrappedModel, refuse_direct_calls
from samestep.torch_private import dispatch_in_graphs, ignore_in_ddp, is_compiled, no_buffer_broadcast

Strategy = Literal["single", "ddp", "fsdp", "hybrid", "zero2"]
UnusedParameters = Literal["error", "allow"]
_SHARDED = ("fsdp", "hybrid", "zero2")
_SHOWN_LAZY = 6
_FP32_BYTES = 4
_LARGE_OUTPUT = 2**30  # bytes in fp32 from which an output is reported: the logits of 5,000 tokens and 50,000 classes
_SHOWN_FROZEN = 4  # a model with LoRA adapters has hundreds of frozen submodules


@dataclass(frozen=True)
class WrapOptions:
    """The options of `run.wrap`."""

    strategy: Strategy | None = None
    unused_parameters: UnusedParameters = "error"
    sync_batchnorm: bool = False
    cpu_offload: bool = False
    blocks: tuple[type[nn.Module], ...] = ()
    activation_checkpointing: tuple[type[nn.Module], ...] = ()
    channels_last: bool = False
    reason: str = "as requested"  # why this strategy


def wrap(
    comm: Communicator,
    model: nn.Module,
    device: torch.device,
    options: WrapOptions,
    precision: ComputePrecision,
    in_step: Callable[[], bool],
    report: Callable[[str], None],
    read: Read | None = None,
) -> WrappedModel:
    """Move `model` to the device with rank 0's values, or those of `read`, and average gradients over the ranks."""
    check_weights(model, precision)
    strategy, reason = choose_strategy(comm, options)
    sharded = strategy in _SHARDED
    if options.sync_batchnorm and not comm.alone:
        model = sync_batchnorm(model, device)
    parts = frozen_parts(model)
    keep_frozen_in_eval(model, parts)
    if count := checkpoint_activations(model, options.activation_checkpointing):
        report(f"activation checkpointing: {count} module(s) recompute their activations, to save memory")
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    weights = ModelWeights(comm, model, device, parts, find_blocks(model, options.blocks) if on_meta else (), read)
    if not sharded:
        weights.place_all()
        check_replicas(comm, dict((*model.named_parameters(), *model.named_buffers())), "at the start")
    if strategy == "single":
        _report_unneeded_strategy(model, options, report)
    else:
        report(f"strategy: {strategy} ({reason}){_format_frozen(parts)}")
        _warn_of_unsynced_batchnorm(comm, model)
    core: nn.Module = torch.compile(model) if precision.compile and not sharded else model  # pyright: ignore[reportAssignmentType]  # a module compiles to a module
    _add_forward_hooks(model, core, device, options, precision, autocast=not sharded or bool(parts))
    if precision.compile:
        report_large_outputs(core, report, whole=not sharded)
    shard_copy = None
    if sharded:
        shard_copy = shard_model(
            model,
            comm,
            device,
            weights,
            dtype=precision.dtype,
            blocks=options.blocks,
            hybrid=strategy == "hybrid",
            cpu_offload=options.cpu_offload,
            keep_unsharded=strategy == "zero2",
            compile=precision.compile,
        )
        check_replicas(comm, dict((*model.named_parameters(), *model.named_buffers())), "at the start")
    trained = core
    if strategy == "ddp":
        trained = _ddp(comm, core, device, options, frozen_names(core, parts))
        refuse_direct_calls(core, trained, in_step)
        if options.unused_parameters == "allow":
            SearchCost(trained, core, report)
    used = UsedParameters(model) if options.unused_parameters == "error" else None
    passes = PassOrder(model, comm) if sharded else None
    return WrappedModel(model, core, trained, strategy, used, passes, shard_copy)


def choose_strategy(comm: Communicator, options: WrapOptions) -> tuple[Strategy, str]:
    """The strategy and the reason; a plan has already set the strategy in the options."""
    if comm.alone:
        return "single", "one rank"
    if options.strategy == "single":
        raise WrapError(
            f"strategy='single' needs one rank, got {comm.world.size}: use 'ddp', 'fsdp' or 'hybrid', or omit it"
        )
    if options.strategy is not None:
        return options.strategy, options.reason
    return "ddp", "each rank holds the full model"


def check_options(options: WrapOptions, model: nn.Module) -> None:
    """Raise if an option is unknown, or two options exclude each other."""
    for name, value, known in (
        ("strategy", options.strategy, (None, *get_args(Strategy))),
        ("unused_parameters", options.unused_parameters, get_args(UnusedParameters)),
    ):
        if value not in known:
            choices = ", ".join(repr(choice) for choice in known if choice is not None)
            raise WrapError(f"run.wrap: {name}={value!r} is not valid; use one of {choices}")
    for name in ("blocks", "activation_checkpointing"):
        classes = getattr(options, name)
        if not isinstance(classes, tuple | list):
            got = getattr(classes, "__name__", repr(classes))
            raise WrapError(
                f"{name}={got} must be a tuple of classes: pass {name}=(Block,), with a comma for one class"
            )
    if options.cpu_offload and options.strategy not in _SHARDED:
        raise WrapError(
            "cpu_offload=True moves sharded weights to host memory: use it with strategy='fsdp', 'zero2' or 'hybrid'"
        )
    if options.channels_last and options.strategy in _SHARDED:
        raise WrapError("channels_last=True does not work with FSDP, which shards weights: use strategy='ddp'")
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise WrapError(
            f"{type(model).__name__} has uninitialized parameters: {format_list(lazy, _SHOWN_LAZY)}, whose shapes "
            "follow from the first batch; call the model with one batch before run.wrap, on every rank"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise WrapError(f"{type(model).__name__} has no trainable parameter: call it without run.wrap")


def _report_unneeded_strategy(model: nn.Module, options: WrapOptions, report: Callable[[str], None]) -> None:
    """On one rank a strategy has no effect; its options are checked all the same, so that errors show on a laptop."""
    if options.strategy in (None, "single"):
        return
    find_blocks(model, options.blocks)
    if options.strategy in _SHARDED:
        check_dimensions(model)
    report(f"strategy: single ({options.strategy!r} has no effect on one rank)")


def _add_forward_hooks(
    model: nn.Module,
    core: nn.Module,
    device: torch.device,
    options: WrapOptions,
    precision: ComputePrecision,
    autocast: bool,
) -> None:
    """Register hooks on `core`, outside of compiled code; FSDP casts inputs and weights by itself, not frozen parts."""
    if precision.dtype is not None and autocast:
        compute_in(core, device, precision.dtype)
    elif precision.dtype is not None:
        leave_casts_to_fsdp(core, device)
    if precision.compile or any(map(is_compiled, model.modules())):
        dispatch_in_graphs(DRAW_RULES)
        # compiled code needs keys that exist, not a function that makes them
        core.register_forward_pre_hook(_make_keys)
    if options.channels_last:
        use_channels_last(model, core)


def report_large_outputs(model: nn.Module, report: Callable[[str], None], whole: bool) -> None:
    """Report once, in the first training pass, if a compiled model returns a tensor that its loss should not need.

    `whole`: `forward` is compiled as a whole, not block by block.
    """

    def look(_module: nn.Module, _inputs: object, output: object) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        largest = max(tensors, key=torch.Tensor.numel, default=None)
        if largest is None or largest.numel() * _FP32_BYTES < _LARGE_OUTPUT:
            return
        other = ", or any other loss, which is then compiled, too" if whole else ""
        report(
            f"the compiled model returns a tensor of shape {tuple(largest.shape)}; a loss that is computed outside of "
            f"it holds {format_bytes(largest.numel() * _FP32_BYTES)} for each fp32 copy of it. To save memory and "
            f"time, compute the loss in forward: samestep.nn.linear_cross_entropy for a language model{other}. Or "
            "compile the function that computes the loss with torch.compile"
        )

    handle = model.register_forward_hook(look)


def _make_keys(*_: object) -> None:
    micro_batch_keys()


def _ddp(
    comm: Communicator, model: nn.Module, device: torch.device, options: WrapOptions, frozen: list[str]
) -> DistributedDataParallel:
    ignore_in_ddp(model, frozen)
    _copy_sparse_gradients(model)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=comm.group,
        init_sync=False,  # ModelWeights has done it, buffers included
        find_unused_parameters=options.unused_parameters == "allow",
        gradient_as_bucket_view=True,
        **no_buffer_broadcast(),  # pyright: ignore[reportArgumentType]  # one option, by the name this torch has
    )
    # Its reducer keeps the group above. torch copies a wrapped model, as for a moving average, only if this attribute
    # is the default group.
    wrapped.process_group = dist.group.WORLD
    return wrapped


def _copy_sparse_gradients(model: nn.Module) -> None:
    """Copy the values of sparse gradients, since DDP divides them in place.

    In torch they share memory with the gradient of the output, which earlier layers may still need.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            module.weight.register_hook(torch.Tensor.clone)


def _format_frozen(parts: dict[str, nn.Module]) -> str:
    if not parts:
        return ""
    count = sum(p.numel() for part in parts.values() for p in part.parameters())
    number = f"{len(parts)} submodules: " if len(parts) > _SHOWN_FROZEN else ""
    return f"; frozen and excluded: {number}{format_list(list(parts), _SHOWN_FROZEN)} ({count:,} parameters)"


def _warn_of_unsynced_batchnorm(comm: Communicator, model: nn.Module) -> None:
    names = unsynced_batchnorm_names(model)
    if names and comm.world.is_main:
        warn(
            f"{len(names)} BatchNorm layer(s), {names[0]!r} first, see only the rows of their own rank, so results "
            "depend on the number of ranks: pass run.wrap(model, sync_batchnorm=True) or use GroupNorm; samestep "
            "averages the running statistics over the ranks before evaluation and checkpoints"
        )
