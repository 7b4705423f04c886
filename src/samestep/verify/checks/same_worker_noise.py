"""Data workers that draw the same random numbers.

What it compares: the random numbers that the data workers of a rank draw, in their order, and those of all ranks, if
the script seeds its workers itself. Workers of an iterable dataset that draw from a generator that they pass are not
compared: all may make the same stream, of which each yields a part.

Fault: `np.random.seed(42)` in `worker_init_fn`: all workers, in all epochs, augment with the same numbers. Or
`np.random.seed(worker_id)`: those of all ranks do.

Repair: `np.random.seed(torch.initial_seed() % 2**32 + rank)`, since torch gives every worker another seed.
"""

import ast
from collections.abc import Iterator
from dataclasses import replace

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first
from samestep.verify.checks.same_noise import have_same_data
from samestep.verify.source import argument, call_named, find_calls, function_at, origin

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
                _generator_seed(worlds, first(seeds[-1])) if seeds else first(one.site),
                f"{who} draw the same random numbers (the first {same} draws are compared)",
                ranks=sorted({one.rank, other.rank}),
                related=one.site[:1],
            )
            return


def _generator_seed(worlds: Worlds, seed: Location | None) -> Location | None:
    """The line that seeds the workers; if they take the seed of torch, that of the generator of their loader."""
    if seed is None or not find_calls(seed.file, ["initial_seed"], function_at(seed)):
        return seed
    for loader in worlds.many[0].loaders.values():
        location = first(loader.site) if loader.workers else None
        call = call_named(location, ["DataLoader"]) if location is not None else None
        generator = argument(call, "generator") if call is not None else None
        if location is None or not isinstance(generator, ast.Name):
            continue
        seeds = [
            each.lineno
            for each in find_calls(location.file, ["manual_seed"], function_at(location))
            if generator.id in {node.id for node in ast.walk(each) if isinstance(node, ast.Name)}
            and (location.file, each.lineno) in worlds.executed()
        ]
        return replace(location, line=seeds[-1]) if seeds else origin(location, generator)
    return seed


CHECK = Check(
    "SS113",
    "same-worker-noise",
    "error",
    "samples of different workers are augmented alike, so there is less variety than it seems",
    "seed each worker differently: torch.initial_seed() differs between workers; add the rank",
    find,
)
