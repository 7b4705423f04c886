"""The gradient depends on the number of ranks because samples of a batch depend on each other.

What it compares: the gradient of several ranks with that of one rank for the same samples and weights, as per-rank-mean
does. It is reported with `--strict` only, if no weighting of the ranks explains the difference: BatchNorm without
synchronization, losses with in-batch negatives, ranking losses, or losses that are not means.

Fault: `F.cross_entropy(queries @ documents.T, arange(len(queries)))` on each rank: two ranks have half as many
negatives.

Repair: gather the embeddings of all ranks with gradients, `run.gather(embeddings)`, and use
`nn.SyncBatchNorm.convert_sync_batchnorm(model)`.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds
from samestep.verify.checks.per_rank_mean import loss_location
from samestep.verify.gradient_fit import comparable_steps, fit_weights, rounding
from samestep.verify.trace_events import OptimizerStep

_TOLERANCE = 5e-3
_MIN_STEPS = 2


def find(worlds: Worlds) -> Iterator[Finding]:
    """Find steps that differ from one rank without an explanation by weights."""
    found = list[tuple[OptimizerStep, float]]()
    ranks = 0
    for steps, reference in comparable_steps(worlds, with_batchnorm=True):
        fit = fit_weights(worlds.many[0], steps, reference)
        tolerance = max(_TOLERANCE, rounding(worlds.many[0], steps[0]))
        if fit is not None and fit[2] > tolerance and fit[1] > fit[2] / 5:
            found.append((steps[0], fit[2]))
            ranks = len(steps)
    if len(found) < _MIN_STEPS:
        return
    step, difference = max(found, key=lambda each: each[1])
    layers = sum(module["batchnorm"] for module in worlds.many[0].modules.values() if module["wrapper"] != "inside ddp")
    why = (
        f"the model has {layers} BatchNorm layers that are not synchronized"
        if layers
        else "the loss compares samples of a batch"
    )
    yield CHECK.finding(
        loss_location(worlds, step),
        f"the gradient of {ranks} ranks differs by {100 * difference:.1f} % from that of one rank for the same samples "
        f"and weights in {len(found)} steps, perhaps because {why}",
    )


CHECK = Check(
    "SS209",
    "coupled-samples",
    "note",
    "the result depends on the number of ranks",
    "convert BatchNorm with nn.SyncBatchNorm.convert_sync_batchnorm, and gather what the loss compares from all ranks",
    find,
    is_strict=True,
)
