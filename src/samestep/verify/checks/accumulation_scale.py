"""Accumulated losses that are not divided once by their number.

What it compares: how much the mean loss of each micro-batch counts in the gradient of a step. Over the micro-batches of
a step these factors should add up to 1; a script may also divide the gradients afterwards. Several losses of the same
batch, as in a GAN, losses of several loaders, as for several tasks, and batches whose gradients the script has dropped
are not reported.

Fault: four times `loss.backward()` before `optimizer.step()`: the gradient is four times that of one large batch. Or
`accelerator.backward(loss / 4)`, where Accelerate divides by 4 as well.

Repair: `(loss / accumulation_steps).backward()`, and leave the division to the framework if it divides.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.per_rank_mean import loss_location
from samestep.verify.gradient_fit import fit_factor, fit_mean, median_factor
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import assigned, call_named
from samestep.verify.trace_events import OptimizerStep

_TOLERANCE = 1e-3
_MIN_SHARE = 0.5  # of the steps with several micro-batches


def find(worlds: Worlds) -> Iterator[Finding]:
    """Add up the factors of each step."""
    for trace in worlds.many.ranks[:1]:
        sums = [
            (steps[0], count, total * _division_of_gradients(steps))
            for steps in zip(*(each.steps for each in worlds.many), strict=False)
            if (found := _total(trace, steps[0]))
            for count, total in [found]
        ]
        undivided = [each for each in sums if abs(each[2] - each[1]) < _TOLERANCE * each[1]]
        twice = [each for each in sums if abs(each[2] * each[1] - 1) < _TOLERANCE]
        for steps, is_undivided in ((undivided, True), (twice, False)):
            if steps and len(steps) >= _MIN_SHARE * len(sums):
                step, count, _ = steps[0]
                text = (
                    f"is {count} times the gradient of one batch of that size: the loss is not divided by {count}"
                    if is_undivided
                    else f"is 1/{count} of the gradient of one batch of that size: the loss is divided by {count} twice"
                )
                location = first(step.backwards[-1].site)
                if location is not None and call_named(location, ["backward"]) is None:
                    location = loss_location(worlds, step)  # Lightning calls backward
                yield CHECK.finding(
                    location if is_undivided or location is None else _division(location),
                    f"the gradient of {count} accumulated micro-batches {text} ({len(steps)} of {len(sums)} steps)",
                    repair="" if is_undivided else "divide once: Accelerate and Lightning divide the loss themselves",
                )


def _division(location: Location) -> Location:
    """The line that divides the loss of a backward pass, if it is another one."""
    call = call_named(location, ["backward"])
    if call is None:
        return location
    value = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
    return assigned(location, value) if value is not None else location


def _division_of_gradients(steps: tuple[OptimizerStep, ...]) -> float:
    """The factor by which the script has multiplied the gradients after the last backward pass."""
    if fits := fit_mean(steps):
        return median_factor(fits)
    changed = [
        fit_factor(steps[0].applied[number], value)[0]
        for number, value in steps[0].exchanged.items()
        if number in steps[0].applied
    ]
    return sorted(changed)[len(changed) // 2] if changed else 1.0


def _total(trace: RankTrace, step: OptimizerStep) -> tuple[int, float] | None:
    """The number of micro-batches of a step, and the sum of the factors of their losses; None without accumulation."""
    restart = max((number for number, each in enumerate(step.backwards) if each.restarts), default=0)
    backwards = step.backwards[restart:]
    if len({trace.epochs[batch.epoch].loader.number for batch in step.batches}) > 1:
        return None  # losses of several tasks
    if step.batches and len(step.batches) < len(backwards):
        return None  # losses of several parts or views of a batch
    sites = {each.site for each in backwards}
    inputs = [tuple(call.hashes) for call in step.calls if call.training and call.hashes and call.rows > 1]
    if (
        len(backwards) < 2
        or len(sites) > 1
        or len(set(inputs)) < len(backwards)
        or any(not each.scales for each in backwards)
    ):
        return None
    return len(backwards), sum(max(map(abs, each.scales)) for each in backwards)


CHECK = Check(
    "SS602",
    "accumulation-scale",
    "error",
    "the effective learning rate and the threshold of clipping change with the number of micro-batches",
    "divide the loss by the number of micro-batches: (loss / accumulation_steps).backward()",
    find,
)
