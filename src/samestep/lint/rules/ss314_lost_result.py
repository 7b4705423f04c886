"""The result of a collective is lost.

`dist.all_reduce` and the other collectives change their tensor in place and return None. The sum of a temporary tensor,
such as `dist.all_reduce(torch.tensor(loss))`, is gone after the call, and `loss = dist.all_reduce(loss)` is None.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def count(dataset):
    dist.init_process_group("nccl")
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False, drop_last=True))
    total = sum(batch.sum().item() for batch in loader)
    dist.all_reduce(torch.tensor(total))  # SS314
    return total
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def count(dataset):
    dist.init_process_group("nccl")
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False, drop_last=True))
    total = torch.tensor(sum(batch.sum().item() for batch in loader))
    dist.all_reduce(total)
    return total.item()
```

Source: the documentation of `torch.distributed.all_reduce`.
"""

import ast
from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.function_source import assigned_names, passed, statement_around
from samestep.lint.rule import Analysis, Rule

_COPIES: Final = frozenset(
    {"tensor", "clone", "mean", "sum", "stack", "cat", "item", "div", "mul", "add", "max", "min"}
)
_IN_PLACE: Final = frozenset({"all_reduce", "broadcast", "reduce"})


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for reductions of temporary tensors, and for results that are None."""
    for event in analysis.of("collective"):
        if event.name not in _IN_PLACE or event.call is None or not event.call.name.startswith("torch.distributed."):
            continue
        if "async_op" in event.keywords or event.call.package != "torch.distributed":
            continue
        source = passed(event, 0, "tensor")
        summary = _summary(analysis, event, source)
        if summary:
            yield RULE.finding(event.location, summary)


def _summary(analysis: Analysis, event: Event, source: ast.expr | None) -> str:
    if event.taints and _is_temporary(source):
        return f"`{event.name}` changes a temporary tensor, and its result is lost"
    statement = statement_around(analysis, event)
    if isinstance(statement, ast.Assign) and isinstance(source, ast.Name) and source.id in assigned_names(statement):
        return f"`{event.name}` returns None, so `{source.id}` is None afterwards"
    return ""


def _is_temporary(source: ast.expr | None) -> bool:
    if isinstance(source, ast.BinOp):
        return True
    return isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr in _COPIES


RULE = Rule(
    "SS314",
    "lost-result",
    "error",
    "every rank continues with its own value, or with None",
    "keep the tensor: `value = torch.tensor(...)`, `dist.all_reduce(value)`, and use `value`",
    find,
)
