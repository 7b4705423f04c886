"""A rank does not come to a collective.

What it compares: which collectives the ranks have called when they stop making progress, or when one of them has waited
longer than the timeout of the process group. It is reported if a rank has neither called the collective in which the
others wait, nor ended.

Fault: rank 0 alone downloads, evaluates or converts for longer than the timeout, or waits for input.

Repair: do long work before the process group is created, or raise its timeout.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.control_flow import find_divergence
from samestep.verify.rank_trace import RankTrace, WorldTrace


def find(worlds: Worlds) -> Iterator[Finding]:
    """Report ranks that run while others wait."""
    world = worlds.many
    if not (world.run.hung or world.run.timed_out or has_timed_out(world)):
        return
    divergence = find_divergence(world.ranks)
    if divergence is None:
        return
    elsewhere = [rank for rank, point in divergence.points.items() if point is None and world[rank].ending.code is None]
    waiting = {rank: point for rank, point in divergence.points.items() if point is not None}
    if not elsewhere or not waiting:
        return
    rank, point = elsewhere[0], next(iter(waiting.values()))
    position = world[rank].position
    yield CHECK.finding(
        position,
        f"rank {rank} does not come to {point.name} at {first(point.site)}, in which rank {min(waiting)} waits: it is "
        f"at {position}",
        ranks=elsewhere,
    )


def has_timed_out(world: WorldTrace) -> bool:
    """Whether a rank has failed since it waited longer than the timeout, while another one was in no collective."""
    waited = any(word in trace.ending.message for trace in world for word in ("Timed out", "timeout"))
    return waited and any(trace.ending.code is None and not _is_waiting(trace) for trace in world)


def _is_waiting(trace: RankTrace) -> bool:
    """Whether a rank is in a collective, or in a call at the line of the last one, such as new_group."""
    position = trace.position
    return any(not call.is_complete for call in trace.collectives[-1:]) or any(
        not point.is_complete
        or (position is not None and (position.file, position.line) in {(each.file, each.line) for each in point.site})
        for point in trace.sync_points[-1:]
    )


CHECK = Check(
    "SS306",
    "rank-elsewhere",
    "error",
    "the other ranks wait until the timeout, and the run fails",
    "find out what keeps this rank at its line, or give the process group a longer timeout",
    find,
)
