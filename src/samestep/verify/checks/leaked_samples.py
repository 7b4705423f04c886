"""Samples that one rank trains on and another one evaluates.

What it compares: the samples that all ranks train on with those that all ranks evaluate. It is reported if they overlap
on several ranks, but not on one.

Fault: `random_split(dataset, [0.8, 0.2])` after `torch.manual_seed(seed + rank)`. Every rank has another split.

Repair: split with a generator that has the same seed on all ranks: `random_split(dataset, [0.8, 0.2],
generator=torch.Generator().manual_seed(0))`.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first
from samestep.verify.rank_trace import RankTrace, WorldTrace
from samestep.verify.source import find_calls
from samestep.verify.trace_events import Role

_SPLITS = ("random_split", "train_test_split", "randperm", "permutation", "shuffle", "sample", "KFold", "ShuffleSplit")


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare training and evaluation over all ranks."""
    if worlds.one is None or len(worlds.many.ranks) < 2:
        return
    overlap = _overlap(worlds.many)
    if not overlap or _overlap(worlds.one):
        return
    within = [len(_samples(trace, "train") & _samples(trace, "eval")) for trace in worlds.many]
    evaluated = len(set[tuple[str, str]]().union(*(_samples(trace, "eval") for trace in worlds.many)))
    if any(within):
        return
    yield CHECK.finding(
        split_line(worlds) or first(next(iter(worlds.many[0].loaders.values())).site),
        f"{len(overlap)} of {evaluated} evaluated samples are training samples of another rank",
    )


def _overlap(world: WorldTrace) -> set[tuple[str, str]]:
    trained = set[tuple[str, str]]().union(*(_samples(trace, "train") for trace in world))
    return trained & set[tuple[str, str]]().union(*(_samples(trace, "eval") for trace in world))


def _samples(trace: RankTrace, role: Role) -> set[tuple[str, str]]:
    return {
        (epoch.loader.dataset, sample)
        for epoch in trace.epochs_of(role)
        if epoch.batches and epoch.batches[0].indices is not None
        for sample in epoch.samples
    }


def split_line(worlds: Worlds) -> Location | None:
    """The first executed line that splits data, or draws the order for it."""
    executed = worlds.executed()
    for file in worlds.files:
        for call in find_calls(file, _SPLITS):
            if (file, call.lineno) in executed:
                return Location(file, call.lineno)
    return None


CHECK = Check(
    "SS107",
    "leaked-evaluation-data",
    "error",
    "the model has trained on samples that the metric counts, so the metric is too good",
    "split the data the same way on every rank: pass a generator with a fixed seed to random_split",
    find,
)
