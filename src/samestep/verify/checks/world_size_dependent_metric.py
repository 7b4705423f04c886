"""A reported metric that depends on the number of ranks.

What it compares: the numbers that rank 0 prints or logs after an evaluation in which the ranks communicate with those
that one rank prints for the same samples and weights. Only numbers that depend on an evaluation count, not times and
training losses. Not compared are evaluations with BatchNorm or random numbers, and of losses that compare the samples
of a batch. If the batches have different sizes on one rank as well, only fractions of samples are compared.

Fault: `gathered = torch.cat(parts)`, compared with the labels in the order of the dataset, although each rank has every
second sample. Or a perplexity, a recall or a mean over batches that is computed on each rank and then averaged.

Repair: reduce or gather what the metric is computed from, put it in the order of the samples, and compute it once.
"""

from collections.abc import Iterator, Sequence

from samestep.findings import Finding
from samestep.verify.check import Check, Report, Worlds, first, reports, same_on_all
from samestep.verify.checks import coupled_samples
from samestep.verify.checks.mean_of_means import REDUCTIONS, has_batchnorm
from samestep.verify.checks.one_shard_metric import result_location
from samestep.verify.rank_trace import RankTrace
from samestep.verify.source import division_by_ranks
from samestep.verify.trace_events import Evaluation

_REDUCTIONS = (*REDUCTIONS, "all_gather_object", "gather_object")
_LARGE = 5e-3  # a relative difference that rounding does not explain
_LEAST = 1e-5  # of a number of samples divided by another one
_PRECISE = 0.1  # of a sample: the last digit of a fraction


def find(worlds: Worlds) -> Iterator[Finding]:
    """Compare what rank 0 prints after each evaluation with what one rank prints."""
    ranks = worlds.many.ranks
    if worlds.one is None or not worlds.one.ranks or len(ranks) < 2 or any(trace.of("trainer") for trace in ranks):
        return
    one = worlds.one[0]
    for *evaluations, reference in zip(*(trace.evaluations for trace in ranks), one.evaluations, strict=False):
        printed = [list(reports(worlds, rank, each)) for rank, each in enumerate(evaluations)]
        is_fraction = all(_are_fractions(report, reference.rows) for report in printed[0])
        if not _are_comparable(worlds, evaluations, reference, is_fraction):
            return  # what is printed later may depend on this evaluation as well
        wrong = [report for report in printed[0] if _differs(report, _LEAST if is_fraction else _LARGE)]
        calls = [call for call in evaluations[0].collectives if call.name in _REDUCTIONS]
        if not wrong or any(printed[1:]) or not calls:
            continue
        if next(coupled_samples.find(worlds), None) is None:
            report = wrong[0]
            location = first(calls[-1].site)
            computed = result_location(evaluations[0]) if "gather" in calls[-1].name else None
            yield CHECK.finding(
                computed or (division_by_ranks(location) if location else None) or location,
                f"rank 0 reports {' '.join(report.values or [])} after step {reference.step}, where one rank reports "
                f"{' '.join(report.expected_values or [])} for the same {reference.rows} samples and weights",
                evidence=[f"{len(ranks)} ranks: {report.text}", f"1 rank: {report.expected}"],
                ranks=[0],
                related=[each for each in [first(report.site)] if each],
            )
        return


def _are_comparable(
    worlds: Worlds, evaluations: Sequence[Evaluation], reference: Evaluation, is_fraction: bool
) -> bool:
    """Whether the ranks evaluate the samples of one rank, with its weights and without randomness.

    Together once, or all of them on each rank. A mean over batches depends on their sizes, a fraction of samples not.
    """
    every = [*evaluations, reference]
    if not same_on_all((each.step, each.calls[0].weights) for each in every):
        return False
    if any(call.rng != each.calls[0].rng for each in every for call in each.calls):
        return False
    if has_batchnorm(worlds.many[0], reference):
        return False
    traces = [*worlds.many.ranks, *(worlds.one.ranks if worlds.one else [])]
    samples = [_samples(trace, each) for trace, each in zip(traces, every, strict=False)]
    shards, whole = samples[:-1], samples[-1]
    if whole and all(each == whole for each in shards):
        return same_on_all([call.rows for call in each.calls] for each in every)
    if not is_fraction and not same_on_all(call.rows for call in reference.calls):
        return False
    return bool(whole) and sorted(sample for each in shards for sample in each) == sorted(whole)


def _are_fractions(report: Report, rows: int) -> bool:
    """Whether one rank prints numbers of samples divided by all of them, as an accuracy, with enough digits to tell."""
    values = report.expected_values or []
    rounded = [(rows * float(value), rows * 10.0 ** -_decimals(value)) for value in values]
    return bool(values) and all(abs(each - round(each)) <= step / 2 and step < _PRECISE for each, step in rounded)


def _samples(trace: RankTrace, evaluation: Evaluation) -> list[str]:
    """The samples of an evaluation: those of its loaders, or else what was passed to the model."""
    epochs = [trace.epochs[number] for number in evaluation.epochs]
    if epochs:
        return [f"{each.loader.dataset} {sample}" for each in epochs for sample in each.samples]
    return [row for call in evaluation.calls for row in call.hashes]


def _differs(report: Report, least: float) -> bool:
    """Whether one rank prints other numbers, by more than rounding and the last digit."""
    one, two = report.values, report.expected_values
    if not one or not two or len(one) != len(two):
        return False
    return any(
        abs(float(a) - float(b)) > max(least * abs(float(b)), 1.5 * 10.0 ** -_decimals(b))
        for a, b in zip(one, two, strict=True)
    )


def _decimals(number: str) -> int:
    return len(number.partition(".")[2].partition("e")[0])


CHECK = Check(
    "SS408",
    "world-size-dependent-metric",
    "error",
    "the reported metric is not that of the data, and depends on the number of ranks",
    "reduce or gather what the metric is computed from, in the order of the samples, and compute it once",
    find,
)
