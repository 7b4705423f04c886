"""The gradient is not the mean over the ranks.

What it compares: the gradients that the optimizer applies with the mean of the gradients of the ranks before they are
exchanged, parameter by parameter, and with the gradient of one rank for the same samples and weights. A common factor,
as from clipping, is allowed, and so are differences by the rounding of the type. What the script does with gradients
that DDP has averaged, and what a communication hook does, is not compared, if all ranks apply the same gradients. Of
sharded gradients it compares by which factor each rank changes its part: it must be the same on all ranks.

Fault: `dist.all_reduce(p.grad)` without a division by the number of ranks, an all-reduce of some of the parameters, or
the last backward pass of an accumulation inside of `no_sync()`.

Repair: divide by `world_size` after a sum, exchange every parameter, and leave `no_sync()` for the last micro-batch.
"""

import math
from collections.abc import Iterator, Sequence

from samestep.findings import Finding, Location
from samestep.messages import format_list
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.bypassed_wrapper import find_bypassed
from samestep.verify.checks.per_rank_mean import loss_location
from samestep.verify.checks.unsynchronized_parameters import parameter_name
from samestep.verify.gradient_fit import (
    applied_by_all,
    comparable_steps,
    fit_factor,
    fit_mean,
    is_local_sgd,
    median_factor,
    rounding,
    rounding_of,
)
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import attribute_assignments, find_calls, function_at
from samestep.verify.trace_events import OptimizerStep

_TOLERANCE = 2e-3
_LARGE = 0.3  # a relative difference that no rounding explains
_SCALE = 0.01  # from which on a gradient is a multiple of another one
_MIN_STEPS = 2


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare applied gradients with the mean over the ranks, and then with one rank."""
    ranks = worlds.many.ranks
    if len(ranks) < 2 or any(trace.of("join") for trace in ranks) or is_local_sgd(ranks):
        return
    if find_bypassed(ranks) is not None:
        return
    factors = list[tuple[OptimizerStep, float]]()
    references = {steps[0].number: reference for steps, reference in comparable_steps(worlds)}
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        if all(step.sharded for step in steps):
            found = _unequal_shards(worlds, steps) or _incomplete_shards(worlds, steps)
            if found is not None:
                yield found
                return
        fits = fit_mean(steps)
        if not fits:
            continue
        common = median_factor(fits)
        wrong = [
            number
            for number, (_, mean) in fits.items()
            if not _is_close(ranks[0], steps, number, steps[0].applied[number], mean, common)
        ]
        wrong = [number for number in wrong if not _is_intended(ranks[0], steps, number, fits[number][1], references)]
        if wrong:
            yield _wrong(ranks, steps[0], wrong)
            return
        factors.append((steps[0], common))
    yield from _scaled(worlds, factors)


def _is_close(
    trace: RankTrace, steps: Sequence[OptimizerStep], number: int, value: list[float], mean: list[float], factor: float
) -> bool:
    """Whether a gradient is the mean times a factor, but for rounding."""
    difference = math.dist(value, [factor * each for each in mean])
    allowed = _TOLERANCE * math.hypot(*value) + abs(factor) * rounding_of(trace, steps, number)
    return difference <= allowed


def _is_intended(
    trace: RankTrace,
    steps: Sequence[OptimizerStep],
    number: int,
    mean: list[float],
    references: dict[int, OptimizerStep],
) -> bool:
    """Whether all ranks apply the same gradient, which the script has made of the right one.

    DDP has averaged it before the script changed it, a communication hook has, or one rank applies the same.
    """
    applied = steps[0].applied[number]
    if any(not _is_close(trace, steps, number, step.applied.get(number, []) or mean, applied, 1) for step in steps):
        return False
    if number in trace.covered and trace.of("comm_hook"):
        return True
    exchanged = steps[0].exchanged.get(number)
    if exchanged is not None and _is_close(trace, steps, number, exchanged, mean, 1):
        return True
    reference = references.get(steps[0].number)
    return (
        reference is not None
        and number in reference.applied
        and _is_close(trace, steps, number, applied, reference.applied[number], 1)
    )


def _unequal_shards(worlds: Worlds, steps: Sequence[OptimizerStep]) -> Finding | None:
    """Whether the ranks scale their parts of the same gradients by different factors, as for a norm of one part."""
    factors = list[float]()
    for step in steps:
        fits = [fit_factor(step.applied[number], value) for number, value in step.exchanged.items()]
        if not fits or not all(error <= _TOLERANCE for _, error in fits):  # also if a gradient is not finite
            return None
        factors.append(sum(factor for factor, _ in fits) / len(fits))
        if any(abs(factor - factors[-1]) > _SCALE * abs(factors[-1]) for factor, _ in fits):
            return None
    if max(factors) - min(factors) <= _SCALE * max(map(abs, factors)):
        return None
    return CHECK.finding(
        _scaling_location(worlds) or first(steps[0].site),
        f"the ranks scale their parts of the sharded gradients by different factors in step {steps[0].number}: "
        f"{' and '.join(f'{factor:.3g}' for factor in factors)}",
        ranks=range(len(steps)),
        repair="reduce the norm over all ranks before you scale, or use torch.nn.utils.clip_grad_norm_",
    )


def _incomplete_shards(worlds: Worlds, steps: Sequence[OptimizerStep]) -> Finding | None:
    """Whether sharded gradients are not the mean over the ranks: FSDP did not exchange those of some backward passes.

    The types in which FSDP computes and exchanges are not known, so that only large differences count.
    """
    trace = worlds.many[0]
    by_all = applied_by_all(trace, steps)
    numbers = [
        number
        for number in by_all
        if number in trace.row_sharded and all(number in step.local and number in step.applied for step in steps)
    ]
    if not numbers or len({len(step.backwards) for step in steps}) > 1:
        return None
    applied = [value for number in numbers for value in by_all[number]]
    locals_ = [[value for number in numbers for value in step.local[number]] for step in steps]
    _, error = fit_factor(applied, [sum(values) for values in zip(*locals_, strict=True)])
    if not error >= _LARGE or steps[0].is_clipped:  # also if a gradient is not finite
        return None
    switches = [
        Location(file, call.lineno)
        for file in worlds.files
        for call in find_calls(file, ["set_requires_gradient_sync", "no_sync"])
        if (file, call.lineno) in worlds.executed()
    ]
    return CHECK.finding(
        switches[0] if switches else first(steps[0].backwards[-1].site) if steps[0].backwards else first(steps[0].site),
        f"the sharded gradients of {len(numbers)} parameters are not the mean over the ranks in step {steps[0].number}",
        ranks=range(len(steps)),
        repair="exchange the gradients in the last backward pass before every step: set_requires_gradient_sync(True)",
    )


def _scaling_location(worlds: Worlds) -> Location | None:
    """The only line that multiplies or divides tensors in place and was executed, if there is one."""
    lines = worlds.executed()
    calls = [(file, call.lineno) for file in worlds.files for call in find_calls(file, ["mul_", "div_"])]
    executed = [each for each in calls if each in lines]
    return Location(*executed[0]) if len(executed) == 1 else None


def _wrong(ranks: list[RankTrace], step: OptimizerStep, numbers: list[int]) -> Finding:
    names = format_list([parameter_name(ranks[0], number) for number in numbers], 3)
    location, why, repair = _cause(ranks[0], step)
    return CHECK.finding(
        location,
        f"the gradients of {len(numbers)} of {len(step.applied)} parameters ({names}) are not the mean over the ranks "
        f"in step {step.number}{why}",
        ranks=range(len(ranks)),
        repair=repair,
    )


def _cause(trace: RankTrace, step: OptimizerStep) -> tuple[Location | None, str, str]:
    """The line of the fault, what it does, and its repair."""
    if step.clip_site:
        return (
            first(step.clip_site), ": they are clipped before they are complete",
            "clip once per step, after the last backward pass and after the gradients were exchanged",
        )  # fmt: skip
    if step.backwards and step.backwards[-1].syncs and not any(step.backwards[-1].syncs):
        prepared = [event for event in trace.of("accelerate") if event["name"] == "prepare"]
        if prepared and not any(event["optimizers"] for event in prepared):
            return (
                first(prepared[0]["site"]),
                ": the optimizer is not passed to accelerator.prepare(), so it steps after every micro-batch",
                "pass the optimizer to accelerator.prepare()",
            )
        return (
            no_sync_location(step) or first(step.backwards[-1].site),
            ": the last backward pass before the step is inside of no_sync()",
            "leave no_sync() for the last micro-batch before every optimizer step, also at the end of an epoch",
        )
    return _exchange_location(trace, step), "", ""


def no_sync_location(step: OptimizerStep) -> Location | None:
    """The statement that calls no_sync in the function of the backward pass."""
    location = first(step.backwards[-1].site)
    function = function_at(location) if location is not None else None
    calls = find_calls(location.file, ["no_sync"], function) if location is not None else []
    return Location(location.file, calls[0].lineno, location.function) if location is not None and calls else None


def _scaled(worlds: Worlds, factors: list[tuple[OptimizerStep, float]]) -> Iterator[Finding]:
    """Report gradients that are a multiple of the mean over the ranks, or of the gradient of one rank."""
    ranks = worlds.many.ranks
    plain = [(step, factor) for step, factor in factors if not step.is_clipped]
    sums = [
        (step, factor)
        for step, factor in plain
        if abs(factor / len(ranks) - 1) < max(_TOLERANCE, rounding(ranks[0], step))
    ]
    compared = [
        (steps[0], fit)
        for steps, reference in comparable_steps(worlds)
        if not steps[0].is_clipped and (fit := _fit_reference(ranks[0], steps, reference)) is not None
    ]
    scaled = [
        (step, factor)
        for step, (factor, error) in compared
        if error < _TOLERANCE and abs(factor - 1) > max(_SCALE, rounding(ranks[0], step))
    ]
    if len(sums) >= _MIN_STEPS and len(sums) == len(plain) and (not compared or scaled):
        step, factor = sums[0]
        yield CHECK.finding(
            _exchange_location(ranks[0], step),
            f"the applied gradients are {factor:.3g} times the mean over {len(ranks)} ranks in each of {len(sums)} "
            "steps: they are summed and not divided",
            ranks=range(len(ranks)),
            repair="divide the gradients by the number of ranks after the all-reduce, or use DDP",
        )
    elif len(scaled) >= _MIN_STEPS and len(scaled) == len(compared) and _is_constant([factor for _, factor in scaled]):
        step, factor = scaled[0]
        yield CHECK.finding(
            loss_location(worlds, step),
            f"the gradient of {len(ranks)} ranks is {factor:.3g} times that of one rank for the same samples and "
            f"weights, in each of {len(scaled)} compared steps",
            ranks=range(len(ranks)),
            repair="DDP averages the gradients: let the loss be the mean over the samples of a rank, without the "
            "number of ranks",
        )


def _is_constant(values: list[float]) -> bool:
    return max(values) - min(values) < 0.01 * abs(values[0])


def _fit_reference(
    trace: RankTrace, steps: Sequence[OptimizerStep], reference: OptimizerStep
) -> tuple[float, float] | None:
    """The factor between the gradients of the ranks and that of one rank, over all parameters, and the error."""
    by_all = applied_by_all(trace, steps)
    numbers = [number for number in reference.applied if number in by_all]
    if not numbers:
        return None
    applied = [value for number in numbers for value in by_all[number]]
    return fit_factor(applied, [value for number in numbers for value in reference.applied[number]])


def _exchange_location(trace: RankTrace, step: OptimizerStep) -> Location | None:
    """The line that exchanges gradients by hand, or else that of the backward pass.

    If a backward pass follows the exchange, or DDP has seen none, it is the line that adds or assigns the gradients.
    """
    if trace.covered and not step.backwards:
        files = {file for file, _, _ in trace.codes.values()}
        assigned = [(file, node.lineno) for file, node in attribute_assignments(files, "grad")]
        executed = [each for each in assigned if each in trace.executed]
        return Location(*executed[-1]) if executed else first(step.site)
    calls = [call for call in trace.collectives if call.step == step.number and call.name in ("all_reduce", "reduce")]
    if trace.covered:  # DDP exchanges them as well
        calls = [call for call in calls if call.source and call.source[0] in trace.shapes.values() and call.source[0]]
    if calls and not (step.backwards and step.backwards[-1].position > calls[-1].position):
        return first(calls[-1].site)
    return first(step.backwards[-1].site) if step.backwards else first(step.site)


CHECK = Check(
    "SS205",
    "wrong-gradient",
    "error",
    "the step depends on the number of ranks, or each rank takes another step",
    "exchange the gradients of every parameter in every step, and divide their sum by the number of ranks; or use DDP",
    find,
)
