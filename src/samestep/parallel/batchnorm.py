"""BatchNorm over several ranks: converted to see all of them, or its running statistics averaged."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]  # no public name

from samestep.distributed.communicator import Communicator
from samestep.parallel.submodules import frozen_parts


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


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers that learn statistics, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats}


def unsynchronised(model: nn.Module) -> dict[str, _BatchNorm]:
    """Those that see the rows of their own rank only."""
    return {name: norm for name, norm in batch_norms(model).items() if not isinstance(norm, SYNCHRONISED)}


def learning(model: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers outside of frozen parts: what goes through them in training enters their statistics."""
    asleep = _asleep(model)
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and id(module) not in asleep]


def unsynced_batchnorms(model: nn.Module) -> list[_NormBase]:
    """The layers whose running statistics come from the rows of their own rank only: InstanceNorm may have some too."""
    kept = (module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats)
    return [norm for norm in kept if not isinstance(norm, SYNCHRONISED)]


def min_rows(norms: Sequence[_BatchNorm]) -> int:
    """How few rows those of these layers that now train can compute with; 0 where there is none."""
    awake = [norm for norm in norms if norm.training]
    alone = any(isinstance(norm, nn.BatchNorm1d) for norm in awake)  # one row has no variance, unless others join in
    return 2 if alone else min(1, len(awake))


def average_running_stats(link: Communicator, model: nn.Module) -> None:
    """Give every rank the average of all ranks' running statistics, in one collective; frozen parts are left alone.

    Layers that are in evaluation mode by now are meant too: they may have learnt until a moment ago.
    """
    asleep = _asleep(model)
    moving = [norm for norm in unsynced_batchnorms(model) if id(norm) not in asleep]
    buffers = [b for norm in moving for b in (norm.running_mean, norm.running_var) if b is not None]
    if link.alone or not buffers:
        return
    flat = torch.cat([buffer.reshape(-1).double() for buffer in buffers]).cpu()
    # with its name: a rank that is in a backward pass meanwhile must not take these numbers for gradients
    mean = torch.stack(link.exchange("averaging BatchNorm statistics", flat)).mean(dim=0)
    at = 0
    for buffer in buffers:
        buffer.copy_(mean[at : at + buffer.numel()].reshape(buffer.shape))
        at += buffer.numel()


def _asleep(model: nn.Module) -> set[int]:
    """The modules inside frozen parts, by id."""
    return {id(module) for part in frozen_parts(model).values() for module in part.modules()}
