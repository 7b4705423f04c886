"""The last step of an epoch is inside of `no_sync()`.

If the number of batches is not a multiple of the accumulation steps, the last group of an epoch is shorter. A script
that takes a step for it must also leave `no_sync()` for its last batch. Otherwise the ranks apply gradients once per
epoch that they have not exchanged, and their weights drift apart.

Bad:

```python
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train_epoch(model, batches, optimizer):
    for i, x in enumerate(batches):
        boundary = (i + 1) % 4 == 0
        with contextlib.nullcontext() if boundary else model.no_sync():  # SS214
            (model(x).square().mean() / 4).backward()
        if boundary or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()


dist.init_process_group("nccl")
net = DDP(nn.Linear(8, 1))
train_epoch(net, [torch.randn(16, 8) for _ in range(10)], torch.optim.SGD(net.parameters(), lr=0.1))
```

Good:

```python
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train_epoch(model, batches, optimizer):
    for i, x in enumerate(batches):
        boundary = (i + 1) % 4 == 0 or i + 1 == len(batches)
        with contextlib.nullcontext() if boundary else model.no_sync():
            (model(x).square().mean() / 4).backward()
        if boundary:
            optimizer.step()
            optimizer.zero_grad()


dist.init_process_group("nccl")
net = DDP(nn.Linear(8, 1))
train_epoch(net, [torch.randn(16, 8) for _ in range(10)], torch.optim.SGD(net.parameters(), lr=0.1))
```

Source: huggingface/accelerate#2831, huggingface/accelerate#1847.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.rule import Analysis, Rule
from samestep.lint.unsynchronized_steps import unsynchronized_steps


def find(analysis: Analysis) -> Iterator[Finding]:
    """Count through loops with `no_sync()`, and look at the step of the last, shorter group."""
    for found in unsynchronized_steps(analysis):
        if found.is_tail:
            yield RULE.finding(
                found.synchronization.context,
                "the step for the last, shorter group of an epoch applies gradients that were not exchanged",
                evidence=[
                    f"`no_sync()` does not end for the last batch ({found.synchronization.location})",
                    f"the step after the last batch ({found.step.location})",
                ],
                related=[found.step.location],
            )


RULE = Rule(
    "SS214",
    "unsynchronized-tail",
    "error",
    "the weights of the ranks drift apart by one step per epoch",
    "leave `no_sync()` for the last batch too: `(i + 1) % accumulation_steps == 0 or i + 1 == len(loader)`",
    find,
)
