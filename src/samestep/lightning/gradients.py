"""Parameters that a backward pass left out: named, or given a zero gradient on any number of ranks.

DDP waits for the gradient of every parameter, and an optimizer skips one that has none. With Lightning's
`ddp_find_unused_parameters_true` a parameter is skipped where no rank used it, which depends on the number of ranks.
Here a parameter that was left out on this rank is sent through a backward pass of its own with a gradient of zeros: DDP
has what it waits for, no graph is searched, and the optimizer treats it alike on one rank and on many.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from samestep.errors import WrapError


class Late:
    """Knows which parameters DDP has, and looks after those that it has not."""

    def __init__(self, module: LightningModule) -> None:
        self._known = {parameter for parameter in module.parameters() if parameter.requires_grad}

    def average(self, optimizers: Sequence[Optimizer]) -> None:
        """Give every rank the mean of the gradients that DDP leaves alone; all ranks must call it."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        if late := [parameter for parameter in trained if parameter not in self._known]:
            _average([_gradient(parameter) for parameter in late])


def _gradient(parameter: Tensor) -> Tensor:
    """Its gradient; zeros where it was not used on this rank, since it may have been on another."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _average(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


Unused = Literal["error", "auto", "leave"]
_SHOWN = 6


def check_wish(unused: str) -> None:
    """Refuse a wish that is not known."""
    if unused not in get_args(Unused):
        raise WrapError(
            f"SameStep does not know unused={unused!r}: use one of {', '.join(map(repr, get_args(Unused)))}"
        )


def check_search(model: object) -> None:
    """Refuse a DDP that searches for unused parameters by itself: both would send the same gradient."""
    if isinstance(model, DistributedDataParallel) and model.find_unused_parameters:
        raise WrapError(
            "the strategy searches for unused parameters, and what it finds depends on the number of ranks: use "
            "strategy='ddp' with SameStep(unused='auto'), or keep the search with SameStep(unused='leave')"
        )


class Gradients:
    """Which trainable parameters have received a gradient since the backward pass began."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._parameters: dict[str, nn.Parameter] = {}
        self._seen: dict[str, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []
        self.watch()

    def watch(self) -> None:
        """Watch what trains now and is not watched yet."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self._parameters:
                self._parameters[name] = parameter
                # called for every parameter at every step: this one runs no line of Python
                hook = parameter.register_post_accumulate_grad_hook(partial(self._seen.__setitem__, name))
                self._hooks.append(hook)

    def begin(self) -> None:
        """A backward pass begins."""
        self._seen.clear()

    def missing(self) -> dict[str, nn.Parameter]:
        """The parameters that it left out."""
        if len(self._seen) == len(self._parameters):
            return {}
        return {name: p for name, p in self._parameters.items() if name not in self._seen and p.requires_grad}

    def remove(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()


def fill(missing: dict[str, nn.Parameter]) -> None:
    """Send zeros through the gradients of these parameters, as a backward pass that reached them would."""
    parameters = list(missing.values())
    torch.autograd.backward(parameters, [torch.zeros_like(parameter) for parameter in parameters])


def refuse(missing: dict[str, nn.Parameter], number: int, rank: int) -> None:
    """Say what was left out, where, and what can be done."""
    names = list(missing)
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    raise WrapError(
        f"step {number} did not use {len(names)} parameter(s) on rank {rank}: {shown}. Other ranks would wait for "
        "these gradients, and whether an optimizer skips them would depend on the number of ranks. Pass "
        "SameStep(unused='auto') to give them a gradient of zero, or freeze what never trains "
        "(parameter.requires_grad_(False))"
    )
