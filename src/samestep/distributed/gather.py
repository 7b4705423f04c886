"""All-gather the rows of all ranks in global order, with a gradient: for losses that compare the samples of a batch."""

import math

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from samestep.distributed.communicator import Communicator
from samestep.errors import CommunicationError

OPERATION = "run.gather"
_HALF = (torch.float16, torch.bfloat16)


def gather_rows(comm: Communicator, rows: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The rows of all ranks in rank order; ranks may have different numbers of rows, or none at all (None).

    In the backward pass each rank gets the sum of the gradients of all ranks for its own rows. So if every rank calls
    `backward()` on its part of a sum over all ranks, the gradients are those of the full sum.
    """
    if comm.alone:
        comm.refuse_inside_once(OPERATION)
        return _check_not_none(rows)
    shape = None if rows is None else tuple(rows.shape[1:])
    differentiable = rows is not None and rows.requires_grad and torch.is_grad_enabled()
    mine = None if rows is None else (rows.shape[0], shape, str(rows.dtype), differentiable)
    parts = comm.exchange_objects(OPERATION, mine)
    present = {rank: part for rank, part in enumerate(parts) if part is not None}
    if rows is None:
        known = next(iter(present.values()), None)
        rows = _check_not_none(None if known is None else _empty(known[1] or (), known[2], device))
    for rank, (_, theirs, dtype, _) in present.items():
        if (theirs, dtype) != (tuple(rows.shape[1:]), str(rows.dtype)):
            raise CommunicationError(
                f"run.gather got rows of shape {tuple(rows.shape[1:])} and {rows.dtype} on rank {comm.world.rank}, and "
                f"of shape {theirs} and {dtype} on rank {rank}: pass tensors that differ in their first dimension only"
            )
    counts = [0 if part is None else part[0] for part in parts]
    if not any(part[3] for part in present.values()):
        return _all_gather(comm, rows.detach(), counts)
    # the backward pass is a collective: a rank whose rows need no gradient must take part in it
    return _Gather.apply(rows if rows.requires_grad else rows.detach().requires_grad_(), comm, counts)  # pyright: ignore[reportReturnType]  # apply is untyped


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, comm: Communicator, counts: list[int]) -> torch.Tensor:
        """All rows."""
        ctx.comm, ctx.counts = comm, counts  # pyright: ignore[reportAttributeAccessIssue]  # torch's way to keep values
        return _all_gather(comm, rows, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch passes one gradient per output
        """The sum of the ranks' gradients, for this rank's rows."""
        comm: Communicator = ctx.comm  # pyright: ignore[reportAttributeAccessIssue]
        counts: list[int] = ctx.counts  # pyright: ignore[reportAttributeAccessIssue]
        payload = gradient.float() if gradient.dtype in _HALF else gradient.clone()
        payload = (payload.cpu() if _needs_cpu(comm, gradient.device) else payload).contiguous()
        with comm.collective(f"the backward pass of {OPERATION}"):
            dist.all_reduce(payload)
        own = payload.split(counts)[comm.world.rank]
        return own.to(device=gradient.device, dtype=gradient.dtype), None, None


def _all_gather(comm: Communicator, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    most, shape = max(counts), rows.shape[1:]
    if not most * math.prod(shape):
        return rows.new_empty((sum(counts), *shape))
    padded = rows.new_zeros((most, *shape))  # collectives need the same shape on every rank
    padded[: rows.shape[0]] = rows
    payload = padded.cpu() if _needs_cpu(comm, rows.device) else padded
    payload = payload.reshape(-1).view(torch.uint8)  # bytes: gloo does not know every dtype
    gathered = [torch.empty_like(payload) for _ in counts]
    with comm.collective(OPERATION):
        dist.all_gather(gathered, payload)
    parts = [part.view(rows.dtype).reshape(most, *shape)[:count] for part, count in zip(gathered, counts, strict=True)]
    return torch.cat(parts).to(rows.device)


def _needs_cpu(comm: Communicator, device: torch.device) -> bool:
    return device.type not in ("cpu", "cuda") or (device.type == "cuda" and comm.backend == "gloo")


def _empty(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    return torch.empty((0, *shape), dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)


def check_rows(rows: object) -> torch.Tensor:
    """Raise if `rows` is not a tensor with a first dimension."""
    if isinstance(rows, torch.Tensor) and rows.dim():
        return rows
    found = "a tensor without dimensions" if isinstance(rows, torch.Tensor) else f"a {type(rows).__name__}"
    raise CommunicationError(
        f"run.gather needs a tensor with one row per sample, or an iterable of such tensors, got {found}: for single "
        "numbers use run.mean, run.sum or run.max"
    )


def _check_not_none(rows: torch.Tensor | None) -> torch.Tensor:
    if rows is None:
        raise CommunicationError("run.gather got no tensor on any rank: is the dataset empty?")
    return rows
