"""A rank leaves the training loop before the others.

What it compares: which calls the ranks make after the last one that they share. It is reported if a rank has ended
without an error, while others still wait for it.

Fault: `if stopper.should_stop(val_loss): break` with the validation loss of each rank's own shard. One rank leaves, and
the others wait in the backward pass.

Repair: decide together: reduce the value over all ranks before the decision, or broadcast the decision of rank 0.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.diverging_collectives import describe_each
from samestep.verify.control_flow import condition_of, find_branch, find_divergence


def find(worlds: Worlds) -> Iterator[Finding]:
    """Report ranks that have ended while others call a collective."""
    world = worlds.many
    divergence = find_divergence(world.ranks) if world.failed else None
    if divergence is None:
        return
    left = [
        rank
        for rank, point in divergence.points.items()
        if point is None and world[rank].ending.code == 0 and not world[rank].ending.error
    ]
    waiting = {rank: point for rank, point in divergence.points.items() if point is not None}
    if not left or not waiting:
        return
    branch = find_branch(world.ranks, divergence)
    point = next(iter(waiting.values()))
    condition = condition_of(branch[1]) if branch else ""
    location = branch[1] if branch and condition else world[left[0]].position
    steps = ", ".join(f"rank {trace.rank}: {len(trace.steps)}" for trace in world)
    why = f": the ranks take different ways at `{condition}`" if condition else ""
    yield CHECK.finding(
        location,
        f"rank {left[0]} has ended while rank {min(waiting)} calls {point.name} at {first(point.site)}{why}",
        evidence=[*describe_each(world.ranks, divergence), f"optimizer steps of each rank: {steps}"],
        ranks=left,
    )


CHECK = Check(
    "SS304",
    "rank-left-early",
    "error",
    "the other ranks wait for it until the timeout",
    "let all ranks decide alike: reduce or broadcast the value that the decision depends on",
    find,
)
