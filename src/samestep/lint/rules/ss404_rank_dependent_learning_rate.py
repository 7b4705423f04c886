"""A learning rate that depends on the rank.

DDP exchanges gradients, not learning rates. If a scheduler gets the validation loss of each rank's own samples, the
learning rate falls on one rank and not on the others, and the weights of the ranks drift apart.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.optim.lr_scheduler import ReduceLROnPlateau


def end_epoch(model, optimizer, dataset):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)
    scheduler = ReduceLROnPlateau(optimizer)
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False, drop_last=True))
    with torch.no_grad():
        loss = sum(model(x).mean() for x in loader)
    scheduler.step(loss)  # SS404
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.optim.lr_scheduler import ReduceLROnPlateau


def end_epoch(model, optimizer, dataset):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)
    scheduler = ReduceLROnPlateau(optimizer)
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False, drop_last=True))
    with torch.no_grad():
        loss = sum(model(x).mean() for x in loader)
    dist.all_reduce(loss)
    scheduler.step(loss)
```

Source: lucidrains/DALLE-pytorch#268, Project-MONAI/tutorials#1461, Lightning-AI/pytorch-lightning#14624.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.rank_decisions import comes_from_reduce, learning_rate_decisions
from samestep.lint.rule import Analysis, Rule


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for learning rates and schedulers that get values of one rank."""
    if analysis.uses_samestep:
        return
    for location, what, taints in learning_rate_decisions(analysis):
        if not comes_from_reduce(taints):
            yield RULE.finding(
                location,
                f"{what} depends on the rank",
                evidence=[f"{taint.text} ({taint.location})" for taint in taints],
            )


RULE = Rule(
    "SS404",
    "rank-dependent-learning-rate",
    "error",
    "the ranks take different steps, and their weights drift apart",
    "`dist.all_reduce` the value over all ranks first, or `dist.broadcast` that of rank 0",
    find,
)
