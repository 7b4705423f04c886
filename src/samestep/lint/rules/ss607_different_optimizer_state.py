"""Only some ranks load the state of the optimizer.

DDP sends the weights of rank 0 to all ranks, but not the state of the optimizer. If only rank 0 loads a checkpoint, its
optimizer has momentum and step counts that the others lack. The gradients are equal and the steps are not.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
net = nn.Linear(8, 1)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
if dist.get_rank() == 0:
    checkpoint = torch.load("last.pt", map_location="cpu")
    net.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])  # SS607
model = DDP(net)
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
net = nn.Linear(8, 1)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
checkpoint = torch.load("last.pt", map_location="cpu")
net.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
model = DDP(net)
```

Source: vllm-project/speculators#926.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event, are_opposite
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain
from samestep.lint.values import OptimizerValue, ServiceValue, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for optimizers and schedulers whose state only some ranks load."""
    for event in analysis.of("load_state"):
        guard = event.rank_guard
        if guard is None or not _has_steps(event) or "uncalled" in event.contexts or _has_counterpart(analysis, event):
            continue
        location = call_in_guard(event, guard)
        yield RULE.finding(
            location,
            "only some ranks load this state of the optimizer or scheduler",
            evidence=explain(guard),
            related=[event.location] if event.location != location else [],
        )


def _has_steps(event: Event) -> bool:
    return any(
        isinstance(each, OptimizerValue) or (isinstance(each, ServiceValue) and each.kind == "scheduler")
        for each in options_of(event.owner)
    )


def _has_counterpart(analysis: Analysis, event: Event) -> bool:
    """Whether the other ranks load a state as well."""
    own = event.rank_guard
    others = [each for each in analysis.of("load_state") if each is not event and _has_steps(each)]
    return own is not None and any(
        other.rank_guard is not None and are_opposite(own, other.rank_guard) for other in others
    )


RULE = Rule(
    "SS607",
    "different-optimizer-state",
    "error",
    "the weights of the ranks drift apart although their gradients are equal",
    'load the checkpoint on every rank: `optimizer.load_state_dict(torch.load(path, map_location="cpu")["optimizer"])`',
    find,
)
