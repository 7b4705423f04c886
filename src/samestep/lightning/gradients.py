"""Parameters that a backward pass did not use, and parameters that DDP does not know.

DDP waits for the gradient of every parameter, and an optimizer skips a parameter without one. With Lightning's
`ddp_find_unused_parameters_true` a parameter is skipped only if no rank used it, which depends on the number of ranks.
With `unused_parameters="zero"` samestep runs a backward pass with zeros for the parameters that this rank did not use:
DDP gets the gradients that it waits for, no graph is searched, and the optimizer does the same on any number of ranks.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from samestep.errors import WrapError

UnusedParameters = Literal["error", "zero", "ignore"]
_SHOWN = 6


def check_strategy(model: object) -> None:
    """Raise `WrapError` if DDP itself searches for unused parameters: both would send the same gradient."""
    if isinstance(model, DistributedDataParallel) and model.find_unused_parameters:
        raise WrapError(
            "the strategy searches for unused parameters, and the result depends on the number of ranks: use "
            "strategy='ddp' with SameStep(unused_parameters='zero'), or keep the search with "
            "SameStep(unused_parameters='ignore')"
        )


class GradientWatch:
    """Records which trainable parameters got a gradient since the backward pass began."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.parameters: dict[str, nn.Parameter] = {}
        self.used: dict[str, nn.Parameter] = {}  # parameters that got a gradient; clear it when a backward pass begins
        self._hooks: list[RemovableHandle] = []
        self.update()

    def update(self) -> None:
        """Watch parameters that have become trainable."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self.parameters:
                self.parameters[name] = parameter
                # The hook runs for every parameter in every step: this one executes no line of Python.
                hook = parameter.register_post_accumulate_grad_hook(partial(self.used.__setitem__, name))
                self._hooks.append(hook)

    def unused(self) -> dict[str, nn.Parameter]:
        """Return the parameters without a gradient from this backward pass."""
        if len(self.used) == len(self.parameters):
            return {}
        return {name: p for name, p in self.parameters.items() if name not in self.used and p.requires_grad}

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()


def raise_unused(unused: dict[str, nn.Parameter], step: int, rank: int) -> None:
    """Raise `WrapError` with the names of the unused parameters."""
    names = list(unused)
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    raise WrapError(
        f"step {step} did not use {len(names)} parameter(s) on rank {rank}: {listed}. Other ranks would wait for these "
        "gradients, and whether an optimizer skips them would depend on the number of ranks. Pass "
        "SameStep(unused_parameters='zero') to give them a gradient of zero, or freeze parameters that never train "
        "(parameter.requires_grad_(False))"
    )


def average_unfrozen(known: set[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Average the gradients of parameters that were unfrozen after DDP was built, which are not in `known`.

    All ranks must call it.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
    unfrozen = [parameter for parameter in trained if parameter not in known]
    if not unfrozen:
        return
    # Zeros if this rank did not use a parameter, since another rank may have.
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in unfrozen]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    means = flat.split([gradient.numel() for gradient in gradients])
    for parameter, gradient, mean in zip(unfrozen, gradients, means, strict=True):
        parameter.grad = gradient.copy_(mean.view_as(gradient))
