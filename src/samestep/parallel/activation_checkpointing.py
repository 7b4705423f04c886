"""Gradient checkpointing by module class: activations computed a second time instead of kept."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from samestep.errors import WrapError

_SHOWN = 12


def checkpoint_activations(model: nn.Module, classes: Sequence[type[nn.Module]]) -> int:
    """Let every outermost module of `classes` forget its activations and compute them again in the backward pass.

    The numbers stay the same: torch's generators are brought back for the second time, and keys of samples still
    stand. The modules keep their class, their hooks and the names of their parameters: only their `forward` is called
    differently. Returns how many there are.
    """
    if not classes:
        return 0
    blocks = _outermost(model, tuple(classes))
    if not blocks:
        wished = ", ".join(kind.__name__ for kind in classes)
        known = sorted({type(module).__name__ for module in model.modules() if module is not model})
        shown = ", ".join(known[:_SHOWN]) + (f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else "")
        raise WrapError(
            f"checkpoint=({wished},) names no module of {type(model).__name__}: the classes in it are {shown or 'none'}"
        )
    for block in blocks:
        # not a closure: a copy of the model, such as its moving average, must compute with its own weights
        block.forward = partial(_twice, block.forward)
    return len(blocks)


def _outermost(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Find modules of `classes` of which none is inside another: that one would be computed four times."""
    found: dict[int, nn.Module] = {}
    for child in module.children():
        for block in [child] if isinstance(child, classes) else _outermost(child, classes):
            found[id(block)] = block
    return list(found.values())


def _twice(forward: Callable[..., object], /, *inputs: object, **named: object) -> object:
    """Keep the inputs only, and compute the rest again in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    # named inputs are bound: some of their names are options of `checkpoint`
    return checkpoint(partial(forward, **named) if named else forward, *inputs, use_reentrant=False)
