"""Wrapping a model for its ranks: the model itself on one, DistributedDataParallel on several."""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from samestep.errors import WrapError
from samestep.run.link import Link

Strategy = Literal["single", "ddp"]


class Wrapped:
    """A model and what its ranks made of it."""

    def __init__(self, inner: nn.Module, model: nn.Module) -> None:
        self.inner, self.model = inner, model

    def sync(self, last: bool) -> None:
        """Let gradients travel in the coming backward pass, or keep them here."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = last

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradients that stand on this rank."""
        for parameter in self.inner.parameters():
            if parameter.grad is not None:
                yield parameter.grad

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise where an optimizer holds parameters that are no longer the model's."""


def wrap(link: Link, model: nn.Module, device: torch.device) -> Wrapped:
    """Move `model` to the device, give every rank the first rank's weights and buffers, and join their gradients."""
    model.to(device)
    if link.alone:
        return Wrapped(model, model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WrapError(f"{type(model).__name__} has no parameter that trains: call it as it is, without run.wrap")
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    joined = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
    return Wrapped(model, joined)
