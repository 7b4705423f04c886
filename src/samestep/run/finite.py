"""What to say of a step whose loss or gradient is not finite: which rank, which samples, which parameter."""

from collections.abc import Sequence

import torch

from samestep.ranks.link import Link
from samestep.run.step import Step
from samestep.wrap.wrapped import Wrapped

_SHOWN = 8


def describe_not_finite(link: Link, step: Step, models: Sequence[Wrapped]) -> str:
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
