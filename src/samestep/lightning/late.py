"""Parameters that begin to train after DDP was made, as fine-tuning callbacks unfreeze them: DDP leaves them alone.

DDP averages the gradients of what trained when it was made, and says nothing of the others: each rank would step by
its own gradient, and the ranks would part. Here those gradients are averaged after each backward pass: before fp16's
scaler looks at them, and as often as one likes, since the mean of what is a mean already changes nothing.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer


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
