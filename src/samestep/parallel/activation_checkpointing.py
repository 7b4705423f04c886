"""Activation checkpointing by module class: activations are recomputed in the backward pass instead of kept."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from samestep.errors import WrapError
from samestep.messages import format_list

_SHOWN = 12


def checkpoint_activations(model: nn.Module, classes: Sequence[type[nn.Module]]) -> int:
    """Recompute the activations of every outermost module of `classes` in the backward pass; returns their number.

    Results do not change: torch restores its generators for the second pass, and the keys of samples are still set.
    The modules keep their class, hooks and parameter names: only their `forward` is called differently.
    """
    if not classes:
        return 0
    blocks = _outermost(model, tuple(classes))
    if not blocks:
        requested = ", ".join(kind.__name__ for kind in classes)
        known = sorted({type(module).__name__ for module in model.modules() if module is not model})
        shown = format_list(known, _SHOWN)
        raise WrapError(
            f"activation_checkpointing=({requested},) matches no module of {type(model).__name__}: its submodules are "
            f"of class {shown or 'none'}"
        )
    for block in blocks:
        # not a closure: a copy of the model, such as its moving average, must use its own weights
        block.forward = partial(_recompute, block.forward)
    return len(blocks)


def _outermost(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Modules of `classes` that are not inside another one, which would be computed four times."""
    found: dict[int, nn.Module] = {}
    for child in module.children():
        for block in [child] if isinstance(child, classes) else _outermost(child, classes):
            found[id(block)] = block
    return list(found.values())


def _recompute(forward: Callable[..., object], /, *inputs: object, **kwargs: object) -> object:
    if not torch.is_grad_enabled():
        return forward(*inputs, **kwargs)
    # keyword arguments are bound, since some of their names are options of `checkpoint`
    return checkpoint(partial(forward, **kwargs) if kwargs else forward, *inputs, use_reentrant=False)
