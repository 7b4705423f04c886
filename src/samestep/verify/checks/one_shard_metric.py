"""The metric of one rank's samples is reported as everyone's.

What it compares: which samples each rank evaluates between two steps, whether the ranks communicate before the next
step, and which ranks print numbers that depend on what was evaluated, other than those that one rank prints. Times,
counts and epochs do not depend on it. If every rank evaluates the whole set, or all ranks print, nothing is reported.
It also looks for files that rank 0 writes or not, depending on such a result, and for evaluations on rank 0 alone whose
sampler has a part of the samples.

Fault: `DataLoader(val_set, sampler=DistributedSampler(val_set))`, then `if rank == 0: print(correct / total)`. The
number covers half of the samples.

Repair: `dist.all_reduce` of the sum and of the count, `run.mean(...)`, or torchmetrics, which synchronizes by itself.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first, reports
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import Function, function_at, parents, statement_at
from samestep.verify.trace_events import Evaluation, LoaderInfo

_MAX_REPEATED = 0.25  # of the samples, on two ranks


def find(worlds: Worlds) -> Iterator[Finding]:
    """Look for evaluations of shards without communication."""
    ranks = worlds.many.ranks
    if len(ranks) < 2 or any(trace.of("trainer") for trace in ranks):
        return
    for evaluations in zip(*(trace.evaluations for trace in ranks), strict=False):
        if len({each.step for each in evaluations}) > 1 or any(map(_communicates, evaluations)):
            continue
        samples = [_samples(trace, each) for trace, each in zip(ranks, evaluations, strict=True)]
        if not all(samples) or not _are_shards(samples):
            continue
        printed = [list(reports(worlds, rank, each)) for rank, each in enumerate(evaluations)]
        wrong = [each.site for each in printed[0] if not each.is_same]
        is_reported = bool(wrong) and not any(printed[1:])
        decided = None if is_reported else _decided_write(worlds, evaluations[0])
        if not is_reported and decided is None:
            continue
        what = "reports a result" if decided is None else "decides what it saves by a result"
        counts = ", ".join(f"rank {rank}: {len(each)}" for rank, each in enumerate(samples))
        yield CHECK.finding(
            result_location(evaluations[0]) or decided or first(wrong[0]),
            f"rank 0 {what} of {len(samples[0])} of {len(set[str]().union(*samples))} evaluated samples "
            f"after step {evaluations[0].step}: the ranks evaluate different samples ({counts}) and do not communicate",
            ranks=[0],
            related=[each for call in evaluations[0].calls[:1] if (each := first(call.site))],
        )
        return
    yield from _evaluated_alone(worlds)


def _decided_write(worlds: Worlds, evaluation: Evaluation) -> Location | None:
    """The condition that depends on an evaluation, below which rank 0 writes a file before the next step."""
    for event in worlds.many[0].files:
        if event.step != evaluation.step or event.action not in ("write", "rename"):
            continue
        for location in event.site:
            statement = statement_at(location)
            conditions = [each for each in parents(statement) if isinstance(each, ast.If)] if statement else []
            for condition in conditions:
                if worlds.evaluated.depends(location.file, condition.test):
                    return replace(location, line=condition.lineno)
    return None


def _evaluated_alone(worlds: Worlds) -> Iterator[Finding]:
    """Rank 0 evaluates alone, with a loader that gives every rank a part of the samples."""
    trace, *others = worlds.many.ranks
    shared = {each.step for other in others for each in other.evaluations}
    for evaluation in trace.evaluations:
        epochs = [trace.epochs[number] for number in evaluation.epochs]
        divided = [each.loader for each in epochs if each.is_complete and _divides(each.loader)]
        if evaluation.step in shared or _communicates(evaluation) or not divided:
            continue
        wrong = [each.site for each in reports(worlds, 0, evaluation) if each.is_same is False]
        if wrong:
            loader = divided[0]
            yield CHECK.finding(
                first(loader.sampler_site) or first(loader.site),
                f"only rank 0 evaluates after step {evaluation.step}, and its sampler has {loader.samples} of "
                f"{loader.length} samples: the others belong to ranks that do not evaluate",
                ranks=[0],
                related=[each for each in [first(wrong[0])] if each],
                repair="evaluate without a DistributedSampler if one rank evaluates alone, or evaluate on all ranks "
                "and reduce the sum and the count",
            )
            return


def _divides(loader: LoaderInfo) -> bool:
    return (
        loader.distributed is not None
        and loader.samples is not None
        and loader.length is not None
        and loader.samples < loader.length
    )


def _communicates(evaluation: Evaluation) -> bool:
    """Whether the rank exchanges values after an evaluation; a barrier exchanges none."""
    return bool(evaluation.gathers) or any(not each.name.endswith("barrier") for each in evaluation.collectives)


def _are_shards(samples: Sequence[set[str]]) -> bool:
    """Whether the ranks have different samples, but for a few that a sampler repeats to make the shards equal."""
    total = len(set[str]().union(*samples))
    return sum(map(len, samples)) - total <= _MAX_REPEATED * total and all(len(each) < total for each in samples)


def result_location(evaluation: Evaluation) -> Location | None:
    """The statement by which the function that evaluates returns its result."""
    location = first(evaluation.calls[0].site)
    function = function_at(location) if location is not None else None
    if location is None or not isinstance(function, Function):
        return None
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    return replace(location, line=returns[-1].lineno) if returns else None


def _samples(trace: RankTrace, evaluation: Evaluation) -> set[str]:
    """The samples of an evaluation, by loader or by the rows that the modules got."""
    by_loader = {sample for epoch in evaluation.epochs for sample in trace.epochs[epoch].samples}
    return by_loader or {row for call in evaluation.calls if call.rows > 1 for row in call.hashes}


CHECK = Check(
    "SS401",
    "one-shard-metric",
    "error",
    "the reported metric covers a part of the data, and which part depends on the number of ranks",
    "reduce the sum and the count over all ranks before you divide and report",
    find,
)
