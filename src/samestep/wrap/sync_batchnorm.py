"""BatchNorm over the rows of all ranks: torch's on a GPU, and the same on the CPU, where torch has none."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # the only name for all of its kinds


def over_all_ranks(model: nn.Module, device: torch.device) -> nn.Module:
    """`model` with every BatchNorm layer replaced by one that sees the rows of all ranks, with the same parameters."""
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if isinstance(model, _BatchNorm) and not isinstance(model, SYNCHRONISED):
        return _like(model)
    for name, child in model.named_children():
        model.add_module(name, over_all_ranks(child, device))
    return model


class CpuSyncBatchNorm(_BatchNorm):
    """What torch's SyncBatchNorm is, for tensors on the CPU; ranks may have different numbers of rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the mean and variance over the rows of all ranks; in evaluation by the running statistics."""
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        rows = input if input.dtype == torch.float64 else input.float()
        axes = [axis for axis in range(rows.dim()) if axis != 1]
        own = rows.numel() // rows.shape[1]
        sums = torch.cat([rows.sum(axes, dtype=torch.float64), torch.tensor([own], dtype=torch.float64)])
        total = _over_ranks(sums)
        count = total[-1].detach()
        if count < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        mean = (total[:-1] / count).to(rows.dtype)
        centred = rows - _spread(mean, rows)
        variance = (_over_ranks(centred.square().sum(axes, dtype=torch.float64)) / count).to(rows.dtype)
        self._follow(mean.detach(), variance.detach() * (count / (count - 1)))
        normal = centred * _spread(torch.rsqrt(variance + self.eps), rows)
        if self.weight is not None:  # pyright: ignore[reportUnnecessaryComparison]  # None without affine
            normal = normal * _spread(self.weight, rows)
        if self.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            normal = normal + _spread(self.bias, rows)
        return normal.to(input.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


SYNCHRONISED = (nn.SyncBatchNorm, CpuSyncBatchNorm)
"""The layers that see the rows of all ranks."""


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks; it reaches the loss of every rank, so gradients are summed too."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch gives *args
        """Add up the values of all ranks."""
        del ctx
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add up the gradients of all ranks."""
        del ctx
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed


def _over_ranks(values: Tensor) -> Tensor:
    summed = _SumOverRanks.apply(values)
    assert isinstance(summed, Tensor)
    return summed


def _spread(channels: Tensor, rows: Tensor) -> Tensor:
    """One value a channel, in a shape that multiplies `rows`."""
    return channels.reshape(1, -1, *[1] * (rows.dim() - 2))


def _like(norm: _BatchNorm) -> CpuSyncBatchNorm:
    made = CpuSyncBatchNorm(norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=False)
    made.affine, made.track_running_stats = norm.affine, norm.track_running_stats
    made.weight, made.bias = norm.weight, norm.bias
    made.running_mean, made.running_var = norm.running_mean, norm.running_var
    made.num_batches_tracked = norm.num_batches_tracked
    made.training = norm.training
    return made
