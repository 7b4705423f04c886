"""The last micro-batch of a step is inside of `no_sync()`.

DDP exchanges what was accumulated in the first backward pass outside of `no_sync()`. That must be the last one before
`optimizer.step()`. If another micro-batch leaves `no_sync()`, or none, the optimizer applies gradients that the ranks
have not exchanged, and their weights drift apart.

Bad:

```python
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(100):
    sync = i % 4 == 0  # SS213
    with contextlib.nullcontext() if sync else model.no_sync():
        loss = model(torch.randn(16, 8)).square().mean()
        (loss / 4).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
```

Good:

```python
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(100):
    sync = (i + 1) % 4 == 0
    with contextlib.nullcontext() if sync else model.no_sync():
        loss = model(torch.randn(16, 8)).square().mean()
        (loss / 4).backward()
    if sync:
        optimizer.step()
        optimizer.zero_grad()
```

Source: modelscope/FunASR#3472.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.rule import Analysis, Rule
from samestep.lint.training_steps import Synchronization
from samestep.lint.unsynchronized_steps import UnsynchronizedStep, unsynchronized_steps


def find(analysis: Analysis) -> Iterator[Finding]:
    """Count through loops with `no_sync()`, and look for steps whose last backward pass is inside of it."""
    for found in unsynchronized_steps(analysis):
        if found.is_tail:
            continue
        yield RULE.finding(
            found.synchronization.location,
            "the last backward pass before a step is inside of `no_sync()`",
            evidence=[_how(found.synchronization), _what(found)],
            related=[found.step.location],
        )


def _what(found: UnsynchronizedStep) -> str:
    if not found.numbers:
        return f"the step applies gradients that were not exchanged ({found.step.location})"
    number = f"with 4 micro-batches per step, the step after micro-batch {found.numbers[0]}"
    return f"{number} applies gradients that were not exchanged ({found.step.location})"


def _how(synchronization: Synchronization) -> str:
    if synchronization.is_late:
        return f"the forward pass, which decides, comes before the flag is set ({synchronization.context})"
    return f"`no_sync()` ({synchronization.context})"


RULE = Rule(
    "SS213",
    "unsynchronized-last-micro-batch",
    "error",
    "the optimizer applies gradients of one rank, and the weights of the ranks drift apart",
    "leave `no_sync()` for the last micro-batch of a step: use the condition of `optimizer.step()`",
    find,
)
