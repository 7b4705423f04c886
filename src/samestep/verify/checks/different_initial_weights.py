"""The ranks start with different weights.

What it compares: the weights of all ranks before the first optimizer step. DDP sends those of rank 0 to all ranks, so
this happens without DDP, for parts outside of it, or if the script changes the weights after DDP was created. It also
compares the names of the parameters: DDP and optimizers know them by their position only.

Fault: `torch.manual_seed(seed + rank)` before the model is built, and gradients that are averaged by hand.

Repair: `torch.distributed.broadcast(parameter.data, src=0)` for every parameter before the first step, or DDP.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from samestep.findings import Finding, Location
from samestep.messages import format_list
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.rank_dependent_samples import unordered_line
from samestep.verify.checks.unsynchronized_parameters import first_difference, parameter_name
from samestep.verify.source import calls_at, find_calls, function_at, name_of, origin

_SETTERS = (  # methods and functions that people set the weights of a model with
    "apply", "load_state_dict", "reset_parameters", "init_weights", "initialize_weights", "xavier_uniform_",
    "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "normal_", "uniform_", "orthogonal_",
)  # fmt: skip


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the weights before the first step."""
    ranks = worlds.many.ranks
    yield from _other_order(worlds)
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
    changed = _changed_after_wrapping(worlds, numbers)
    yield CHECK.finding(
        changed or location,
        f"{len(numbers)} of {len(ranks[0].steps[0].weights)} parameters differ between the ranks before the first step "
        f"({names}){': they were changed after DDP had made them equal' if changed else ''}",
        ranks=range(len(ranks)),
        repair="initialize or load the weights before you create DDP" if changed else "",
    )


def _other_order(worlds: Worlds) -> Iterator[Finding]:
    """Parameters that have another position on another rank, as those of layers in the order of a set."""
    one = worlds.many[0].names if worlds.many.ranks else {}
    for trace in worlds.many:
        differing = [number for number in one.keys() & trace.names.keys() if one[number][0] != trace.names[number][0]]
        names = [sorted(each[number][0] for number in differing) for each in (one, trace.names)]
        if differing and names[0] == names[1]:
            number = min(differing)
            wrapped = [event["site"] for event in trace.of("wrap") if event["site"]]
            yield CHECK.finding(
                unordered_line(worlds) or first(wrapped[0] if wrapped else ()),
                f"{len(differing)} parameters have another position on rank {trace.rank}: number {number} is "
                f"{one[number][0]} on rank 0 and {trace.names[number][0]} on rank {trace.rank}",
                ranks=[0, trace.rank],
                consequence="gradients and weights of different parameters are averaged, since ranks exchange them by "
                "position",
                repair="create the layers in the same order on all ranks: sort what you iterate over",
            )
            return


def _changed_after_wrapping(worlds: Worlds, numbers: Sequence[int]) -> Location | None:
    """The first executed line after DDP was created, in the same function, that sets weights which DDP covers."""
    trace = worlds.many[0]
    wrapped = [event["site"][0] for event in trace.of("wrap") if event["state"] == "end" and event["site"]]
    if not wrapped or not trace.covered.issuperset(numbers):
        return None
    calls = find_calls(wrapped[0].file, _SETTERS, function_at(wrapped[0]))
    lines = [call.lineno for call in calls if (wrapped[0].file, call.lineno) in worlds.executed()]
    later = [line for line in lines if line > wrapped[0].line]
    return replace(wrapped[0], line=later[0]) if later else None


CHECK = Check(
    "SS203",
    "different-initial-weights",
    "error",
    "each rank trains another model: averaged gradients belong to none of them",
    "build the model with the same seed on all ranks and seed the ranks differently afterwards, broadcast rank 0's "
    "weights, or use DDP",
    find,
)
