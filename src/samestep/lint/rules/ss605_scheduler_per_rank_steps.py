"""A schedule that moves faster with more ranks.

`accelerator.prepare(scheduler)` makes each `scheduler.step()` count once per rank, since a step of N ranks reads N
batches. That fits a schedule in batches. A schedule in epochs that is stepped once per epoch moves by N epochs instead.

Bad:

```python
import torch
from accelerate import Accelerator
from torch import nn


def train(loader):
    accelerator = Accelerator()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)  # SS605
    for epoch in range(9):
        for x in loader:
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            optimizer.step()
        scheduler.step()
```

Good:

```python
import torch
from accelerate import Accelerator
from torch import nn


def train(loader):
    accelerator = Accelerator()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(9):
        for x in loader:
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            optimizer.step()
        scheduler.step()
```

Source: huggingface/accelerate#3797.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ServiceValue, Value, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for prepared schedulers that are stepped outside of the loop over the batches."""
    if any(_keeps_steps(event) for event in analysis.of("accelerator")):
        return
    for prepare in analysis.of("prepare"):
        if not isinstance(prepare.service, ServiceValue) or prepare.service.kind != "accelerator":
            continue
        for scheduler in _schedulers(prepare):
            steps = [each for each in analysis.of("scheduler_step") if _is_same(each.scheduler, scheduler)]
            if steps and all(_is_per_epoch(analysis, step) for step in steps):
                yield RULE.finding(
                    prepare.location,
                    "the scheduler is prepared, and its step once per epoch counts once per rank",
                    evidence=[f"`scheduler.step()` is outside of the loop over the batches ({steps[0].location})"],
                    related=[steps[0].location],
                )


def _keeps_steps(event: Event) -> bool:
    options = event.service.options
    is_split = "split_batches" in options and options["split_batches"].constant is not False
    flag = options.get("step_scheduler_with_optimizer")
    return is_split or (flag is not None and flag.constant is not True)


def _schedulers(prepare: Event) -> list[ServiceValue]:
    values = [option for each in prepare.arguments for option in options_of(each)]
    return [each for each in values if isinstance(each, ServiceValue) and each.kind == "scheduler"]


def _is_same(value: Value | None, scheduler: ServiceValue) -> bool:
    return any(each.location == scheduler.location for each in options_of(value))


def _is_per_epoch(analysis: Analysis, step: Event) -> bool:
    """Whether the step is in a loop that has a loop with the backward pass inside of it."""
    if not step.loops:
        return False
    inner = [each for each in analysis.of("backward", "optimizer_step") if step.loops[-1] in each.loops]
    return any(len(each.loops) > len(step.loops) for each in inner) and not any(
        each.loops == step.loops for each in inner
    )


RULE = Rule(
    "SS605",
    "scheduler-per-rank-steps",
    "error",
    "the learning rate falls N times as fast on N ranks",
    "leave the scheduler out of `accelerator.prepare`, or step it after every batch with a schedule in batches",
    find,
)
