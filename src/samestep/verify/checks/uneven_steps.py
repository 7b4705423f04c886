"""Ranks take different numbers of optimizer steps.

What it compares: how often each rank calls `optimizer.step()`, in runs that end without an error.

Fault: `if rank == 0: optimizer.step()`, or a step that is skipped on a rank that sees a NaN in its own loss.

Repair: call `optimizer.step()` on every rank, and decide together whether to skip one.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.control_flow import early_exit


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the numbers of steps."""
    ranks = worlds.many.ranks
    if len(ranks) < 2 or worlds.many.failed or any(trace.of("join") for trace in ranks):
        return
    counts = [len(trace.steps) for trace in ranks]
    if len(set(counts)) == 1:
        return
    most, least = ranks[counts.index(max(counts))], ranks[counts.index(min(counts))]
    text = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    location = first(most.steps[-1].site)
    yield CHECK.finding(
        (early_exit(location, least.executed) if location is not None else None) or location,
        f"the ranks take different numbers of optimizer steps ({text})",
        ranks=[most.rank],
    )


CHECK = Check(
    "SS606",
    "uneven-steps",
    "error",
    "the weights of the ranks differ from the first step that only some of them take",
    "call optimizer.step() on every rank, and agree on steps to skip",
    find,
)
