"""A DDP or FSDP model that not all ranks call.

What it compares: the calls in which DDP communicates (the forward pass of a model with buffers, and the backward pass),
and the forward passes of FSDP, with what the other ranks call at the same time.

Fault: `if rank == 0: validate(model, loader)` with a DDP model that has BatchNorm. Its forward pass broadcasts the
buffers, and the other ranks are in `dist.barrier()`. Or a model in FSDP that generates until each rank has its own end.

Repair: validate with `model.module` on one rank, or with the wrapper on all ranks.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.diverging_collectives import describe, describe_each, is_root, locate
from samestep.verify.control_flow import find_divergence


def find(worlds: Worlds) -> Iterator[Finding]:
    """Report a call of a wrapper in which the ranks differ, if the run failed."""
    world = worlds.many
    divergence = find_divergence(world.ranks) if world.failed else None
    if divergence is None or divergence.is_shape_only or not is_root(world.ranks, divergence):
        return
    points = divergence.points
    if any(point is None and world[rank].ending.code is not None for rank, point in points.items()):
        return
    location, extra, why = locate(world.ranks, divergence)
    is_only_wrapper = all(point is None or point.is_wrapper for point in points.values())
    if not is_only_wrapper and (extra is None or not extra.is_wrapper):
        return
    yield CHECK.finding(
        location,
        f"the ranks differ in call {divergence.number + 1}: {describe(world.ranks, divergence)}{why}",
        evidence=describe_each(world.ranks, divergence),
        ranks=sorted(points),
        related=[each for point in points.values() if point and (each := first(point.site)) and each != location],
    )


CHECK = Check(
    "SS305",
    "wrapper-on-some-ranks",
    "error",
    "the wrapper communicates in this call, so the ranks wait for each other until the timeout",
    "call model.module where one rank works alone, or call the wrapper on every rank",
    find,
)
