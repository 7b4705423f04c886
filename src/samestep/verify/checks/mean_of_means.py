"""A mean of means of different numbers of samples.

What it compares: numbers that the ranks reduce after an evaluation with those of one rank that evaluates all samples
with the same weights. If the mean over the ranks differs, and the mean weighted by the numbers of samples does not, the
counts are missing. Numbers that do not depend on what was evaluated, such as times, are not compared.

Fault: `dist.all_reduce(val_loss)`, `val_loss / world_size` with shards of 20 and 5 samples.

Repair: reduce the sum and the count: `torch.tensor([total, count])`, then divide.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first, same_on_all
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import Function, call_named, function_at, is_about_ranks, origin, statement_at
from samestep.verify.trace_events import CollectiveCall, Evaluation, Site

_TOLERANCE = 1e-4
_LARGE = 5e-3  # a relative difference that rounding does not explain
_MEANS = ("sum", "avg", "")  # operations after which people divide
_REDUCTIONS = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather")


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare reduced values of evaluations with those of one rank."""
    ranks = worlds.many.ranks
    if worlds.one is None or not worlds.one.ranks or len(ranks) < 2:
        return
    references = {(each.step, each.calls[0].weights): each for each in worlds.one[0].evaluations}
    for evaluations in zip(*(trace.evaluations for trace in ranks), strict=False):
        reference = references.get((evaluations[0].step, evaluations[0].calls[0].weights))
        counts = [each.rows for each in evaluations]
        if reference is None or len({each.step for each in evaluations}) > 1 or reference.rows != sum(counts):
            continue
        is_exact = not _has_batchnorm(ranks[0], evaluations[0]) and _is_even([*evaluations, reference])
        found = _compare(worlds, evaluations, reference, counts, is_exact)
        if found is not None:
            yield _describe(*found, counts)
            return


def _describe(call: CollectiveCall, mean: float, expected: float, is_weighted: bool, counts: list[int]) -> Finding:
    text = f"over shards of {' and '.join(map(str, counts))} samples"
    same = f"{mean:.6g}, where one rank has {expected:.6g} for all samples with the same weights of the model"
    if is_weighted:
        return CHECK.finding(
            _location(call.site), f"the ranks average a value {text} without weights: {same}",
            evidence=[f"weighted by the numbers of samples, the mean is {expected:.6g}"], ranks=range(len(counts)),
        )  # fmt: skip
    return CHECK.finding(
        _location(call.site), f"the ranks average a value {text} that is not a mean of samples: {same}",
        ranks=range(len(counts)),
        consequence="the reported metric is not that of the data, and depends on the number of ranks",
        repair="reduce what the metric is computed from, such as numbers of hits, and compute it afterwards",
    )  # fmt: skip


def _has_batchnorm(trace: RankTrace, evaluation: Evaluation) -> bool:
    return any(trace.modules.get(call.module, {}).get("batchnorm") for call in evaluation.calls)


def _is_even(evaluations: Sequence[Evaluation]) -> bool:
    """Whether all batches have the same size, so that a mean of their means is the mean of the samples."""
    return all(same_on_all(call.rows for call in each.calls) for each in evaluations)


def _compare(
    worlds: Worlds, evaluations: tuple[Evaluation, ...], reference: Evaluation, counts: list[int], is_exact: bool
) -> tuple[CollectiveCall, float, float, bool] | None:
    """The first reduction whose mean is not the value of one rank, and whether a weighted mean is."""
    knows_counts = any(call.value == [float(counts[0])] for call in evaluations[0].collectives)
    for calls in zip(*(each.collectives for each in evaluations), reference.collectives, strict=False):
        *many, one = calls
        is_known = not any(call.value is None for call in calls) and same_on_all(call.name for call in calls)
        is_gather = "gather" in many[0].name
        if not is_known or many[0].name not in _REDUCTIONS or (is_gather and knows_counts) or many[0].op not in _MEANS:
            continue
        location = first(many[0].site)
        if location is not None and worlds.evaluated.reaches(location, _REDUCTIONS) is False:
            continue
        for values, expected in zip(
            zip(*(call.value or [] for call in many), strict=False), one.value or [], strict=False
        ):
            mean = sum(values) / len(values)
            weighted = sum(count * value for count, value in zip(counts, values, strict=True)) / sum(counts)
            close = max(abs(expected), 1e-12) * _TOLERANCE
            if abs(sum(values) - expected) <= close or abs(mean - expected) <= 5 * close:
                continue
            is_weighted = abs(weighted - expected) < close
            is_count = all(float(value).is_integer() for value in (*values, expected))
            is_ratio = is_exact and not is_gather and not is_count and abs(mean - expected) > _LARGE * abs(expected)
            is_sum = abs(sum(values) - expected) < _LARGE * abs(expected)
            if is_weighted or (is_ratio and not is_sum):
                return many[0], mean, expected, is_weighted
    return None


def _location(site: Site) -> Location | None:
    """The line that divides the reduced value; if it is a parameter of a function, the line that calls the function."""
    location = first(site)
    function = function_at(location) if location is not None else None
    if location is None or not isinstance(function, Function):
        return location
    call = call_named(location, _REDUCTIONS)
    value = call.args[-1 if "gather" in ast.unparse(call.func) else 0] if call is not None and call.args else None
    statement = statement_at(origin(location, value)) if value is not None else None
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} if statement else set[str]()
    parameters = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)} - {"self"}
    if names & parameters and len(site) > 1:
        return site[1]
    divisions = [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.BinOp | ast.AugAssign)
        and isinstance(node.op, ast.Div)
        and node.lineno > location.line
        and is_about_ranks(node)
    ]
    return replace(location, line=min(divisions)) if divisions else location


CHECK = Check(
    "SS402",
    "mean-of-means",
    "error",
    "samples on a rank with few of them count more, so the metric depends on the number of ranks",
    "reduce the sum and the number of samples over all ranks, and divide afterwards",
    find,
)
