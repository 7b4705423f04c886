"""A collective with tensors of different shapes.

`dist.all_gather` needs the same shape on all ranks. If the data is divided by hand, a rank may have fewer samples than
another, so its last batch, or all of its predictions, has another length. Gloo ends the run, NCCL hangs or returns
wrong data.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset


@torch.no_grad()
def predict(model, dataset):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(model)
    loader = DataLoader(Subset(dataset, range(rank, len(dataset), world)), batch_size=8)
    predictions = torch.cat([model(x) for x in loader])
    parts = [torch.zeros_like(predictions) for _ in range(world)]
    dist.all_gather(parts, predictions)  # SS303
    return torch.cat(parts)
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset


@torch.no_grad()
def predict(model, dataset):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(model)
    loader = DataLoader(Subset(dataset, range(rank, len(dataset), world)), batch_size=8)
    predictions = torch.cat([model(x) for x in loader])
    parts = [None for _ in range(world)]
    dist.all_gather_object(parts, predictions)
    return torch.cat(parts)
```

Source: pytorch/pytorch#33148, huggingface/accelerate#226.
"""

from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.rank_decisions import uneven_shards
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import LoaderValue, TensorValue, Value, computed_from, options_of

_GATHERS: Final = {"all_gather": 1, "all_gather_into_tensor": 1, "gather": 0}
_TENSORS: Final = {**_GATHERS, "all_reduce": 0, "reduce": 0, "broadcast": 0, "reduce_scatter_tensor": 1}
_FIXED_SHAPE: Final = frozenset({
    "pad", "zeros", "new_zeros", "full", "new_full", "empty", "new_empty", "ones", "tensor", "as_tensor",
    "pad_sequence", "sum", "mean", "max", "min",
})  # fmt: skip


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for gathered tensors whose length is the number of samples of a rank."""
    yield from _of_selected_rows(analysis)
    uneven = uneven_shards(analysis)
    lines = {key for key in uneven if key not in _dropping(analysis)}
    for event in analysis.of("collective"):
        position = _GATHERS.get(event.name)
        if position is None or event.service is not None or len(event.arguments) <= position:
            continue
        value: Value = event.arguments[position]
        shard = next((each for each in value.taints if (each.location.file, each.location.line) in lines), None)
        if shard is None or not _has_length_of_data(value) or _exchanges_sizes(analysis, event):
            continue
        yield RULE.finding(
            event.location,
            f"`{event.name}` gets a tensor whose length may differ between ranks",
            evidence=[
                f"{shard.text} ({shard.location})",
                "the data is divided by hand, so ranks may differ by a sample",
            ],
            related=[shard.location],
        )


def _of_selected_rows(analysis: Analysis) -> Iterator[Finding]:
    """Tensors with the rows that satisfy a condition, of which each rank has another number."""
    for event in analysis.of("collective"):
        position = _TENSORS.get(event.name)
        if position is None or event.service is not None or len(event.arguments) <= position:
            continue
        tensors = (each for each in options_of(event.arguments[position]) if isinstance(each, TensorValue))
        selected = next((each.selected for each in tensors if each.selected is not None), None)
        if selected is not None and event.rank_guard is None and not _exchanges_sizes(analysis, event):
            yield RULE.finding(
                event.location,
                f"`{event.name}` gets a tensor whose length differs between ranks",
                evidence=[f"its length depends on the values of this rank's samples ({selected})"],
                related=[selected],
            )


def _has_length_of_data(value: Value) -> bool:
    """Whether a tensor has a row per sample: it is neither a number nor padded."""
    tensors = [each for each in options_of(value) if isinstance(each, TensorValue)]
    if not tensors or any(each.is_mean or each.is_ratio or each.is_count for each in tensors):
        return False
    parts = [each.name.rpartition(".")[2] for each in computed_from(value)]
    return not _FIXED_SHAPE.intersection(parts)


def _dropping(analysis: Analysis) -> set[tuple[str, int]]:
    """Loaders without a short last batch."""
    found = set[tuple[str, int]]()
    for event in analysis.of("loader"):
        loader: LoaderValue = event.loader
        drops = loader.options.get("drop_last")
        if loader.location is not None and drops is not None and drops.constant is not False:
            found.add((loader.location.file, loader.location.line))
    return found


def _exchanges_sizes(analysis: Analysis, event: Event) -> bool:
    """Whether the function calls another collective first, as it does to agree on a length."""
    return any(
        other.frames == event.frames and other.order < event.order and other.name != "barrier"
        for other in analysis.of("collective")
        if other.location.function == event.location.function
    )


RULE = Rule(
    "SS303",
    "different-shapes",
    "warning",
    "Gloo ends the run, NCCL hangs or returns wrong data",
    "pad to the same length and cut afterwards, use `dist.all_gather_object`, or reduce sums and counts instead",
    find,
    is_sure=False,
)
