"""BatchNorm over several ranks: converted to see all of them, or its running statistics averaged."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # pyright: ignore[reportPrivateUsage]  # the only names for all of their kinds

from samestep.ranks.link import Link
from samestep.wrap.frozen import frozen_parts
from samestep.wrap.sync_batchnorm import SYNCHRONISED


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


def of_own_rows(model: nn.Module) -> list[_NormBase]:
    """The layers whose running statistics come from the rows of their own rank only: InstanceNorm may have some too."""
    kept = (module for module in model.modules() if isinstance(module, _NormBase) and module.track_running_stats)
    return [norm for norm in kept if not isinstance(norm, SYNCHRONISED)]


def rows_needed(norms: Sequence[_BatchNorm]) -> int:
    """How few rows those of these layers that now train can compute with; 0 where there is none."""
    awake = [norm for norm in norms if norm.training]
    alone = any(isinstance(norm, nn.BatchNorm1d) for norm in awake)  # one row has no variance, unless others join in
    return 2 if alone else min(1, len(awake))


def average_statistics(link: Link, model: nn.Module) -> None:
    """Give every rank the average of all ranks' running statistics, in one collective; frozen parts are left alone.

    Layers that are in evaluation mode by now are meant too: they may have learnt until a moment ago.
    """
    asleep = _asleep(model)
    moving = [norm for norm in of_own_rows(model) if id(norm) not in asleep]
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
