"""`step.finite`: whether gradients are finite on all ranks, and a report of ranks, samples and parameters if not."""

from collections.abc import Sequence

import torch

from samestep.distributed.communicator import Communicator
from samestep.messages import format_list, warn
from samestep.parallel.wrapped_model import WrappedModel, gradients_finite

Losses = Sequence[tuple[torch.Tensor, list[int]]]
_SHOWN = 8


def all_finite(comm: Communicator, step: int, losses: Losses, models: Sequence[WrappedModel]) -> bool:
    """Whether the gradients of a step are finite on all ranks; if not, rank 0 warns with a report."""
    finite = gradients_finite(comm, "step.finite", models)
    if not finite:
        report = _report(comm, step, losses, models)
        if comm.world.is_main:
            warn(report)
    return finite


def _report(comm: Communicator, step: int, losses: Losses, models: Sequence[WrappedModel]) -> str:
    """One report from what each rank has seen; a collective."""
    mine = (_bad_samples(losses), next((name for model in models if (name := model.first_not_finite())), None))
    gathered = comm.exchange_objects("reporting a step that is not finite", mine)
    by_rank = [
        f"rank {rank}: samples {format_list(samples, _SHOWN)}" for rank, (samples, _) in enumerate(gathered) if samples
    ]
    bad_names = {name for _, name in gathered}
    names = (name for model in models for name, _ in model.inner.named_parameters())
    parameter = next((name for name in names if name in bad_names), None)
    where = (
        f"the loss is not finite on {'; '.join(by_rank)}"
        if by_rank
        else "every loss is finite, so the backward pass produced it"
    )
    first = f"; the first parameter with such a gradient is {parameter!r}" if parameter else ""
    return f"step {step} is not finite: {where}{first}"


def _bad_samples(losses: Losses) -> list[int]:
    bad: set[int] = set()
    for values, indices in losses:
        finite = values.reshape(len(indices), -1).isfinite().all(dim=1)
        if not bool(finite.all()):
            bad.update(indices[row] for row in torch.nonzero(~finite).reshape(-1).tolist())
    return sorted(bad)
