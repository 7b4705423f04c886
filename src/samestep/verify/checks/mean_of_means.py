"""A mean of means of different numbers of samples.

What it compares: numbers that the ranks reduce after an evaluation with those of one rank that evaluates all samples
with the same weights. If the mean over the ranks differs, and the mean weighted by the numbers of samples does not, the
counts are missing. Numbers that do not depend on what was evaluated, such as times, are not compared. It also compares
running sums: one that is reduced after every batch or epoch, and not reset, counts the earlier ones again on every
rank.

Fault: `dist.all_reduce(val_loss)`, `val_loss / world_size` with shards of 20 and 5 samples.

Repair: reduce the sum and the count: `torch.tensor([total, count])`, then divide.
"""

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise

from samestep.findings import Finding, Location
from samestep.verify.check import Check, Worlds, first, same_on_all
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import Function, call_named, division_by_ranks, function_at, origin, statement_at
from samestep.verify.trace_events import CollectiveCall, Evaluation, Site

_TOLERANCE = 1e-4
_LARGE = 5e-3  # a relative difference that rounding does not explain
_MIN_REPETITIONS = 2
_MEANS = ("sum", "avg", "")  # operations after which people divide
REDUCTIONS = ("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather")


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
        is_exact = not has_batchnorm(ranks[0], evaluations[0]) and _is_even([*evaluations, reference])
        found = _compare(worlds, evaluations, reference, counts, is_exact)
        if found is not None:
            yield _describe(*found, counts)
            return
        repeated = _reduced_again([each.collectives for each in (*evaluations, reference)], in_run=False)
        if repeated is not None:
            yield _describe_repeated(*repeated, "in one evaluation", len(ranks))
            return
    repeated = _reduced_again([trace.collectives for trace in (*ranks, worlds.one[0])], in_run=True)
    if repeated is not None:
        yield _describe_repeated(*repeated, "and not reset in between", len(ranks))


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


def _describe_repeated(
    call: CollectiveCall, total: float, expected: float, times: int, when: str, ranks: int
) -> Finding:
    return CHECK.finding(
        first(call.site),
        f"a running sum is reduced {times} times {when}: it becomes {total:.6g}, where one rank has {expected:.6g} for "
        "the same samples",
        ranks=range(ranks),
        consequence="each reduction adds the earlier batches of the other ranks again, so the metric is too large",
        repair="reduce the sum once, after the last batch, and begin the next one with zero",
    )


def _reduced_again(
    lists: Sequence[Sequence[CollectiveCall]], in_run: bool
) -> tuple[CollectiveCall, float, float, int] | None:
    """A sum that goes into its own next reduction: what it becomes, what one rank has, and how often it is reduced.

    The lists are those of all ranks, and of one rank at last. In a whole run, sums that grow by themselves may look as
    if they were reduced again, so that it takes one more repetition, as many on one rank.
    """
    repetitions = _MIN_REPETITIONS + in_run
    by_site = [_sums(each) for each in lists]
    for site, calls in by_site[0].items():
        sequences = [found.get(site, []) for found in by_site]
        if any(len(each) < repetitions for each in sequences) or not all(map(_accumulates, sequences)):
            continue
        if in_run and not same_on_all(map(len, sequences)):
            continue
        for total, expected in zip(calls[-1].result or [], sequences[-1][-1].result or [], strict=True):
            if total > (1 + _LARGE) * expected:
                return calls[0], total, expected, len(calls)
    return None


def _sums(calls: Sequence[CollectiveCall]) -> dict[Site, list[CollectiveCall]]:
    """The sums of few numbers by the lines that reduce them."""
    found = dict[Site, list[CollectiveCall]]()
    for call in calls:
        if call.name == "all_reduce" and call.op == "sum" and call.value and call.result:
            found.setdefault(call.site, []).append(call)
    return found


def _accumulates(calls: Sequence[CollectiveCall]) -> bool:
    """Whether every reduction begins with at least the result of the one before it."""
    pairs = [(before.result or [], call.value or []) for before, call in pairwise(calls)]
    return all(
        len(result) == len(value) and all(0 < a <= b for a, b in zip(result, value, strict=True))
        for result, value in pairs
    )


def has_batchnorm(trace: RankTrace, evaluation: Evaluation) -> bool:
    """Whether an evaluated module has BatchNorm, whose statistics may differ between the ranks."""
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
        if not is_known or many[0].name not in REDUCTIONS or (is_gather and knows_counts) or many[0].op not in _MEANS:
            continue
        location = first(many[0].site)
        if location is not None and worlds.evaluated.reaches(location, REDUCTIONS) is False:
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
    call = call_named(location, REDUCTIONS)
    value = call.args[-1 if "gather" in ast.unparse(call.func) else 0] if call is not None and call.args else None
    statement = statement_at(origin(location, value)) if value is not None else None
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} if statement else set[str]()
    parameters = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)} - {"self"}
    if names & parameters and len(site) > 1:
        return site[1]
    return division_by_ranks(location) or location


CHECK = Check(
    "SS402",
    "mean-of-means",
    "error",
    "samples on a rank with few of them count more, so the metric depends on the number of ranks",
    "reduce the sum and the number of samples over all ranks, and divide afterwards",
    find,
)
