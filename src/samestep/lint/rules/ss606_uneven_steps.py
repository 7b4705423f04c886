"""Ranks take different numbers of optimizer steps.

DDP gives all ranks the same gradients, and their weights stay equal because all ranks apply them. A step under a
condition on the rank, or on the loss of the rank's own batch, changes the weights of some ranks only. DDP does not
notice.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    if dist.get_rank() == 0:
        optimizer.step()  # SS606
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
```

Source: pytorch/pytorch#22834.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event, Guard
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for steps that only some ranks take."""
    for step in analysis.of("optimizer_step", "scheduler_step"):
        guard = _differing(analysis, step)
        if guard is None or "uncalled" in step.contexts:
            continue
        what = "optimizer" if step.kind == "optimizer_step" else "scheduler"
        location = call_in_guard(step, guard)
        yield RULE.finding(
            location,
            f"only some ranks take this step of the {what}",
            evidence=explain(guard),
            related=[step.location] if step.location != location else [],
        )


def _differing(analysis: Analysis, step: Event) -> Guard | None:
    """A condition in which ranks differ, and that the backward pass before the step does not have."""
    before = [each for each in analysis.of("backward") if each.order < step.order and _shares_loop(each, step)]
    is_optimizer = step.kind == "optimizer_step"
    for guard in reversed(step.guards):
        if any(guard in each.guards for each in before) or (is_optimizer and not before):
            continue
        if guard.depends_on_rank or (guard.differs and is_optimizer):
            return guard
    return None


def _shares_loop(one: Event, other: Event) -> bool:
    return not one.loops or (bool(other.loops) and one.loops[0] is other.loops[0])


RULE = Rule(
    "SS606",
    "uneven-steps",
    "error",
    "the weights of the ranks differ from the first step that only some of them take",
    "call `optimizer.step()` on every rank, and decide together whether to skip one: `dist.all_reduce(is_bad)`",
    find,
)
