"""SyncBatchNorm on the CPU, where torch has none: a script for GPUs that uses it can be run."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep.verify.recorder.recorder import Recorder

HANDLE = "_passing_sync_batchnorm_handle"  # of DDP, which accepts the layer on GPUs only


def use_cpu_batchnorm(recorder: Recorder) -> None:
    """Let SyncBatchNorm reduce its statistics over gloo from now on."""
    original = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = _forward(recorder, original)  # pyright: ignore[reportAttributeAccessIssue]
    setattr(DistributedDataParallel, HANDLE, lambda ddp, module: None)  # pyright: ignore[reportUnknownLambdaType]


def _forward(recorder: Recorder, original: Callable[..., Tensor]) -> Any:
    @wraps(original)
    def forward(layer: Any, input: Tensor) -> Tensor:
        is_synced = layer.training and dist.is_initialized() and dist.get_world_size(layer.process_group) > 1
        if not is_synced:
            return nn.modules.batchnorm._BatchNorm.forward(layer, input)  # pyright: ignore[reportPrivateUsage]
        return _normalize(recorder, layer, input)

    return forward


def _normalize(recorder: Recorder, layer: Any, input: Tensor) -> Tensor:
    """Normalize with the mean and the variance of the samples of all ranks, and update the running statistics."""
    dims = [each for each in range(input.dim()) if each != 1]
    shape = [-1 if each == 1 else 1 for each in range(input.dim())]

    def reduce(values: Tensor) -> Tensor:
        return _Sum.apply(recorder, layer.process_group, values)  # pyright: ignore

    count = reduce(input.new_tensor([input.numel() / input.shape[1]]))
    mean = reduce(input.sum(dims)) / count
    centered = input - mean.view(shape)
    variance = reduce(centered.square().sum(dims)) / count
    if layer.track_running_stats:
        layer.num_batches_tracked.add_(1)
        momentum = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(mean.detach(), momentum)
        layer.running_var.lerp_((variance * count / (count - 1)).detach(), momentum)
    found = centered * (variance + layer.eps).rsqrt().view(shape)
    return found if layer.weight is None else found * layer.weight.view(shape) + layer.bias.view(shape)


class _Sum(torch.autograd.Function):
    """A sum over the ranks, whose gradient is the sum of the gradients; neither is a collective of the script."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, group: Any, values: Tensor) -> Tensor:  # pyright: ignore
        """Add up."""
        ctx.recorder, ctx.group = recorder, group
        return _add_up(recorder, group, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:  # pyright: ignore
        """Add up the gradients."""
        return None, None, _add_up(ctx.recorder, ctx.group, gradient)


def _add_up(recorder: Recorder, group: Any, values: Tensor) -> Tensor:
    found = values.detach().clone()
    with recorder.quiet():
        dist.all_reduce(found, group=group)
    return found
