"""What torch does not offer in public yet, or offers by other names in other versions; wrapped here alone."""

import inspect
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel


def set_group_timeout(seconds: float, group: dist.ProcessGroup) -> None:
    """Give every later collective of `group` this long; torch only lets the timeout be named at the start."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)  # pyright: ignore[reportPrivateUsage]


def leave_to_their_own(model: nn.Module, names: Iterable[str]) -> None:
    """Keep DistributedDataParallel from sending these parameters and buffers around: they do not train."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))  # pyright: ignore[reportPrivateUsage]


def without_buffer_broadcast() -> dict[str, bool]:
    """The option by which this torch keeps the forward pass of DistributedDataParallel free of collectives."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply every tensor in place, in few kernels however many there are."""
    if tensors:
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateUsage]
