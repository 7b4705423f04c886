"""Weights that drift apart although the gradients are equal.

What it compares: the weights of all ranks before every optimizer step, and the gradients that they apply. If the
gradients and the learning rates are equal and the weights are not, the state of the optimizers differs.

Fault: `if rank == 0: load_checkpoint(model, optimizer)`. DDP sends the weights to all ranks, but not the state of the
optimizer.

Repair: load the checkpoint on every rank.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.messages import format_list
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.rank_dependent_shapes import one_rank_change
from samestep.verify.checks.unsynchronized_parameters import (
    first_difference,
    have_same_rates,
    parameter_name,
    previous_step,
)


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for a step after which weights differ, but not its gradients."""
    ranks = worlds.many.ranks
    found = first_difference(ranks)
    if found is None or found[0] == 0:
        return
    number, parameters = found
    before = previous_step(ranks[0], number)
    steps = [trace.steps[before] for trace in ranks]
    if len({str(step.applied) for step in steps}) > 1 or not have_same_rates(ranks, number):
        return
    names = format_list([parameter_name(ranks[0], each) for each in parameters], 3)
    yield CHECK.finding(
        one_rank_change(worlds) or first(steps[0].site),
        f"{len(parameters)} parameters differ between the ranks after step {before} ({names}), although all ranks "
        "apply the same gradients: their optimizers have different states",
        ranks=range(len(ranks)),
    )


CHECK = Check(
    "SS607",
    "different-optimizer-state",
    "error",
    "the weights of the ranks drift apart, and a checkpoint holds those of one rank",
    "create, load and change the state of the optimizer on every rank alike",
    find,
)
