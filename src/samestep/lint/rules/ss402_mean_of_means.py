"""A mean of means of different numbers of samples.

The mean over the ranks of a mean, or of another ratio, is that of all samples only if every rank divides by the same
number. Hand-made shards differ in length, and the denominator of an F1 score, a masked mean or a perplexity depends on
the data. Some scores (F1, AUC, a correlation) cannot be averaged at all.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def evaluate(model, dataset):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)
    hits, positives = torch.tensor(0), torch.tensor(0)
    for x, y in DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False, drop_last=True)):
        hits += ((model(x) > 0) * y).sum()
        positives += y.sum()
    recall = hits / positives
    dist.all_reduce(recall)  # SS402
    return recall / dist.get_world_size()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def evaluate(model, dataset):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)
    hits, positives = torch.tensor(0), torch.tensor(0)
    for x, y in DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False, drop_last=True)):
        hits += ((model(x) > 0) * y).sum()
        positives += y.sum()
    dist.all_reduce(hits)
    dist.all_reduce(positives)
    return hits / positives
```

Source: allenai/allennlp#4347, intel/ai-reference-models#134.
"""

from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.library.tensor_library import NONLINEAR
from samestep.lint.rank_decisions import call_that_passes, metric_origin, uneven_shards
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ContainerValue, Taint, TensorValue, Value, computed_from, options_of

_NONLINEAR: Final = frozenset({
    "f1_score", "fbeta_score", "precision_score", "recall_score", "roc_auc_score", "average_precision_score",
    "matthews_corrcoef", "cohen_kappa_score", "jaccard_score", "r2_score", "spearmanr", "pearsonr", "kendalltau",
    "balanced_accuracy_score", "median", "nanmedian", "quantile", "nanquantile", "std", "var",
}) | NONLINEAR  # fmt: skip
_MAX_STEPS: Final = 20
_REDUCTIONS: Final = frozenset({"all_reduce", "reduce"})


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for reductions of quotients."""
    uneven = uneven_shards(analysis)
    for event in analysis.of("collective"):
        value: Value | None = _reduced(event)
        if value is None or not event.taints:
            continue
        if any(isinstance(each, TensorValue) and (each.needs_grad or each.content) for each in options_of(value)):
            continue
        origin = metric_origin(value) if not _is_pair(value) else None
        why = _why(value, origin, event.taints, uneven) if origin is not None else ""
        if origin is None or not why or origin.location is None:
            continue
        yield RULE.finding(
            call_that_passes(analysis, event),
            f"a mean over the ranks of what each rank {why}",
            evidence=[f"the quotient is computed here ({origin.location})", f"and reduced here ({event.location})"],
            related=[origin.location, event.location],
        )


def _reduced(event: Event) -> Value | None:
    """What is summed or averaged over the ranks, or gathered as one number per rank."""
    if event.tensors and event.name in _REDUCTIONS and _is_average(event):
        return event.tensors[0]
    passed = (
        event.tensors[-1] if event.tensors and event.name in ("gather", "all_gather", "all_gather_object") else None
    )
    return passed if passed is not None and _outer_function(passed) in NONLINEAR and metric_origin(passed) else None


def _is_average(event: Event) -> bool:
    """Whether the reduction sums or averages; a maximum is not about counts."""
    passed = event.keywords.get("op") or (event.arguments[1] if len(event.arguments) > 1 else None)
    name = getattr(passed, "qualname", "") or (passed.name if passed is not None else "")
    return passed is None or event.service is not None or name.rpartition(".")[2] in ("", "SUM", "AVG")


def _why(value: Value, origin: TensorValue, taints: tuple[Taint, ...], uneven: set[tuple[str, int]]) -> str:
    if name := next((each for each in (_outer_function(value), _last(origin)) if each in _NONLINEAR), ""):
        return f"computes with `{name}`, which cannot be averaged"
    if _has_data_in_denominator(origin):
        return "divides by a number that depends on its data"
    if any((taint.location.file, taint.location.line) in uneven for taint in taints):
        return "divides by its own number of samples"
    return ""


def _outer_function(value: Value) -> str:
    """The function that made a number of a quotient, if nothing is summed or divided after it."""
    current = next((each for each in options_of(value) if isinstance(each, TensorValue)), None)
    for _ in range(_MAX_STEPS):
        if current is None or _last(current) in _NONLINEAR:
            break
        inner = [option for each in current.parts[:1] for option in options_of(each)]
        is_followed = not current.operation and _last(current) not in ("mean", "sum")
        current = next((each for each in inner if isinstance(each, TensorValue)), None) if is_followed else None
    return _last(current) if current is not None else ""


def _last(value: Value) -> str:
    return value.name.rpartition(".")[2]


def _has_data_in_denominator(origin: TensorValue) -> bool:
    """Whether it is a quotient whose denominator is a sum over the samples, not their number."""
    if origin.operation != "/" or len(origin.parts) != 2:
        return False
    parts = [each for each in computed_from(origin.parts[1]) if isinstance(each, TensorValue)]
    return any(_last(each) == "sum" and not _is_of_lengths(each) for each in parts)


def _is_of_lengths(total: TensorValue) -> bool:
    """Whether it is the sum of a list of numbers of samples: `sizes.append(len(x))`, `sum(sizes)`."""
    lengths = ("len", "numel", "size")
    return bool(total.parts) and all(isinstance(e, TensorValue) and _last(e) in lengths for e in total.parts)


def _is_pair(value: Value) -> bool:
    """Whether it is a vector of a sum and a count, which may be reduced."""
    current = next((each for each in options_of(value) if isinstance(each, TensorValue)), None)
    for _ in range(_MAX_STEPS):
        if current is None or current.operation == "/":
            return False
        items = [list(each.values()) for each in current.parts if isinstance(each, ContainerValue)]
        if any(len(each) > 1 and not all(_is_quotient(item) for item in each) for each in items):
            return True
        current = next((each for each in current.parts if isinstance(each, TensorValue)), None)
    return False


def _is_quotient(value: Value) -> bool:
    return isinstance(value, TensorValue) and (value.is_ratio or value.is_mean)


RULE = Rule(
    "SS402",
    "mean-of-means",
    "error",
    "samples on a rank with few of them count more, so the metric depends on the number of ranks",
    "reduce numerator and denominator, `dist.all_reduce(torch.stack([total, count]))`, and divide afterwards",
    find,
)
