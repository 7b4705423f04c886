"""The ranks start with different weights.

What it compares: the weights of all ranks before the first optimizer step. DDP sends those of rank 0 to all ranks, so
this happens without DDP, or for parts outside of it.

Fault: `torch.manual_seed(seed + rank)` before the model is built, and gradients that are averaged by hand.

Repair: `torch.distributed.broadcast(parameter.data, src=0)` for every parameter before the first step, or DDP.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding
from samestep.messages import format_list
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.unsynchronized_parameters import first_difference, parameter_name
from samestep.verify.source import calls_at, name_of, origin


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the weights before the first step."""
    ranks = worlds.many.ranks
    found = first_difference(ranks)
    if found is None or found[0] > 0:
        return
    _, numbers = found
    optimizer = ranks[0].optimizers[ranks[0].steps[0].optimizer]
    names = format_list([parameter_name(ranks[0], number) for number in numbers], 3)
    location = first(optimizer["site"])
    if location is not None:
        for call in calls_at(location):
            if name_of(call) == "parameters" and isinstance(call.func, ast.Attribute):
                location = origin(location, call.func.value)
                break
    yield CHECK.finding(
        location,
        f"{len(numbers)} of {len(ranks[0].steps[0].weights)} parameters differ between the ranks before the first step "
        f"({names})",
        ranks=range(len(ranks)),
    )


CHECK = Check(
    "SS203",
    "different-initial-weights",
    "error",
    "each rank trains another model: averaged gradients belong to none of them",
    "build the model with the same seed on all ranks and seed the ranks differently afterwards, broadcast rank 0's "
    "weights, or use DDP",
    find,
)
