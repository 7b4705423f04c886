"""What to say of a step whose loss or gradient is not finite: which rank, which samples, which parameter."""

from collections.abc import Sequence

import torch

from samestep.distributed.communicator import Communicator
from samestep.messages import warn
from samestep.parallel.wrapped_model import WrappedModel
from samestep.training.step import Step

_SHOWN = 8


def all_finite(link: Communicator, step: Step, models: Sequence[WrappedModel]) -> bool:
    """Whether a step's gradients are finite on all ranks; where not, the first rank warns with a report.

    Averaged gradients hold the same bits on every rank, so each sees for itself what all see: only sharded ones and the
    report of a fault need a collective.
    """
    healthy = all(bool(model.all_finite()) for model in models)
    if any(model.sharded for model in models):
        healthy = all(bool(part[0]) for part in link.exchange("step.finite", [float(healthy)]))
    if not healthy:
        report = describe_not_finite(link, step, models)
        if link.world.is_main:
            warn(report)
    return healthy


def describe_not_finite(link: Communicator, step: Step, models: Sequence[WrappedModel]) -> str:
    """One report for all ranks, from what each of them saw; every rank must call this."""
    mine = (_bad_samples(step), next((name for model in models if (name := model.first_not_finite())), None))
    everyone = link.exchange_objects("reporting a step that is not finite", mine)
    told = [f"rank {rank}: samples {_list(samples)}" for rank, (samples, _) in enumerate(everyone) if samples]
    seen = {name for _, name in everyone}
    names = (name for model in models for name, _ in model.inner.named_parameters())
    parameter = next((name for name in names if name in seen), None)
    losses = (
        f"the loss is not finite on {'; '.join(told)}" if told else "every loss is finite, so the backward pass made it"
    )
    where = f"; the first parameter with such a gradient is {parameter!r}" if parameter else ""
    return f"step {step.number} is not finite: {losses}{where}"


def _bad_samples(step: Step) -> list[int]:
    found: list[int] = []
    for losses, indices in step.losses:
        healthy = losses.reshape(len(indices), -1).isfinite().all(dim=1)
        if not bool(healthy.all()):
            found.extend(indices[row] for row in torch.nonzero(~healthy).reshape(-1).tolist())
    return sorted(set(found))


def _list(samples: list[int]) -> str:
    return ", ".join(map(str, samples[:_SHOWN])) + (
        f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    )
