"""A loss that each rank divides by its own count.

What it compares: the gradient of several ranks with that of one rank for the same samples and the same weights. If they
differ, and one rank's gradient is a mean of those of the ranks with other weights than 1/N, each rank has divided its
loss by its own number of tokens, pixels or samples. Steps that draw random numbers, and BatchNorm, are not compared.

Fault: `loss = losses.sum() / mask.sum()` on each rank, where the ranks have different numbers of valid tokens.

Repair: divide by the count of all ranks: `dist.all_reduce(count)`, then `losses.sum() * world_size / count`; or
`step.mean(losses, mask=mask)`.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first
from samestep.verify.gradient_fit import comparable_steps, fit_weights, rounding
from samestep.verify.source import calls_at, find_function, name_of, origin
from samestep.verify.trace_events import OptimizerStep

_TOLERANCE = 2e-3
_EXPLAINED = 2e-2
_MIN_STEPS = 2


def find(worlds: Worlds) -> Iterator[Finding]:
    """Explain the gradient of one rank by those of many."""
    found = list[tuple[OptimizerStep, list[float], float]]()
    compared = 0
    for steps, reference in comparable_steps(worlds):
        compared += 1
        fit = fit_weights(worlds.many[0], steps, reference)
        if fit is None:
            continue
        weights, error, difference = fit
        uneven = max(abs(weight - 1 / len(steps)) for weight in weights)
        if (
            abs(sum(weights) - 1) < _EXPLAINED
            and difference > max(_TOLERANCE, rounding(worlds.many[0], steps[0]))
            and error < min(_EXPLAINED, difference / 5)
            and uneven > 5e-3
            and min(weights) > -1e-2
        ):
            found.append((steps[0], weights, difference))
    if len(found) >= min(_MIN_STEPS, compared) and found:
        step, weights, difference = max(found, key=lambda each: each[2])
        text = " and ".join(f"{weight:.2f}" for weight in weights)
        yield CHECK.finding(
            loss_location(worlds, step),
            f"the gradient of {len(weights)} ranks differs by {100 * difference:.1f} % from that of one rank for the "
            f"same samples and weights: the ranks should count {text}, but count {1 / len(weights):.2f} each",
            evidence=[f"in {len(found)} of {compared} compared steps; the largest difference is in step {step.number}"],
            ranks=range(len(weights)),
        )


def loss_location(worlds: Worlds, step: OptimizerStep) -> Location | None:
    """The line that the loss of a backward pass comes from."""
    location = first(step.backwards[-1].site) if step.backwards else None
    executed = worlds.executed()
    if location is None:
        return None
    for call in calls_at(location):
        if name_of(call) == "backward":
            value = call.func.value if isinstance(call.func, ast.Attribute) else None
            is_argument = call.args and name_of(value or call) in ("accelerator", "fabric", "scaler", "engine", "self")
            return origin(location, call.args[0] if is_argument else value, executed)
    for file in worlds.files:  # Lightning calls backward for the result of training_step
        function = find_function(file, "training_step")
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)] if function else []
        if returns:
            return origin(Location(file, returns[-1].lineno, "training_step"), returns[-1].value, executed)
    return location


CHECK = Check(
    "SS206",
    "per-rank-mean",
    "error",
    "tokens on ranks with few of them count more, so the gradient depends on how the data is divided",
    "divide by the count of all ranks (all_reduce it) and multiply by the number of ranks, or use step.mean(losses, "
    "mask=mask)",
    find,
)
