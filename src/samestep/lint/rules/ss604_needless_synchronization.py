"""Gradients that are exchanged after every micro-batch.

DDP exchanges all gradients in every backward pass. With gradient accumulation only the last backward pass of a step
needs that. `no_sync()` around the others gives the same result and sends a fraction of the data.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(100):
    loss = model(torch.randn(16, 8)).square().mean() / 4
    loss.backward()  # SS604
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
    is_last = (i + 1) % 4 == 0
    with contextlib.nullcontext() if is_last else model.no_sync():
        loss = model(torch.randn(16, 8)).square().mean() / 4
        loss.backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
```

Source: goodfire-ai/spd#216, NVIDIA/apex#1175.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.rule import Analysis, Rule, is_wrapped
from samestep.lint.training_steps import Accumulation, accumulations
from samestep.lint.values import ModelValue

_DELAYS = ("no_sync", "no_backward_sync", "accumulate")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for accumulation without no_sync()."""
    has_ddp = any(wrap.wrapper == "ddp" and isinstance(wrap.model, ModelValue) for wrap in analysis.wrapped)
    if not has_ddp and not analysis.of("prepare"):
        return
    if any(wrap.wrapper == "fsdp" for wrap in analysis.wrapped):
        return
    yield from _forward_outside(analysis)
    if _delays(analysis):
        return
    for group in accumulations(analysis):
        if _is_one(group):
            continue
        yield RULE.finding(
            group.backward.location,
            "the gradients are exchanged in the backward pass of every micro-batch",
            evidence=[f"the optimizer takes a step after several of them ({group.step.location})"],
            related=[group.step.location],
        )
        return


def _forward_outside(analysis: Analysis) -> Iterator[Finding]:
    """DDP decides in the forward pass whether the next backward pass exchanges gradients."""
    for backward in analysis.of("backward"):
        if "no_sync" not in backward.contexts:
            continue
        calls = [
            call
            for call in analysis.of("model_call")
            if call.is_grad and call.loops == backward.loops and is_wrapped(call.model) and call.order < backward.order
        ]
        entered = [each for each in analysis.of("enter") if each.name == "no_sync" and each.loops == backward.loops]
        if calls and entered and not any("no_sync" in call.contexts for call in calls):
            yield RULE.finding(
                entered[0].location,
                "only the backward pass is inside of `no_sync()`, so the gradients are exchanged nevertheless",
                evidence=[f"the forward pass is outside, and decides ({calls[0].location})"],
                related=[calls[0].location],
                repair="put the forward pass inside of `no_sync()` as well",
            )
            return


def _delays(analysis: Analysis) -> bool:
    if any(event.name in _DELAYS for event in analysis.of("enter")):
        return True
    if any(event.name in ("set_requires_gradient_sync", *_DELAYS) for event in analysis.of("call")):
        return True
    return any(event.name == "require_backward_grad_sync" for event in analysis.of("assign_attribute"))


def _is_one(group: Accumulation) -> bool:
    return isinstance(group.count, ast.Constant) and group.count.value == 1


RULE = Rule(
    "SS604",
    "needless-synchronization",
    "warning",
    "the result is right, but each step sends the gradients several times",
    "`with model.no_sync():` around all micro-batches but the last",
    find,
)
