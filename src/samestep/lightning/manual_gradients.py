"""Gradients of manual optimization: averaged over the ranks after each `self.manual_backward`.

DDP expects that every backward pass reaches every parameter once. A module with several optimizers has several backward
passes, each for a part of its parameters. So DDP's own synchronization is off, and samestep averages what a backward
pass has changed, in one collective: an average of what was averaged before does not change it.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from samestep.errors import StepError
from samestep.lightning.gradients import GradientWatch


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


def _average(parameters: Sequence[nn.Parameter], changed: Sequence[bool]) -> None:
    """Average the gradients that this backward pass has changed on any rank; others keep theirs, or none."""
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    flags = gradients[0].new_tensor(changed)
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), flags])
    dist.all_reduce(flat)
    counts = flat[-len(flags) :].tolist()
    flat /= dist.get_world_size()
    means = flat[: -len(flags)].split([gradient.numel() for gradient in gradients])
    for parameter, gradient, mean, count in zip(parameters, gradients, means, counts, strict=True):
        if count:
            parameter.grad = gradient.copy_(mean.view_as(gradient))
