"""Data workers that draw the same random numbers.

What it compares: the random numbers that the data workers of a rank draw, in their order, and those of all ranks, if
the script seeds its workers itself. Workers of an iterable dataset that draw from a generator that they pass are not
compared: all may make the same stream, of which each yields a part.

Fault: `np.random.seed(42)` in `worker_init_fn`: all workers, in all epochs, augment with the same numbers. Or
`np.random.seed(worker_id)`: those of all ranks do.

Repair: `np.random.seed(torch.initial_seed() % 2**32 + rank)`, since torch gives every worker another seed.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.same_noise import have_same_data

_MIN_DRAWS = 8


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare the draws of the data workers of each rank."""
    has_stream = any(loader.is_iterable for trace in worlds.many for loader in trace.loaders.values())
    workers = [
        each
        for each in worlds.many.workers
        if len(each.draws) >= _MIN_DRAWS and not (has_stream and each.has_generator)  # all make the stream alike
    ]
    for one in workers:
        for other in workers:
            if one.draws[:_MIN_DRAWS] != other.draws[:_MIN_DRAWS]:
                continue
            seeds = [site for value, site in one.seeds if site and any(value == each for each, _ in other.seeds)]
            same = min(len(one.draws), len(other.draws))
            if one.rank == other.rank and one.number < other.number:
                who = f"data workers {one.number} and {other.number} of rank {one.rank}"
            elif (
                one.rank < other.rank and one.number == other.number and seeds and not have_same_data(worlds.many.ranks)
            ):
                who = f"data workers {one.number} of ranks {one.rank} and {other.rank}"
            else:
                continue
            yield CHECK.finding(
                first(seeds[-1] if seeds else one.site),
                f"{who} draw the same random numbers (the first {same} draws are compared)",
                ranks=sorted({one.rank, other.rank}),
                related=one.site[:1],
            )
            return


CHECK = Check(
    "SS113",
    "same-worker-noise",
    "error",
    "samples of different workers are augmented alike, so there is less variety than it seems",
    "seed each worker differently: torch.initial_seed() differs between workers; add the rank",
    find,
)
