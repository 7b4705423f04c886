"""A schedule that moves faster with more ranks.

`accelerator.prepare(scheduler)` makes each `scheduler.step()` count once per rank, since a step of N ranks reads N
batches. That fits a schedule in batches. A schedule in epochs that is stepped once per epoch moves by N epochs instead.

Without Accelerate it is the other way round: `len(dataset) // batch_size` steps of a schedule are those of one rank,
and each of N ranks takes only an N-th of them.

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

import ast
from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event, Loop
from samestep.lint.module_trees import site
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import FunctionValue, LoaderValue, SampleCount, ServiceValue, Value, is_same_value, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for schedules whose steps are not those that a rank takes."""
    yield from _longer_than_training(analysis)
    yield from _prepared(analysis)


def _longer_than_training(analysis: Analysis) -> Iterator[Finding]:
    """A schedule in batches of the whole dataset, of which each rank reads a part."""
    for event in analysis.of("scheduler"):
        steps = [each for each in analysis.of("scheduler_step") if _is_same(each.scheduler, event.scheduler)]
        if any(_is_same(event.scheduler, each) for prepare in analysis.of("prepare") for each in _schedulers(prepare)):
            continue
        for option in _numbers(event.scheduler):
            count = option.sample_count if not option.is_world else None
            loop = _loop_over(steps, count) if count is not None else None
            if loop is None:
                continue
            yield RULE.finding(
                site(event, steps[0].location.function, steps[0].location.file),
                "the schedule counts the batches of the whole dataset, and each rank takes a part of these steps",
                evidence=[f"each rank reads its own part ({loop.location})", f"a step per batch ({steps[0].location})"],
                related=[loop.location, steps[0].location],
                consequence="training ends early in the schedule: the learning rate stays too high",
                repair="count the batches of a rank: `epochs * len(loader)`",
            )
            break


def _numbers(scheduler: ServiceValue) -> Iterator[Value]:
    """The options of a scheduler, and what a function that it gets, such as a lambda, uses of the names around it."""
    for option in scheduler.options.values():
        yield option
        if isinstance(option, FunctionValue) and option.node is not None and option.scope is not None:
            names = {each.id for each in ast.walk(option.node) if isinstance(each, ast.Name)}
            yield from (found for name in sorted(names) if (found := option.scope.get(name)) is not None)


def _loop_over(steps: list[Event], count: SampleCount) -> Loop | None:
    """The loop over the own part of the dataset in which the scheduler takes a step per batch."""
    for loop in (each.loops[-1] for each in steps if each.loops):
        loader, counted = loop.loader, count.dataset
        if isinstance(counted, LoaderValue):  # `len(loader)` before `accelerator.prepare`
            is_other = loader is not None and loader.is_prepared and not counted.is_prepared and not count.divisors
            if is_other and loader is not None and loader.location == counted.location:
                return loop
            continue
        if loader is None or loader.is_prepared or not loader.is_sharded or "batch_size" not in loader.options:
            continue
        size = loader.options["batch_size"]
        is_size = not size.is_world and len(count.divisors) == 1 and is_same_value(size, count.divisors[0])
        if is_size and any(each is count.dataset for each in options_of(loader.dataset)):
            return loop
    return None


def _prepared(analysis: Analysis) -> Iterator[Finding]:
    """Prepared schedulers that are stepped outside of the loop over the batches."""
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
