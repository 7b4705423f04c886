"""Gradients of a Trainer that DDP does not handle: unused and unfrozen parameters, and manual optimization.

DDP waits for the gradient of every parameter, and an optimizer skips a parameter without one. With Lightning's
`ddp_find_unused_parameters_true` a parameter is skipped only if no rank used it, which depends on the number of ranks.
With `unused_parameters="zero"` samestep runs a backward pass with zeros for the parameters that this rank did not use:
DDP gets the gradients that it waits for, no graph is searched, and the optimizer does the same on any number of ranks.

DDP also expects that every backward pass reaches every parameter once. A module with manual optimization and several
optimizers has several backward passes, each for a part of its parameters. So DDP's own synchronization is off, and
samestep averages what a backward pass has changed, in one collective: an average of what was averaged before does not
change it.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from samestep.errors import StepError, WrapError

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
    if unfrozen:
        _average(unfrozen)


class ManualGradients:
    """Averages the gradients of a module that calls its optimizers itself."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._ddp = trainer.model if isinstance(trainer.model, DistributedDataParallel) else None
        self._watch = GradientWatch(module)
        self._no_sync = ExitStack()

    def on_batch_start(self) -> None:
        """Turn off DDP's own synchronization of gradients; it still broadcasts buffers."""
        self._watch.update()
        self._watch.used.clear()
        if self._ddp is not None:
            self._no_sync.enter_context(self._ddp.no_sync())
            self._ddp.require_forward_param_sync = True  # Lightning's backward without synchronization turns it off

    def on_batch_end(self) -> None:
        """Restore DDP."""
        self._no_sync.close()

    def remove(self) -> None:
        """Remove all hooks and restore DDP."""
        self._watch.remove()
        self._no_sync.close()

    def average(self) -> None:
        """Average what the last backward pass has changed; all ranks must call it."""
        changed = set(self._watch.used)
        self._watch.used.clear()
        if self._ddp is None:
            return
        # self.toggle_optimizer excludes the parameters of other optimizers here.
        trained = {name: each for name, each in self._watch.parameters.items() if each.requires_grad}
        for dtype in dict.fromkeys(parameter.dtype for parameter in trained.values()):
            names = [name for name, parameter in trained.items() if parameter.dtype == dtype]
            _average([trained[name] for name in names], [name in changed for name in names])

    def check(self, optimizer: Optimizer) -> None:
        """Raise `StepError` if an optimizer would step with gradients of this rank only."""
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        names = [name for name, each in self._watch.parameters.items() if each in stepped and name in self._watch.used]
        if names:
            raise StepError(
                f"the optimizer of {len(names)} parameter(s), {names[0]} first, steps with a gradient from a backward "
                "pass that samestep did not see, so the step would not be the mean over the global batch: call "
                "self.manual_backward(loss) instead of loss.backward()"
            )


def _average(parameters: Sequence[nn.Parameter], changed: Sequence[bool] | None = None) -> None:
    """Average the gradients over the ranks; all of them, or those that the backward pass of any rank has `changed`."""
    # Zeros if this rank did not use a parameter, since another rank may have.
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    flags = [] if changed is None else [gradients[0].new_tensor(changed)]
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), *flags])
    dist.all_reduce(flat)
    # Reading the flags waits for the device, so there are none if all gradients are averaged.
    counts = [1.0] * len(parameters) if changed is None else flat[-len(changed) :].tolist()
    flat /= dist.get_world_size()
    offset = 0
    for parameter, gradient, count in zip(parameters, gradients, counts, strict=True):
        if count:
            mean = flat[offset : offset + gradient.numel()]
            parameter.grad = gradient.copy_(mean.view_as(gradient))
        offset += gradient.numel()
