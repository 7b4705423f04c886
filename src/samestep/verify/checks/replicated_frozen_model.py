"""A large frozen model on every rank.

What it compares: the size of modules without trainable parameters that every rank calls with the size of what is
trained. A module inside of the trained one counts if it is called without gradients, and of a sharded module its part
on a rank. It is reported from four times the size on, if the copies take memory: from 2 MiB on. Weights in shared
memory and weights that are mapped from a file, as by `torch.load(..., mmap=True)` or `run.teacher(placement="cpu")`, do
not count: the ranks of a node have one copy of them. verify runs small models in place of large ones, so it cannot
compare the size with the memory of a GPU: ignore this warning if the copies fit.

Fault: a teacher of 120 GB that each of four ranks on a node loads.

Repair: `run.teacher(...)` with a placement: sharded over the ranks, served by one of them, or one copy in host memory.
"""

import ast
from collections.abc import Iterator
from typing import Any

from samestep.findings import Finding, Location
from samestep.messages import format_bytes
from samestep.verify.check import Check, Worlds, first
from samestep.verify.source import assigned, attribute_assignments, calls_at, name_of

_TIMES = 4
_MIN_BYTES = 2 * 2**20


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for frozen modules that all ranks hold."""
    ranks = worlds.many.ranks
    if len(ranks) < 2:
        return
    trace = ranks[0]
    trained = max(map(_trained_bytes, trace.modules.values()), default=0.0)
    for number, module in trace.modules.items():
        private = module["local"] - module["mapped"]
        is_large = private >= max(_MIN_BYTES, _TIMES * trained)
        if module["trainable"] or not is_large or not trained:
            continue
        calls = [call for step in trace.steps for call in step.calls if call.module == number]
        calls += [call for call in trace.frozen_calls if call.module == number]
        sites = [call.site for call in calls]
        sites += [event["site"] for event in trace.of("frozen_inside") if event["module"] == number]
        is_everywhere = all(
            any(
                other["class"] == module["class"] and other["local"] - other["mapped"] == private
                for other in each.modules.values()
            )
            for each in ranks
        )
        if sites and is_everywhere:
            location = first(sites[0])
            call = next((each for each in calls_at(location) if name_of(each) != "no_grad"), None) if location else None
            yield CHECK.finding(
                _created(worlds, location, call.func) if location and call else location,
                f"{module['class']} with {format_bytes(private)} of frozen weights is on every rank, "
                f"{private / trained:.0f} times the size of the model that is trained: {len(ranks)} copies",
                ranks=range(len(ranks)),
            )
            return


def _trained_bytes(module: dict[str, Any]) -> float:
    """The size of the trainable parameters of a module, which may have frozen ones as well."""
    number = module["trainable"] + module["frozen"]
    return module["bytes"] * module["trainable"] / number if number else 0.0


def _created(worlds: Worlds, location: Location, function: ast.expr) -> Location:
    """The line that creates the module that is called: assigns its name, or the attribute of an object."""
    if isinstance(function, ast.Attribute):
        lines = worlds.executed()
        assignments = attribute_assignments([location.file], function.attr)
        executed = [Location(file, node.lineno) for file, node in assignments if (file, node.lineno) in lines]
        return executed[-1] if executed else location
    return assigned(location, function)


CHECK = Check(
    "SS701",
    "replicated-frozen-model",
    "warning",
    "the memory of N ranks holds N copies of weights that never change",
    "shard the model over the ranks, let one rank serve the others, or keep one copy per node: run.teacher(..., "
    "placement=...)",
    find,
)
