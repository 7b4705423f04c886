"""Several ranks write to the same file.

What it compares: the files that each rank writes, and whether anything orders these writes: a collective, as for ranks
that take turns, a message, or a lock. Files that are opened to change parts of them (`r+`), databases of SQLite, which
locks them itself, and caches are not reported.

Fault: `torch.save(state, "checkpoints/last.pt")` on every rank. The file is usually right and sometimes corrupt.

Repair: write on rank 0: `if rank == 0: torch.save(...)`, or `checkpoint.save()`.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location, relative_path
from samestep.verify.check import Check, Worlds, first
from samestep.verify.file_order import FileOrder
from samestep.verify.trace_events import FileEvent

_MOST = 5


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for paths that several ranks write between the same two collectives."""
    for world in (worlds.many, worlds.nodes):
        if world is None:
            continue
        order = FileOrder(world.ranks)
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
        where = " if every rank is on a separate node" if world is worlds.nodes else ""
        for location, (path, ranks) in list(found.items())[:_MOST]:
            yield CHECK.finding(
                location,
                f"{relative_path(path)} is opened for writing by {len(ranks)} ranks at the same time{where}",
                ranks=ranks,
            )
        if found:
            return


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
