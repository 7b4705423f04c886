"""A collective that not all ranks call.

What it compares: the collectives of all ranks in their order, with the lines that call them; and the lines that the
ranks executed since the last collective that they share, which shows the branch that they took differently. It also
looks for collectives that a rank calls only if it finds no file, while another rank may have written this file already.

Fault: `if rank == 0: accuracy = evaluate(model, loader)`, where `evaluate` ends with `dist.all_reduce`. Rank 0 waits
for ranks that are elsewhere.

Repair: call the collective on every rank, and print its result on rank 0 only.
"""

import signal
from collections.abc import Iterator

from samestep.findings import Finding, Location, relative_path
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.rank_elsewhere import has_timed_out
from samestep.verify.control_flow import (
    LOOPS,
    Divergence,
    condition_of,
    differing_frame,
    find_branch,
    find_divergence,
    frame_inside,
    in_same_function,
    is_branch_of_one_rank,
    is_guarded,
)
from samestep.verify.file_order import FileOrder
from samestep.verify.rank_trace import RankTrace
from samestep.verify.trace_events import SyncPoint


def find(worlds: Worlds) -> Iterator[Finding]:
    """Report the first collective in which the ranks differ, if the run failed."""
    world = worlds.many
    divergence = find_divergence(world.ranks, world.failed)
    if divergence is None:
        yield from _after_a_look(worlds)
        return
    if divergence.is_shape_only:
        return
    is_certain = is_branch_of_one_rank(world.ranks, divergence)
    if not is_certain and not is_root(world.ranks, divergence):
        return
    points = divergence.points
    gone = [world[rank] for rank, point in points.items() if point is None and world[rank].ending.code is not None]
    if world.failed and not is_certain and not all(_was_in_collective(worlds, trace) for trace in gone):
        return  # a rank that has left: another check
    if all(point is None or point.is_wrapper for point in points.values()):
        return
    if has_timed_out(world) and any(point is None for point in points.values()):
        return  # a rank that works longer than the others wait: another check
    location, extra, why = locate(world.ranks, divergence)
    if extra is not None and extra.is_wrapper:
        return
    yield CHECK.finding(
        location,
        f"the ranks differ in collective {divergence.number + 1}: {describe(world.ranks, divergence)}{why}",
        evidence=describe_each(world.ranks, divergence),
        ranks=sorted(points),
        related=[each for point in points.values() if point and (each := first(point.site)) and each != location],
    )


def _after_a_look(worlds: Worlds) -> Iterator[Finding]:
    """Collectives that a rank calls because it has found no file, which another rank writes at about that time."""
    world, order = worlds.many, FileOrder(worlds.many.ranks)
    writes = [(trace.rank, each) for trace in world for each in trace.files if each.action in ("write", "rename")]
    for trace in world:
        for missed in (each for each in trace.files if each.action == "miss"):
            location = first(missed.site)
            inside = [point for point in trace.sync_points if location and frame_inside(point.site, location)]
            for rank, write in writes if inside else ():
                if rank == trace.rank or write.path != missed.path:
                    continue
                if not order.is_ordered(trace.rank, missed, rank, write):
                    yield CHECK.finding(
                        location,
                        f"rank {trace.rank} calls {inside[0].name} because it finds no {relative_path(missed.path)}, "
                        f"which rank {rank} writes without waiting for it: a rank that looks later calls nothing",
                        ranks=sorted((rank, trace.rank)),
                        related=[each for each in (first(inside[0].site), first(write.site)) if each],
                        repair="look for the file on rank 0 only, and call the collective on every rank",
                    )
                    return


def is_root(ranks: list[RankTrace], divergence: Divergence) -> bool:
    """Whether the ranks differ by themselves, and not because one of them has failed with another error."""
    return not any(
        divergence.points[trace.rank] is None and trace.ending.error and not is_connection_error(trace)
        for trace in ranks
    )


def is_connection_error(trace: RankTrace) -> bool:
    """Whether a rank failed only because another one has left."""
    text = f"{trace.ending.error}: {trace.ending.message}"
    words = ("gloo", "Connection", "Timed out", "Wait timeout", "DistBackendError", "NCCL", "TCPStore", "peer")
    return any(word in text for word in words)


def _was_in_collective(worlds: Worlds, trace: RankTrace) -> bool:
    """Whether a rank has failed in a collective of FSDP, which the script does not call itself."""
    crash = trace.ending.code == -signal.SIGABRT and "gloo::" in worlds.many.run.outputs.get(trace.rank, "")
    return crash or (bool(trace.ending.error) and is_connection_error(trace))


def locate(ranks: list[RankTrace], divergence: Divergence) -> tuple[Location | None, SyncPoint | None, str]:
    """The line of the call that only some ranks make, the call, and under which condition."""
    branch = find_branch(ranks, divergence)
    if branch is not None:
        trace, line, _ = branch
        condition = condition_of(line)
        for rank in (trace.rank, *(each for each in divergence.points if each != trace.rank)):
            point = divergence.points[rank]
            inside = frame_inside(point.site, line) if point is not None else None
            if inside is not None and condition:
                return inside, point, f"; rank {rank} is there because of `{condition}` at {line}"
        for point in divergence.points.values():  # a rank has left the function of this one before the call
            same = [each for each in point.site if in_same_function(each, line)] if point is not None else []
            if same and condition and len({str(each and each.site) for each in divergence.points.values()}) > 1:
                is_wrapper = "<locals>" in line.function  # such as that of a decorator, which calls what it decorates
                where = point.site[0] if is_wrapper and point is not None else same[0]
                return where, point, f"; other ranks leave {line.function} at `{condition}` in line {line.line}"
        if condition:
            return line, None, f"; the ranks take different ways at `{condition}`"
    longer = _longer_loop(ranks, divergence) if branch is None else None
    if longer is not None:
        return longer
    called = [point for point in divergence.points.values() if point is not None]
    if len(called) >= 2:
        candidates = [(differing_frame(a.site, b.site), a) for a in called for b in called if a is not b]
        guarded = [(each, point) for each, point in candidates if each is not None and is_guarded(each)]
        if guarded:
            return guarded[0][0], guarded[0][1], ""
    point = next(iter(called), None)
    return (first(point.site) if point else None), point, ""


def _longer_loop(
    ranks: list[RankTrace], divergence: Divergence
) -> tuple[Location | None, SyncPoint | None, str] | None:
    """The collective in a loop that one rank repeats more often than another one."""
    found = find_branch(ranks, divergence, LOOPS)
    point = divergence.points[found[0].rank] if found is not None else None
    if found is None or point is None or point.is_wrapper:
        return None
    inside = frame_inside(point.site, found[1], LOOPS)
    text = f"; rank {found[0].rank} repeats it more often in `{condition_of(found[1])}` at {found[1]}"
    return (inside, point, text) if inside is not None else None


def describe(ranks: list[RankTrace], divergence: Divergence) -> str:
    """What each rank called, in one line."""
    parts = list[str]()
    for rank, point in divergence.points.items():
        parts.append(f"rank {rank} {_describe(ranks[rank], point)}{_difference(divergence, point)}")
    return ", ".join(parts)


def _difference(divergence: Divergence, point: SyncPoint | None) -> str:
    """In what a call differs from that of another rank at the same line: the batch that it belongs to, or the root."""
    others = [each for each in divergence.points.values() if each is not None]
    if point is None or len({(each.name, first(each.site)) for each in others}) == len(others):
        return ""
    if len({each.batches for each in others}) > 1:
        return f" for batch {point.batches}"
    return f" with root {point.root}" if len({each.root for each in others}) > 1 else ""


def _describe(trace: RankTrace, point: SyncPoint | None) -> str:
    if point is not None:
        return f"calls {point.name} at {first(point.site)}"
    if trace.ending.error:
        return f"fails at {first(trace.ending.site)}"
    if trace.ending.code is not None:
        return "has ended"
    return f"is at {trace.position}"


def describe_each(ranks: list[RankTrace], divergence: Divergence) -> list[str]:
    """What each rank called, a line each, with its source."""
    lines = list[str]()
    for rank, point in divergence.points.items():
        location = first(point.site) if point is not None else ranks[rank].position
        source = f": {location.source}" if location is not None and location.source else ""
        lines.append(f"rank {rank} {_describe(ranks[rank], point)}{_difference(divergence, point)}{source}")
    return lines


CHECK = Check(
    "SS301",
    "collective-on-some-ranks",
    "error",
    "the ranks wait for each other until the timeout, or exchange data that does not belong together",
    "call the collective on every rank, in the same order; do only output under a condition on the rank",
    find,
)
