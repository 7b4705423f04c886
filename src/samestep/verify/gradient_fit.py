"""Compare gradients of several ranks with those of one rank by their sketches."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from samestep.verify.check import Worlds, same_on_all
from samestep.verify.rank_trace import RankTrace
from samestep.verify.trace_events import OptimizerStep

_EPS = 2.0**-23  # of float32
_ROUNDINGS = 6  # of a gradient: in its sum over samples, micro-batches and ranks
_BATCHNORM = "the model has BatchNorm, whose statistics are those of the samples of each rank"
_SKETCH_SIZE = 2.0  # the norm of a sketch of four numbers is twice that of the tensor


def is_local_sgd(ranks: list[RankTrace]) -> bool:
    """Whether the weights of the ranks differ in some steps, and are equal again later: the script averages them."""
    differ = dict[int, list[bool]]()  # by optimizer: one may train a model that the ranks share, another one not
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        if same_on_all(step.optimizer for step in steps) and not any(step.is_sharded for step in steps):
            differs = any(step.weights != steps[0].weights for step in steps)
            differ.setdefault(steps[0].optimizer, []).append(differs)
    return any(True in each[1:] and not each[0] and False in each[each.index(True) :] for each in differ.values())


def fit_factor(value: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """The factor by which `value` is a multiple of `reference`, and the relative error that remains."""
    a, b = np.array(value), np.array(reference)
    scale = float(b @ b)
    if scale == 0.0:
        return 0.0, float(np.linalg.norm(a) > 0)
    factor = float(a @ b) / scale
    return factor, float(np.linalg.norm(a - factor * b) / (np.linalg.norm(a) or 1.0))


def same_samples(steps: Sequence[OptimizerStep], reference: OptimizerStep) -> bool:
    """Whether the ranks together used the samples of one rank in a step, as often."""
    return any(
        bool(of([reference])) and of(steps) == of([reference])
        for of in (_samples, _inputs)  # a loader that reads ahead returns batches of later steps
    )


def _samples(steps: Sequence[OptimizerStep]) -> Counter[str]:
    return Counter(sample for step in steps for batch in step.batches for sample in batch.samples)


def _inputs(steps: Sequence[OptimizerStep]) -> Counter[str]:
    return Counter(row for step in steps for call in step.calls if call.rows > 1 for row in call.hashes)


def comparable_steps(
    worlds: Worlds, with_batchnorm: bool = False
) -> Iterator[tuple[tuple[OptimizerStep, ...], OptimizerStep]]:
    """Steps that the ranks and one rank made with the same samples and weights, and without random numbers."""
    if worlds.one is None or not worlds.one.ranks or len(worlds.many.ranks) < 2 or is_local_sgd(worlds.many.ranks):
        return
    copied = _copied_steps(worlds.one[0])
    for steps, reference in zip(_steps_of_all(worlds), worlds.one[0].steps, strict=False):
        reason = _why_not_comparable(worlds.many[0], steps, reference, copied)
        if not reason or (with_batchnorm and reason == _BATCHNORM):
            yield steps, reference


def _steps_of_all(worlds: Worlds) -> Iterator[tuple[OptimizerStep, ...]]:
    return zip(*(trace.steps for trace in worlds.many), strict=False)


def _copied_steps(one: RankTrace) -> set[str]:
    """The steps before which one rank got the weights of the others, as names of the replay."""
    return {event["name"] for event in one.of("replay") if event["copied"]}


def _why_not_comparable(
    trace: RankTrace, steps: Sequence[OptimizerStep], reference: OptimizerStep, copied: set[str]
) -> str:
    """Why a step of the ranks cannot be compared with that of one rank; empty if it can."""
    if any(not step.sharded <= trace.row_sharded for step in steps):
        return "the weights are sharded on several dimensions"
    draws = ([draw.hash for draw in step.draws] for step in (*steps, reference))
    if any(step.rng_changes for step in (*steps, reference)) or not same_on_all(draws):
        return "they draw random numbers"
    if not same_samples(steps, reference):
        return "they have other samples than those of one rank with the same global batch"
    if f"step-{steps[0].number}" not in copied:
        return (
            "the weights of the ranks were not copied to one rank: of large models those of some steps are, and none "
            "if parameters have other shapes there"
        )
    if any(trace.modules.get(call.module, {}).get("batchnorm") for step in steps for call in step.calls):
        return _BATCHNORM
    return ""


def why_not_comparable(worlds: Worlds) -> tuple[int, str]:
    """The number of steps that cannot be compared with those of one rank, and the reason of most of them."""
    number = min((len(trace.steps) for trace in worlds.many), default=0)
    if worlds.one is None or not worlds.one.ranks or not worlds.one[0].steps:
        return number, "one rank made no step"
    if is_local_sgd(worlds.many.ranks):
        return number, "the ranks average their weights, not their gradients"
    copied, one = _copied_steps(worlds.one[0]), worlds.one[0].steps
    reasons = Counter(
        _why_not_comparable(worlds.many[0], steps, reference, copied)
        for steps, reference in zip(_steps_of_all(worlds), one, strict=False)
    )
    reasons["one rank made fewer steps"] += max(0, number - len(one))
    reasons.pop("", None)
    return reasons.total(), reasons.most_common(1)[0][0]


def rounding(trace: RankTrace, step: OptimizerStep) -> float:
    """The relative difference that rounding explains, by the least precise type of the parameters of a step."""
    return _ROUNDINGS * max((trace.eps.get(number, _EPS) for number in step.applied), default=_EPS)


def rounding_of(trace: RankTrace, steps: Sequence[OptimizerStep], number: int) -> float:
    """The norm of the difference of two sketches of a parameter's gradient that rounding explains.

    It is relative to the gradients of the ranks, which are larger than their mean if they cancel each other.
    """
    size = sum(step.norms.get(number, 0.0) for step in steps) / len(steps)
    return _SKETCH_SIZE * _ROUNDINGS * trace.eps.get(number, _EPS) * size


def fit_mean(steps: Sequence[OptimizerStep]) -> dict[int, tuple[float, list[float]]]:
    """For each parameter, the factor between the applied gradient and the mean over the ranks, and the mean."""
    found = dict[int, tuple[float, list[float]]]()
    if any(step.sharded for step in steps):
        return found
    for number, applied in steps[0].applied.items():
        known = [step.local[number] for step in steps if number in step.local]
        if len(known) < len(steps):
            continue
        mean = [sum(values) / len(steps) for values in zip(*known, strict=True)]
        if any(mean) and all(map(math.isfinite, (*mean, *applied))):
            found[number] = fit_factor(applied, mean)[0], mean
    return found


def median_factor(fits: dict[int, tuple[float, list[float]]]) -> float:
    """The factor of most parameters."""
    return sorted(factor for factor, _ in fits.values())[len(fits) // 2]


def applied_by_all(trace: RankTrace, steps: Sequence[OptimizerStep]) -> dict[int, list[float]]:
    """Sketches of the applied gradients: of sharded ones, the sum of those of their parts."""
    found = dict(steps[0].applied)
    for number in trace.row_sharded & found.keys():
        parts = [step.applied[number] for step in steps if number in step.applied]
        found[number] = [sum(values) for values in zip(*parts, strict=True)]
    return found


def fit_weights(
    trace: RankTrace, steps: Sequence[OptimizerStep], reference: OptimizerStep
) -> tuple[list[float], float, float] | None:
    """The weights of the ranks whose sum is the gradient of one rank, the error, and the difference of the applied one.

    Both are relative to the gradient of one rank. None if the gradients are not known.
    """
    by_all = applied_by_all(trace, steps)
    numbers = [
        number for number in reference.applied if all(number in step.local for step in steps) and number in by_all
    ]
    if not numbers:
        return None
    target = np.concatenate([reference.applied[number] for number in numbers])
    locals_ = np.stack([np.concatenate([step.local[number] for number in numbers]) for step in steps], axis=1)
    applied = np.concatenate([by_all[number] for number in numbers])
    size = float(np.linalg.norm(target))
    if size == 0.0 or not np.isfinite(target).all() or not np.isfinite(locals_).all():
        return None
    weights, *_ = np.linalg.lstsq(locals_, target, rcond=None)
    error = float(np.linalg.norm(locals_ @ weights - target)) / size
    return [float(weight) for weight in weights], error, float(np.linalg.norm(applied - target)) / size
