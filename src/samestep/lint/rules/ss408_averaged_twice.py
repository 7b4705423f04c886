"""A number is divided by the number of ranks twice.

A function that returns the mean over the ranks has divided the sum already. If its caller divides again, the number
that is reported is too small by the number of ranks.

Bad:

```python
import torch
import torch.distributed as dist


def mean_of_ranks(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


dist.init_process_group("gloo")
loss = mean_of_ranks(torch.ones(1)) / dist.get_world_size()  # SS408
print("loss", loss.item())
```

Good:

```python
import torch
import torch.distributed as dist


def mean_of_ranks(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


dist.init_process_group("gloo")
loss = mean_of_ranks(torch.ones(1))
print("loss", loss.item())
```

Source: the documentation of `torch.distributed.ReduceOp`: `AVG` and helpers such as `reduce_mean` divide themselves.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.rule import Analysis, Rule


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for means over the ranks that are divided by the number of ranks."""
    for event in analysis.of("averaged_again"):
        yield RULE.finding(
            event.location,
            "this is divided by the number of ranks twice",
            evidence=[f"it was divided by their number before ({event.before.location})"],
        )


RULE = Rule(
    "SS408",
    "averaged-twice",
    "error",
    "the number is too small by the number of ranks",
    "divide once: where the sum over the ranks is computed, or where it is used",
    find,
)
