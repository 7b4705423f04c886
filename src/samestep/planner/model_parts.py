"""What a model needs as far as its weights tell: where no example batch says more."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from samestep.errors import PlanError
from samestep.parallel.fsdp import find_blocks
from samestep.planner.model_profile import Line, ModelProfile, Part
from samestep.planner.operations import Work


def classes_in(model: nn.Module, wished: Sequence[type[nn.Module] | str]) -> tuple[type[nn.Module], ...]:
    """Classes of submodules, those that are named by their names found in the model."""
    known = {type(module).__name__: type(module) for module in model.modules() if module is not model}
    for name in wished:
        if isinstance(name, str) and name not in known:
            raise PlanError(
                f"{type(model).__name__} has no submodule of a class {name}: blocks are classes that repeat in it, and "
                f"it has {', '.join(sorted(known)) or 'none'}"
            )
    return tuple(known[kind] if isinstance(kind, str) else kind for kind in wished)


def blocks_of(model: nn.Module, classes: Sequence[type[nn.Module]]) -> dict[str, nn.Module]:
    """The blocks that are gathered one at a time when the model is sharded, by name, in the model's order."""
    found = {id(block) for block in find_blocks(model, classes)}
    return {name: module for name, module in model.named_modules() if id(module) in found}


def recomputable(model: nn.Module, classes: Sequence[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    """The classes of blocks whose activations can be computed twice: those given, or those that repeat and train.

    A single layer is no block: there is nothing inside that need not be kept.
    """
    if classes:
        return tuple(classes)
    found = [inner for block in blocks_of(model, ()).values() for inner in _inside(block)]
    blocks = [block for block in found if any(True for _ in block.children())]
    training = Counter(type(block) for block in blocks if any(p.requires_grad for p in block.parameters()))
    return tuple(kind for kind, count in training.items() if count > 1)


def _inside(block: nn.Module) -> Iterator[nn.Module]:
    """A block, or those in it where it is a bare sequence: its class says nothing about what repeats."""
    if type(block) is not nn.Sequential:
        yield block
        return
    for child in block:
        yield from _inside(child)


class ForwardWork:
    """Notes how much of the work falls into each of several modules."""

    def __init__(self, work: Work, modules: Iterable[nn.Module]) -> None:
        self._work, self._modules = work, list({id(module): module for module in modules}.values())
        self._flops: dict[int, float] = {}

    @contextmanager
    def watching(self) -> Generator[None]:
        """Look at forward passes inside."""
        began: dict[int, float] = {}

        def enter(module: nn.Module, *_: object) -> None:
            """Work so far."""
            began[id(module)] = self._work.flops

        def leave(module: nn.Module, *_: object) -> None:
            """Work since."""
            more = self._work.flops - began.pop(id(module))
            self._flops[id(module)] = self._flops.get(id(module), 0.0) + more

        hooks = [m.register_forward_pre_hook(enter) for m in self._modules]
        hooks += [m.register_forward_hook(leave) for m in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def of(self, module: nn.Module) -> float:
        """Floating-point operations of its forward passes; 0 where it was never called by itself."""
        return self._flops.get(id(module), 0.0)


def describe(parts: dict[str, nn.Module], work: ForwardWork, samples: int) -> tuple[Part, ...]:
    """Bytes and work of each part."""
    return tuple(_describe(name, part, work.of(part) / samples) for name, part in parts.items())


def _describe(name: str, part: nn.Module, flops: float) -> Part:
    trainable = nbytes(p for p in part.parameters() if p.requires_grad)
    still = nbytes(p for p in part.parameters() if not p.requires_grad)
    return Part(name, trainable, still + nbytes(part.buffers()), flops)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each once: views and tied weights cost nothing more."""
    storages = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


_MOMENTS = 2  # of Adam, the optimizer that most models are trained with


def profile_weights(model: nn.Module) -> ModelProfile:
    """Weights, gradients and two moments of Adam; activations and work are not known and count as nothing."""
    by_dtype: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for parameter in model.parameters():
        held, name = by_dtype[parameter.requires_grad], str(parameter.dtype).removeprefix("torch.")
        held[name] = held.get(name, 0) + parameter.numel() * parameter.element_size()
    trains = sum(by_dtype[True].values())
    nothing, blocks = Line(0, 0), blocks_of(model, ())
    return ModelProfile(
        name=type(model).__name__,
        trainable=by_dtype[True],
        frozen=by_dtype[False],
        buffers=nbytes(model.buffers()),
        gradients=trains,
        optimizer="Adam",
        optimizer_state=_MOMENTS * trains,
        working=nothing,
        working_recomputed=None,
        forward_flops=0.0,
        step_flops=0.0,
        step_flops_recomputed=0.0,
        ops=(),
        traced_batch=1,
        blocks=describe(blocks, ForwardWork(Work(), ()), samples=1),
        frozen_parts=(),
        how="by its weights alone: activations are not counted",
    )
