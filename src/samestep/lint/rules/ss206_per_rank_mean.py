"""A loss that each rank divides by its own count.

DDP computes the mean of the gradients of the ranks, and every rank counts the same. If each rank divides its loss by
its own number of valid tokens, pixels or boxes, those of a rank with few of them count more than those of a rank with
many. The gradient is then not that of the mean over all tokens, and it depends on how the data is divided.

Bad:

```python
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def train(dataset):
    dist.init_process_group("nccl")
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            losses = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum")
            count = (y != -100).sum()
            loss = losses / count  # SS206
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def train(dataset):
    dist.init_process_group("nccl")
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            losses = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum")
            count = (y != -100).sum()
            dist.all_reduce(count)
            loss = losses * dist.get_world_size() / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
```

Source: pytorch/torchtitan#2206, huggingface/trl#3231.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.module_trees import derived_from
from samestep.lint.rule import Analysis, Rule
from samestep.lint.training_steps import factors
from samestep.lint.values import TensorValue, Value, options_of

_SUMS = ("Tensor.sum", "torch.sum", "torch.count_nonzero")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for losses that are divided by a count of the rank's own batch."""
    for event in analysis.of("backward"):
        for factor in factors(event.loss):
            count = _own_count(factor.operand) if factor.operation == "/" else None
            if count is None or factor.location is None:
                continue
            reasons = [f"{taint.text} ({taint.location})" for taint in count.taints if taint.kind == "data"]
            yield RULE.finding(
                factor.location,
                "each rank divides its loss by the count in its batch",
                evidence=[f"the count is computed from the rank's own batch ({count.location})", *reasons[:1]],
                related=[event.location],
            )


def _own_count(value: Value) -> TensorValue | None:
    """A sum over the rank's own batch that decides how much a sample counts; not the number of samples."""
    for option in options_of(value):
        if not isinstance(option, TensorValue) or len(option.parts) != 1:
            continue  # a sum over some dimensions leaves a number per sample
        if option.is_count and option.name in _SUMS and not option.is_reduced:
            is_reduced = any(isinstance(each, TensorValue) and each.is_reduced for each in derived_from(option))
            if any(taint.kind == "data" for taint in option.taints) and not is_reduced and not option.needs_grad:
                return option
    return None


RULE = Rule(
    "SS206",
    "per-rank-mean",
    "error",
    "tokens on ranks with few of them count more, so the gradient depends on how the data is divided",
    "divide by the count of all ranks: `dist.all_reduce(count)`, then `losses * dist.get_world_size() / count`",
    find,
    is_sure=False,
)
