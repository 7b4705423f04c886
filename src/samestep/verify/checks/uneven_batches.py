"""Ranks have different numbers of batches.

What it compares: how many batches each rank trains on in an epoch, not how many its loader has: a script may stop after
the smallest number. Of data that is sliced by hand: whether a rank is done while others train. Steps inside of
`join()` are not reported, and neither are ranks that make the same steps, because one without data runs along.

Fault: an IterableDataset or a hand-made slice that gives one rank more batches than another. DDP waits in the extra
step for a rank that never comes.

Repair: a DistributedSampler, which gives all ranks the same number; `with model.join():` around the loop; or
`run.shard` and `run.stream`, in which all ranks have the same steps.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first, same_on_all
from samestep.verify.checks.duplicated_data import loader_location
from samestep.verify.control_flow import find_branch, find_divergence, shared_points
from samestep.verify.source import sharding_statement


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the numbers of batches."""
    ranks = worlds.many.ranks
    if len(ranks) < 2 or any(trace.of("join") for trace in ranks):
        return
    if not any(trace.epochs_of("train") for trace in ranks):
        yield from _uneven_parts(worlds)
    for epochs in zip(*(trace.epochs_of("train") for trace in ranks), strict=False):
        if not same_on_all(epoch.loader.dataset.partition(":")[0] for epoch in epochs):
            return
        counts = [len(epoch.batches) for epoch in epochs]
        shortest = epochs[counts.index(min(counts))]
        is_used = worlds.many.failed or not same_on_all(len(trace.steps) for trace in ranks)
        if not same_on_all(counts) and shortest.is_complete and is_used:
            text = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
            loader = epochs[0].loader
            yield CHECK.finding(
                loader_location(worlds, loader) or first(loader.site),
                f"the ranks have different numbers of batches in an epoch ({text})",
                ranks=[rank for rank, count in enumerate(counts) if count != counts[0]],
            )
            return


def _uneven_parts(worlds: Worlds) -> Iterator[Finding]:
    """Report parts of different lengths that ranks take by hand: a rank is done, and others wait in a backward pass."""
    world = worlds.many
    divergence = find_divergence(world.ranks) if world.failed else None
    location = sharding_statement(worlds.files, worlds.executed())
    if divergence is None or location is None or find_branch(world.ranks, divergence) is not None:
        return
    done = [rank for rank, point in divergence.points.items() if point is None and world[rank].ending.code == 0]
    waiting = [rank for rank, point in divergence.points.items() if point is not None and point.is_wrapper]
    if done and len(done) + len(waiting) == len(world.ranks):
        counts = {trace.rank: sum(point.is_wrapper for point in shared_points(trace)) - 1 for trace in world}
        yield CHECK.finding(
            location,
            f"the parts that the ranks take have different lengths: rank {waiting[0]} starts step "
            f"{counts[waiting[0]]}, while rank {done[0]} is done after {counts[done[0]]}",
            ranks=waiting,
        )


CHECK = Check(
    "SS108",
    "uneven-batches",
    "error",
    "a rank with more batches waits in its extra step for ranks that never come: the run hangs at the end of the epoch",
    "give all ranks the same number of batches: use a DistributedSampler, drop the remainder, or train inside of "
    "model.join()",
    find,
)
