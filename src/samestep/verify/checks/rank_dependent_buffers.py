"""Buffers that each rank updates from its own samples.

What it compares: the buffers of models, losses and other modules that training calls, between the ranks after every
step, without the statistics of normalization layers; `--strict` reports BatchNorm that is not synchronized.

Fault: the codebook of a VQ-VAE that is a moving average over the samples of one rank. DDP then sends the buffers of
rank 0 to all ranks before the next forward pass, and the samples of the others are lost.

Repair: `dist.all_reduce` of the statistics before the buffers are updated.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.messages import format_list
from samestep.verify.check import Check, Worlds, counted
from samestep.verify.source import tree_of

_MIN_STEPS = 2


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the buffers of the ranks."""
    ranks = worlds.many.ranks
    if len(ranks) < 2:
        return
    differing = dict[str, int]()
    for steps in zip(*(trace.steps for trace in ranks), strict=False):
        for name in steps[0].buffers:
            hashes = {step.buffers.get(name) for step in steps}
            if len(hashes) > 1 and None not in hashes:
                differing[name] = differing.get(name, 0) + 1
    names = [name for name, count in differing.items() if count >= _MIN_STEPS]
    if names:
        yield CHECK.finding(
            _update(worlds, [name.rpartition(".")[2].rstrip("'") for name in names]),
            f"{counted(len(names), 'buffer')} differ{'s' * (len(names) == 1)} between the ranks in "
            f"{counted(differing[names[0]], 'step')} ({format_list(names, 3)}): "
            "each rank updates them from its own samples",
            ranks=range(len(ranks)),
        )


def _update(worlds: Worlds, names: list[str]) -> Location | None:
    """The first executed statement that changes one of the buffers in place."""
    found = list[Location]()
    for file in worlds.files:
        for node in ast.walk(tree_of(file)):
            match node:
                case ast.Expr(value=ast.Call(func=function)):
                    parts = ast.walk(function)
                case ast.Assign(targets=targets):
                    parts = (part for target in targets for part in ast.walk(target))
                case ast.AugAssign(target=target):
                    parts = ast.walk(target)
                case _:
                    continue
            changes = any(isinstance(each, ast.Attribute) and each.attr in names for each in parts)
            if changes and (file, node.lineno) in worlds.executed():
                found.append(Location(file, node.lineno))
    return min(found, default=None)


CHECK = Check(
    "SS210",
    "rank-dependent-buffers",
    "error",
    "the ranks train with different buffers, or with those of rank 0, and a checkpoint holds those of one rank",
    "reduce the statistics over all ranks before you update the buffers",
    find,
)
