"""A rank reads a file that another one may not have written yet.

What it compares: files that one rank writes and another one reads, without anything in between that lets the reader
wait: a collective, a broadcast by the writer, a key of a store, a lock, or a file that appears complete by a rename.
verify delays the writes of rank 0, so that such a script fails instead of working by chance.

Fault: `if rank == 0: build_vocab("vocab.json")`, then `json.load(open("vocab.json"))` on every rank, without a barrier.

Repair: `dist.barrier()` between them, or `run.once(build_vocab, "vocab.json")`.
"""

from collections.abc import Iterator

from samestep.findings import Finding, relative_path
from samestep.verify.check import Check, Worlds, first
from samestep.verify.control_flow import find_divergence, is_branch_of_one_rank
from samestep.verify.file_order import FileOrder
from samestep.verify.trace_events import FileEvent


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for reads and writes of the same path between the same two collectives."""
    order = FileOrder(worlds.many.ranks)
    writes = dict[str, list[tuple[int, FileEvent]]]()
    for trace in worlds.many:
        for event in trace.files:
            if event.action in ("write", "rename"):
                writes.setdefault(event.path, []).append((trace.rank, event))
    for trace in worlds.many:
        own = {path for path, events in writes.items() if any(rank == trace.rank for rank, _ in events)}
        for event in trace.files:
            if event.action != "read" or event.path in own or event.path in order.locks:
                continue
            races = [
                (rank, write)
                for rank, write in writes.get(event.path, [])
                if not order.is_ordered(rank, write, trace.rank, event)
                and not order.is_ordered(trace.rank, event, rank, write)
            ]
            if races and not _has_own_barrier(worlds):
                rank, write = races[0]
                yield CHECK.finding(
                    first(event.site),
                    f"rank {trace.rank} reads {relative_path(event.path)}, which rank {rank} writes at "
                    f"{first(write.site)}, without waiting for it",
                    ranks=[rank, trace.rank],
                    related=[each for each in [first(write.site)] if each],
                )
                return


def _has_own_barrier(worlds: Worlds) -> bool:
    """Whether the writer waits in a collective that the reader leaves out: this is another check."""
    divergence = find_divergence(worlds.many.ranks) if worlds.many.failed else None
    return divergence is not None and is_branch_of_one_rank(worlds.many.ranks, divergence)


CHECK = Check(
    "SS502",
    "unsynchronized-read",
    "error",
    "the rank finds no file, half of it or an old one, depending on which rank is faster",
    "call dist.barrier() on all ranks between writing and reading, or use run.once",
    find,
)
