"""Samples that are evaluated more than once.

A DistributedSampler repeats samples so that all ranks have the same number of them, and Accelerate repeats some in
the last batch. If the results of all ranks are added up, the metric counts these samples twice, and depends on the
number of ranks.

Bad:

```python
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
data = torch.arange(51.0).reshape(51, 1)
loader = DataLoader(TensorDataset(data, data), batch_size=8)
model, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
error, count = 0.0, 0
model.eval()
with torch.no_grad():
    for x, y in loader:
        predicted, expected = accelerator.gather((model(x), y))  # SS105
        error += (predicted - expected).abs().sum().item()
        count += len(expected)
accelerator.print(error / count)
```

Good:

```python
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
data = torch.arange(51.0).reshape(51, 1)
loader = DataLoader(TensorDataset(data, data), batch_size=8)
model, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
error, count = 0.0, 0
model.eval()
with torch.no_grad():
    for x, y in loader:
        predicted, expected = accelerator.gather_for_metrics((model(x), y))
        error += (predicted - expected).abs().sum().item()
        count += len(expected)
accelerator.print(error / count)
```

Source: pytorch/pytorch#25162, huggingface/accelerate#226, huggingface/accelerate#350.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.loader_loops import evaluation_loaders
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import LoaderValue, SamplerValue, ServiceValue, TensorValue, Value, options_of

_REDUCING = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "gather",
    "gather_object",
    "reduce",
    "all_gather_into_tensor",
)


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for padded loaders whose results are added up."""
    for event, loader in evaluation_loaders(analysis):
        yield from _of_sampler(analysis, event, loader)
        drop_last = loader.options.get("drop_last")
        if drop_last is not None and drop_last.constant is True and loader.is_sharded and loader.location is not None:
            yield RULE.finding(
                loader.location,
                "each rank drops the last samples of its part, so the metric leaves out others on more ranks",
                evidence=[f"this loop evaluates them ({event.location})"],
                related=[event.location],
                repair="pass `drop_last=False` to the loader of the evaluation",
            )
    for event in analysis.of("collective"):
        if event.name == "gather" and _is_accelerator(event.service) and not _is_cut(analysis, event):
            yield from _of_gather(analysis, event)


def _of_sampler(analysis: Analysis, loop: Event, loader: LoaderValue) -> Iterator[Finding]:
    for sampler in options_of(loader.sampler):
        created = [event for event in analysis.of("sampler") if event.sampler is sampler]
        if not isinstance(sampler, SamplerValue) or sampler.kind != "DistributedSampler" or not created:
            continue
        drop_last = sampler.options.get("drop_last")
        length = created[0].length
        if length is None or length % 2 == 0 or (drop_last is not None and drop_last.constant is not False):
            continue
        reduced = [e for e in analysis.of("collective") if e.name in _REDUCING and e.order > loop.order]
        if reduced:
            yield RULE.finding(
                created[0].location,
                f"the sampler repeats samples: {length} of them cannot be divided evenly among the ranks",
                evidence=[
                    f"this loop evaluates them ({loop.location})",
                    f"`{reduced[0].name}` adds up the results ({reduced[0].location})",
                ],
                related=[loop.location],
            )


def _is_accelerator(service: Value | None) -> bool:
    return isinstance(service, ServiceValue) and service.kind == "accelerator"


def _of_gather(analysis: Analysis, event: Event) -> Iterator[Finding]:
    loops = {id(each.loop): each for each, loader in evaluation_loaders(analysis) if loader.is_prepared}
    around = [loops[id(loop)] for loop in event.loops if id(loop) in loops]
    tensors = [each for value in event.tensors for each in _items(value)]
    are_scalars = bool(tensors) and all(isinstance(each, TensorValue) and _is_scalar(each) for each in tensors)
    if around and event.rank_guard is None and not are_scalars:
        yield RULE.finding(
            event.location,
            "`gather` keeps the samples that Accelerate repeats in the last batch",
            evidence=[f"this loop evaluates a loader that `accelerator.prepare` divides ({around[0].location})"],
            repair="call `accelerator.gather_for_metrics` instead of `accelerator.gather`",
        )


def _items(value: Value) -> list[Value]:
    values = getattr(value, "values", None)
    return list(values()) if values is not None else [value]


def _is_scalar(value: TensorValue) -> bool:
    return value.is_mean or value.is_count or value.is_ratio


def _is_cut(analysis: Analysis, event: Event) -> bool:
    """Whether the script removes what was repeated: `x[: len(dataset)]`."""
    for file in analysis.files:
        if str(file.path) == event.location.file:
            return any(
                isinstance(node, ast.Slice) and node.upper is not None and "len(" in ast.unparse(node.upper)
                for node in ast.walk(file.tree)
            )
    return False


RULE = Rule(
    "SS105",
    "padded-evaluation",
    "error",
    "the metric counts some samples twice, so it depends on the number of ranks",
    "evaluate without padding, `DataLoader(dataset, sampler=list(range(rank, len(dataset), world_size)))`, and reduce "
    "sums and counts",
    find,
)
