"""Samples that are evaluated more than once.

What it compares: how often each sample is evaluated by all ranks together, and the numbers that are reduced or printed
after it with those of one rank. If every rank, or only one, evaluates the whole set, nothing is reported, nor if the
script or Accelerate's `gather_for_metrics` removes what was repeated.

Fault: `DistributedSampler(val_set)` with 51 samples on 2 ranks repeats one sample, so that both ranks have 26. The
accuracy counts it twice, and depends on the number of ranks.

Repair: a sampler that does not pad, such as `list(range(rank, len(val_set), world_size))`, and sums and counts that
are reduced over the ranks; or `run.shard(val_set)`, in which padding has weight zero.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first, pair_by, reports
from samestep.verify.checks.duplicated_data import loader_location
from samestep.verify.rank_trace import RankTrace
from samestep.verify.trace_events import CollectiveCall, Epoch, Site

_TOLERANCE = 1e-5
_ACCELERATE_REPAIR = (
    "use accelerator.gather_for_metrics instead of accelerator.gather: it removes the samples that were repeated"
)


def find(worlds: Worlds) -> Iterator[Finding]:
    """Count the samples of the evaluations of all ranks."""
    ranks = worlds.many.ranks
    if len(ranks) < 2 or any(evaluation.dedups for trace in ranks for evaluation in trace.evaluations):
        return
    for epochs in pair_by([trace.epochs_of("eval") for trace in ranks], lambda epoch: (epoch.loader.site, epoch.site)):
        sets = [set(epoch.samples) for epoch in epochs]
        union = set[str]().union(*sets)
        loader = epochs[0].loader
        if loader.replacement or not union or loader.is_iterable:
            continue
        is_sharded = all(len(each) <= 0.75 * len(union) for each in sets)
        counts = Counter(sample for epoch in epochs for sample in epoch.samples)
        repeated = [sample for sample, count in counts.items() if count > 1]
        if is_sharded and repeated and _reaches_metric(worlds, epochs):
            location = first(loader.sampler_site) if loader.distributed else None
            is_framework = location is None or "Sampler" not in location.source
            gathered = _gathered_at(ranks[0])
            if gathered is not None:
                location, is_framework = gathered, False
            yield CHECK.finding(
                location if not is_framework else loader_location(worlds, loader),
                f"an evaluation counted {counts.total()} samples of a set of {len(union)}: sample {repeated[0]} "
                f"was evaluated {counts[repeated[0]]} times",
                evidence=[
                    f"rank {trace.rank} evaluated {len(epoch.samples)} samples"
                    for trace, epoch in zip(ranks, epochs, strict=True)
                ],
                severity="warning" if is_framework else "error",
                repair=_ACCELERATE_REPAIR if ranks[0].of("accelerate") else "",
            )
            return


def _reaches_metric(worlds: Worlds, epochs: Sequence[Epoch]) -> bool:
    """Whether repeated samples change what is reported: a reduced value, or a number that rank 0 prints."""
    ranks = worlds.many.ranks
    by_rank = [
        next((each for each in trace.evaluations if epoch.number in each.epochs), None)
        for trace, epoch in zip(ranks, epochs, strict=True)
    ]
    known = [each for each in by_rank if each is not None]
    if worlds.one is None or not worlds.one.ranks or len(known) < len(ranks):
        return True
    reference = next((each for each in worlds.one[0].evaluations if each.step == known[0].step), None)
    if reference is None:
        return not worlds.one[0].evaluations
    if _differ([each.collectives for each in known], reference.collectives):
        return True
    printed = [each.is_same for each in reports(worlds, 0, known[0]) if each.is_same is not None]
    if printed:
        return not all(printed)
    return not any("gather" in call.name for call in known[0].collectives)


def _differ(many: list[list[CollectiveCall]], one: list[CollectiveCall]) -> bool:
    """Whether the sum over the ranks of a reduced value is not the value of one rank."""
    for *calls, expected in zip(*many, one, strict=False):
        if expected.name not in ("all_reduce", "reduce") or any(call.value is None for call in (*calls, expected)):
            continue
        for value, *parts in zip(expected.value or [], *(call.value or [] for call in calls), strict=False):
            if not math.isclose(value, sum(parts), rel_tol=_TOLERANCE):
                return True
    return False


def _gathered_at(trace: RankTrace) -> Location | None:
    """The line of an evaluation at which Accelerate gathers or reduces what includes repeated samples."""
    for name in ("gather", "reduce"):
        for event in trace.of("accelerate"):
            if event["name"] == name and event["site"] and _is_evaluation(trace, event["site"]):
                return first(event["site"])
    return None


def _is_evaluation(trace: RankTrace, site: Site) -> bool:
    """Whether a line is in a function that evaluates."""
    functions = {call.site[0].function for each in trace.evaluations for call in each.calls if call.site}
    return site[0].function in functions


CHECK = Check(
    "SS105",
    "padded-evaluation",
    "error",
    "the metric counts some samples twice, so it depends on the number of ranks",
    "evaluate with a sampler that does not pad, such as list(range(rank, len(dataset), world_size)), and reduce sums "
    "and counts; or use run.shard(dataset)",
    find,
)
