"""Find the blocks and frozen parts of a model, and measure their size and work."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from samestep.errors import PlanError
from samestep.parallel.fsdp import find_blocks
from samestep.planner.model_profile import ModelPart, ModelProfile, PeakMemory
from samestep.planner.step_recorder import OpCounter


def resolve_classes(model: nn.Module, classes: Sequence[type[nn.Module] | str]) -> tuple[type[nn.Module], ...]:
    """Classes of submodules; names are looked up in the model."""
    known = {type(module).__name__: type(module) for module in model.modules() if module is not model}
    for name in classes:
        if isinstance(name, str) and name not in known:
            raise PlanError(
                f"{type(model).__name__} has no submodule of class {name}. Name a class that repeats in the model; it "
                f"has {', '.join(sorted(known)) or 'none'}."
            )
    return tuple(known[kind] if isinstance(kind, str) else kind for kind in classes)


def named_blocks(model: nn.Module, classes: Sequence[type[nn.Module]]) -> dict[str, nn.Module]:
    """The blocks that FSDP gathers separately, by name, in the order of the model."""
    found = {id(block) for block in find_blocks(model, classes)}
    return {name: module for name, module in model.named_modules() if id(module) in found}


def checkpointable_classes(model: nn.Module, classes: Sequence[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    """Classes for activation checkpointing: those given, or the classes of repeated blocks with trainable parameters.

    A single layer is left out: it has no inner activations that could be recomputed.
    """
    if classes:
        return tuple(classes)
    blocks = [inner for block in named_blocks(model, ()).values() for inner in _unpack_sequential(block)]
    blocks = [block for block in blocks if any(True for _ in block.children())]
    trainable = Counter(type(block) for block in blocks if any(p.requires_grad for p in block.parameters()))
    return tuple(kind for kind, count in trainable.items() if count > 1)


def _unpack_sequential(block: nn.Module) -> Iterator[nn.Module]:
    """The block, or the modules of an nn.Sequential, whose class does not say what repeats."""
    if type(block) is not nn.Sequential:
        yield block
        return
    for child in block:
        yield from _unpack_sequential(child)


@contextmanager
def count_forward_flops(counter: OpCounter, modules: Iterable[nn.Module]) -> Generator[Mapping[nn.Module, float]]:
    """Count the FLOPs of forward passes inside, by module; a module that is not called is missing."""
    started: dict[nn.Module, float] = {}
    flops: dict[nn.Module, float] = {}

    def enter(module: nn.Module, *_: object) -> None:
        started[module] = counter.flops

    def leave(module: nn.Module, *_: object) -> None:
        flops[module] = flops.get(module, 0.0) + (counter.flops - started.pop(module))

    unique = dict.fromkeys(modules)
    hooks = [module.register_forward_pre_hook(enter) for module in unique]
    hooks += [module.register_forward_hook(leave) for module in unique]
    try:
        yield flops
    finally:
        for hook in hooks:
            hook.remove()


def describe_parts(
    modules: Mapping[str, nn.Module], flops: Mapping[nn.Module, float], samples: int
) -> tuple[ModelPart, ...]:
    """Bytes of each module, and its FLOPs per sample."""
    parts: list[ModelPart] = []
    for name, module in modules.items():
        trainable = storage_bytes(p for p in module.parameters() if p.requires_grad)
        frozen = storage_bytes(p for p in module.parameters() if not p.requires_grad)
        frozen += storage_bytes(module.buffers())
        parts.append(ModelPart(name, trainable, frozen, flops.get(module, 0.0) / samples))
    return tuple(parts)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once: views and tied weights add nothing."""
    storages = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def profile_weights(model: nn.Module) -> ModelProfile:
    """Profile without an example batch: weights, gradients and Adam's state; activations and work count as 0."""
    by_dtype: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for parameter in model.parameters():
        sizes, name = by_dtype[parameter.requires_grad], str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.numel() * parameter.element_size()
    trainable = sum(by_dtype[True].values())
    return ModelProfile(
        name=type(model).__name__,
        trainable=by_dtype[True],
        frozen=by_dtype[False],
        buffers=storage_bytes(model.buffers()),
        gradients=trainable,
        optimizer="Adam",
        optimizer_state=2 * trainable,  # Adam's two moments
        activations=PeakMemory.linear(0, 0),
        checkpointed_activations=None,
        forward_flops=0.0,
        step_flops=0.0,
        checkpointed_step_flops=0.0,
        ops=(),
        traced_samples=1,
        blocks=describe_parts(named_blocks(model, ()), {}, samples=1),
        frozen_parts=(),
        method="from the weights only: activations are not counted",
    )
