"""Several ranks write to the same file.

What it compares: the files that each rank writes, and whether anything orders these writes: a collective, as for ranks
that take turns, a message, or a lock. Files that are opened to change parts of them (`r+`), databases of SQLite, which
locks them itself, and caches are not reported. A file or a folder that one rank removes while another one uses it is,
and so are a file that several ranks remove, a folder that several ranks create if one of them fails, and event files
of TensorBoard that several ranks write to one folder.

Fault: `torch.save(state, "checkpoints/last.pt")` on every rank. The file is usually right and sometimes corrupt.

Repair: write on rank 0: `if rank == 0: torch.save(...)`, or `checkpoint.save()`.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location, relative_path
from samestep.verify.check import Check, Worlds, first
from samestep.verify.file_order import FileOrder
from samestep.verify.rank_trace import WorldTrace
from samestep.verify.trace_events import FileEvent

_MOST = 5


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for paths that several ranks write between the same two collectives."""
    for world in (worlds.many, worlds.nodes):
        if world is None:
            continue
        order = FileOrder(world.ranks)
        found = _written_by_several(world, order)
        where = " if every rank is on a separate node" if world is worlds.nodes else ""
        for location, (path, ranks) in list(found.items())[:_MOST]:
            yield CHECK.finding(
                location,
                f"{relative_path(path)} is opened for writing by {len(ranks)} ranks at the same time{where}",
                ranks=ranks,
            )
        if found:
            return
        removal = next(_removals(world, order), None) or _changed_by_several(world, order)
        if removal is not None:
            yield removal
            return


def _written_by_several(world: WorldTrace, order: FileOrder) -> dict[Location | None, tuple[str, list[int]]]:
    """Paths that several ranks write in no order, with these ranks, by the line that writes."""
    writes = dict[str, dict[int, list[FileEvent]]]()
    for trace in world:
        for event in trace.files:
            if event.action in ("write", "rename") and event.path not in order.locks:
                writes.setdefault(event.path, {}).setdefault(trace.rank, []).append(event)
    found = dict[Location | None, tuple[str, list[int]]]()
    for path, by_rank in writes.items():
        ranks = sorted(by_rank)
        pairs = [(rank, other) for rank in ranks for other in ranks if rank < other]
        if any(_are_concurrent(order, rank, by_rank[rank], other, by_rank[other]) for rank, other in pairs):
            event = next(iter(by_rank.values()))[0]
            found.setdefault(first(event.site), (path, sorted(by_rank)))
    return found


def _changed_by_several(world: WorldTrace, order: FileOrder) -> Finding | None:
    """A file that several ranks remove, or a folder that they create, if a rank has failed there."""
    for action, error, what in (("remove", "", "removed"), ("mkdir", "FileExistsError", "created")):
        failed = [trace.ending.site[0] for trace in world if trace.ending.error == error and trace.ending.site]
        for trace in world:
            for event in (each for each in trace.files if each.action == action and each.path not in order.locks):
                if error and not any(location in event.site for location in failed):
                    continue
                ranks = [
                    other.rank
                    for other in world
                    for each in other.files
                    if other is not trace
                    and (each.action, each.path) == (action, event.path)
                    and _are_concurrent(order, trace.rank, [event], other.rank, [each])
                ]
                if ranks:
                    return CHECK.finding(
                        first(event.site),
                        f"{relative_path(event.path)} is {what} by {len(ranks) + 1} ranks at the same time",
                        ranks=sorted({trace.rank, *ranks}),
                        consequence="a rank fails if another one was faster",
                        repair="let rank 0 alone do it, and call dist.barrier() before others use the folder",
                    )
    return None


def _removals(world: WorldTrace, order: FileOrder) -> Iterator[Finding]:
    """Files and folders that a rank removes, while nothing keeps another rank from reading or writing them."""
    for trace in world:
        for removed in (event for event in trace.files if event.action in ("rmtree", "remove")):
            for other in (each for each in world if each is not trace):
                lost = [
                    each
                    for each in other.files
                    if each.action in ("read", "write", "rename")
                    and (each.path == removed.path or each.path.startswith(f"{removed.path}/"))
                    and each.path not in order.locks
                    and _are_concurrent(order, trace.rank, [removed], other.rank, [each])
                ]
                if lost:
                    uses = "reads" if lost[0].action == "read" else "writes"
                    yield CHECK.finding(
                        first(removed.site),
                        f"rank {trace.rank} removes {relative_path(removed.path)}, while rank {other.rank} {uses} "
                        f"{relative_path(lost[0].path)}, and nothing orders the two",
                        ranks=sorted((trace.rank, other.rank)),
                        related=[each for each in [first(lost[0].site)] if each],
                        consequence="files disappear before they are used, depending on which rank is faster",
                        repair="call dist.barrier() before a rank removes what others have used, and before "
                        "others use what it creates again",
                    )


def _are_concurrent(order: FileOrder, rank: int, events: list[FileEvent], other: int, others: list[FileEvent]) -> bool:
    """Whether nothing orders a write of one rank and one of another."""
    return any(
        not order.is_ordered(rank, a, other, b) and not order.is_ordered(other, b, rank, a)
        for a in events
        for b in others
    )


CHECK = Check(
    "SS501",
    "file-written-by-several-ranks",
    "error",
    "the writes interleave: rows appear twice or are lost, and a checkpoint may be corrupt",
    "write on rank 0 only, or to a file per rank",
    find,
)
