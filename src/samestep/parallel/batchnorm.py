"""BatchNorm on several ranks: synchronized over all ranks, or with running statistics that are averaged."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]  # no public name

from samestep.distributed.communicator import Communicator
from samestep.parallel.submodules import frozen_parts


def sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """`model` with every BatchNorm layer replaced by one that normalizes over all ranks, with the same parameters."""
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if isinstance(model, _BatchNorm) and not isinstance(model, SYNCHRONIZED):
        return _convert(model)
    for name, child in model.named_children():
        model.add_module(name, sync_batchnorm(child, device))
    return model


def batchnorms_outside_frozen(model: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers outside of frozen parts, which update their statistics in training."""
    frozen = _frozen_modules(model)
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and id(module) not in frozen]


def unsynced_batchnorm_names(model: nn.Module) -> list[str]:
    """Names of BatchNorm layers outside of frozen parts that see only the rows of their own rank."""
    found = {id(norm) for norm in unsynced_batchnorms(model)} & {id(norm) for norm in batchnorms_outside_frozen(model)}
    return [name for name, module in model.named_modules() if id(module) in found]


def unsynced_batchnorms(model: nn.Module) -> list[_NormBase]:
    """The layers, InstanceNorm included, whose running statistics come from the rows of their own rank only."""
    tracking = (module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats)
    return [norm for norm in tracking if not isinstance(norm, SYNCHRONIZED)]


def min_rows(norms: Sequence[_BatchNorm]) -> int:
    """The fewest rows with which the layers in training mode can compute; 0 if there is none."""
    training = [norm for norm in norms if norm.training]
    # one row has no variance, unless it has spatial dimensions
    return 2 if any(isinstance(norm, nn.BatchNorm1d) for norm in training) else min(1, len(training))


def average_running_stats(comm: Communicator, model: nn.Module) -> None:
    """Average the running statistics over the ranks, in one collective; frozen parts keep theirs.

    It includes layers that are in evaluation mode now, since they may have been trained before.
    """
    frozen = _frozen_modules(model)
    norms = [norm for norm in unsynced_batchnorms(model) if id(norm) not in frozen]
    buffers = [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]
    if comm.alone or not buffers:
        return
    flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers]).cpu()
    # a labeled exchange: a rank that is in a backward pass must not mistake these numbers for gradients
    mean = torch.stack(comm.exchange("averaging BatchNorm statistics", flat)).mean(dim=0)
    start = 0
    for buffer in buffers:
        buffer.copy_(mean[start : start + buffer.numel()].reshape(buffer.shape))
        start += buffer.numel()


def _frozen_modules(model: nn.Module) -> set[int]:
    """The ids of the modules inside frozen parts."""
    return {id(module) for part in frozen_parts(model).values() for module in part.modules()}


class CpuSyncBatchNorm(_BatchNorm):
    """torch's SyncBatchNorm for CPU tensors; ranks may have different numbers of rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize by mean and variance over all ranks; in evaluation mode by the running statistics."""
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        rows = input if input.dtype == torch.float64 else input.float()
        axes = [axis for axis in range(rows.dim()) if axis != 1]
        count_here = rows.numel() // rows.shape[1]
        sums = torch.cat([rows.sum(axes, dtype=torch.float64), torch.tensor([count_here], dtype=torch.float64)])
        total = _sum_over_ranks(sums)
        count = total[-1].detach()
        if count < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        mean = (total[:-1] / count).to(rows.dtype)
        centered = rows - _per_channel(mean, rows)
        variance = (_sum_over_ranks(centered.square().sum(axes, dtype=torch.float64)) / count).to(rows.dtype)
        self._update_running_stats(mean.detach(), variance.detach() * (count / (count - 1)))
        normalized = centered * _per_channel(torch.rsqrt(variance + self.eps), rows)
        if self.weight is not None:  # pyright: ignore[reportUnnecessaryComparison]  # None without affine
            normalized = normalized * _per_channel(self.weight, rows)
        if self.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            normalized = normalized + _per_channel(self.bias, rows)
        return normalized.to(input.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _update_running_stats(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics toward those of this batch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


SYNCHRONIZED = (nn.SyncBatchNorm, CpuSyncBatchNorm)
"""The layers that normalize over all ranks."""


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks. It enters the loss of every rank, so gradients are summed too."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch gives *args
        """Sum the values of all ranks."""
        del ctx
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Sum the gradients of all ranks."""
        return _SumOverRanks.forward(ctx, gradient)


def _sum_over_ranks(values: Tensor) -> Tensor:
    summed = _SumOverRanks.apply(values)
    assert isinstance(summed, Tensor)
    return summed


def _per_channel(channels: Tensor, rows: Tensor) -> Tensor:
    """One value per channel, in a shape that broadcasts to `rows`."""
    return channels.reshape(1, -1, *[1] * (rows.dim() - 2))


def _convert(norm: _BatchNorm) -> CpuSyncBatchNorm:
    converted = CpuSyncBatchNorm(norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=False)
    converted.affine, converted.track_running_stats = norm.affine, norm.track_running_stats
    converted.weight, converted.bias = norm.weight, norm.bias
    converted.running_mean, converted.running_var = norm.running_mean, norm.running_var
    converted.num_batches_tracked = norm.num_batches_tracked
    converted.training = norm.training
    return converted
