"""Scaled gradients are clipped or applied.

`GradScaler` multiplies the loss, so that small gradients do not vanish in float16. Until `scaler.unscale_(optimizer)`
or `scaler.step(optimizer)` divides them, the gradients are thousands of times too large. Clipping them before makes
nearly every step as small as the threshold divided by the scale, and `optimizer.step()` applies them as they are.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for step in range(100):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(16, 8)).square().mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # SS608
    scaler.step(optimizer)
    scaler.update()
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
scaler = torch.amp.GradScaler("cuda")
for step in range(100):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(16, 8)).square().mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
```

Source: pytorch/examples#1196, Lightning-AI/pytorch-lightning#9599.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ServiceValue, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for what happens between a scaled backward pass and the division."""
    calls = [event for event in analysis.of("call") if _is_scaler(event)]
    scaled = [event for event in calls if event.name == "scale"]
    unscaled = [event for event in calls if event.name == "unscale_"]
    steps = [event for event in calls if event.name == "step"]
    if not scaled:
        return
    for clip in analysis.of("clip"):
        before = [each for each in scaled if each.order < clip.order and _shares_branch(each, clip)]
        if before and not any(before[-1].order < each.order < clip.order for each in unscaled) and steps:
            yield RULE.finding(
                clip.location,
                "the gradients are clipped while they are still multiplied with the scale",
                evidence=[
                    f"the loss is scaled ({before[-1].location})",
                    f"the division follows ({steps[-1].location})",
                ],
                related=[before[-1].location],
                repair="`scaler.unscale_(optimizer)` before the gradients are clipped",
            )
    yield from _applied(analysis, scaled, unscaled, steps)


def _is_scaler(event: Event) -> bool:
    for each in options_of(event.owner):
        if isinstance(each, ServiceValue) and each.kind == "scaler":
            enabled = each.options.get("enabled")
            return enabled is None or enabled.constant is not False
    return False


def _shares_branch(scale: Event, clip: Event) -> bool:
    """Whether there is a loop around both, and the loss is scaled whenever the gradients are clipped."""
    return scale.loops == clip.loops and all(guard in clip.guards for guard in scale.guards)


def _applied(analysis: Analysis, scaled: list[Event], unscaled: list[Event], steps: list[Event]) -> Iterator[Finding]:
    """`optimizer.step()` where only `scaler.step(optimizer)` divides."""
    if unscaled or steps:
        return
    for step in analysis.of("optimizer_step"):
        before = [each for each in scaled if each.order < step.order and _shares_branch(each, step)]
        if before:
            yield RULE.finding(
                step.location,
                "the optimizer applies gradients that are multiplied with the scale",
                evidence=[f"the loss is scaled ({before[-1].location})"],
                related=[before[-1].location],
                repair="`scaler.step(optimizer)` and `scaler.update()`",
            )


RULE = Rule(
    "SS608",
    "scaled-gradients",
    "error",
    "the size of a step depends on the scale, not on the gradient",
    "`scaler.unscale_(optimizer)` before gradients are read, and `scaler.step(optimizer)` to apply them",
    find,
)
