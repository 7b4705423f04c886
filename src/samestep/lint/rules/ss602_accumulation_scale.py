"""Accumulated losses that are not divided once by their number.

`loss.backward()` adds to the gradient. After four micro-batches it is the sum of four means, four times that of one
large batch, unless each loss is divided by four. Accelerate divides by itself if it knows the number of micro-batches:
a script that divides too divides twice, and a plain `loss.backward()` under Accelerate is not divided.

Bad:

```python
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    for i in range(4):
        model.require_backward_grad_sync = i == 3
        x, y = torch.randn(16, 8), torch.randn(16, 1)
        loss = F.mse_loss(model(x), y)
        loss.backward()  # SS602
    optimizer.step()
    optimizer.zero_grad()
```

Good:

```python
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    for i in range(4):
        model.require_backward_grad_sync = i == 3
        x, y = torch.randn(16, 8), torch.randn(16, 1)
        loss = F.mse_loss(model(x), y) / 4
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
```

Source: karpathy/nanoGPT#168, huggingface/accelerate#641, huggingface/diffusers#10553.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.module_trees import exchanges
from samestep.lint.rule import Analysis, Rule
from samestep.lint.training_steps import (
    Factor,
    accumulated_in_hook,
    accumulation_option,
    accumulations,
    factors,
    step_of,
)
from samestep.lint.values import MethodValue, TensorValue, Value, options_of

_SCALING = ("div_", "mul_", "true_divide_")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for accumulated losses, and for what they are divided by."""
    if not _scales_gradients(analysis):
        for group in accumulations(analysis):
            yield from _undivided(analysis, group.backward, group.step, group.count, is_inner=group.is_inner)
        for event in analysis.of("backward"):
            found = accumulated_in_hook(analysis, event)
            if found is not None:
                yield from _undivided(analysis, event, *found)
    yield from _divided_twice(analysis)
    yield from _without_framework(analysis)
    yield from _without_context(analysis)
    yield from _unprepared_optimizer(analysis)


def _unprepared_optimizer(analysis: Analysis) -> Iterator[Finding]:
    """With accumulation, Accelerate skips the steps of a prepared optimizer between the groups, and of no other."""
    prepares = [each for each in analysis.of("prepare") if each.service.kind == "accelerator"]
    if not prepares or accumulation_option(analysis) is None:
        return
    for step in analysis.of("optimizer_step"):
        if "accumulate" in step.contexts and not any(
            getattr(e, "is_prepared", True) for e in options_of(step.optimizer)
        ):
            yield RULE.finding(
                prepares[0].location,
                "`accelerator.prepare` does not get the optimizer, so it takes a step after every micro-batch",
                evidence=[f"the step ({step.location})"],
                related=[step.location],
                repair="pass it as well: `accelerator.prepare(model, optimizer, loader)`",
            )
            return


def _scales_gradients(analysis: Analysis) -> bool:
    """Whether the script divides the gradients instead of the loss."""
    for event in analysis.of("in_place", "assign_attribute"):
        owners = [each for each in options_of(event.owner) if isinstance(each, TensorValue)]
        if event.kind == "in_place" and event.name in _SCALING and any(each.content == "gradient" for each in owners):
            return not exchanges(analysis, "gradient") or not event.value or not event.value.is_world
        if event.kind == "assign_attribute" and event.name == "grad" and any(each.content for each in owners):
            return True
    return any("foreach_div" in event.name or "foreach_mul" in event.name for event in analysis.of("call"))


def _is_mean(event: Event) -> bool:
    losses = [each for each in options_of(event.loss) if isinstance(each, TensorValue)]
    return bool(losses) and all(each.is_mean for each in losses)


def _is_divided(event: Event, count: object) -> bool:
    """Whether the loss may be divided by the number of micro-batches, also if only under a condition."""
    return any(_may_divide(factor, count) for each in options_of(event.loss) for factor in factors(each))


def _undivided(
    analysis: Analysis, event: Event, step: Event, size: ast.expr | None, *, is_inner: bool = False
) -> Iterator[Finding]:
    if not _is_mean(event) or accumulation_option(analysis) is not None:
        return
    count = size.value if isinstance(size, ast.Constant) else None
    same = [each for each in analysis.of("backward") if each.node is event.node]  # an event per value that it may be
    if count == 1 or any(_is_divided(each, count) for each in same):
        return
    where = "after the loop" if is_inner else "after several of them"
    yield RULE.finding(
        event.location,
        "the loss of a micro-batch is a mean, and the gradients of several are added without a division",
        evidence=[f"the optimizer takes a step {where} ({step.location})"],
        related=[step.location],
    )


def _may_divide(factor: Factor, count: object) -> bool:
    """Whether a factor may be the number of micro-batches: not a weight, such as 0.5, that is written as a number."""
    constant = factor.operand.constant
    if not factor.operand.is_known or not isinstance(constant, int | float) or not isinstance(count, int):
        return not isinstance(factor.operand, TensorValue) or factor.operation == "/"
    if factor.operation == "/":
        return constant == count
    return abs(constant * count - 1) < 1e-6


def _divided_twice(analysis: Analysis) -> Iterator[Finding]:
    option = accumulation_option(analysis)
    for event in analysis.of("backward"):
        if option is None or event.via != "accelerator":
            continue
        for factor in factors(event.loss):
            if factor.operation == "/" and factor.location is not None and _is_same(factor.operand, option):
                yield RULE.finding(
                    factor.location,
                    "the loss is divided here, and `accelerator.backward` divides it again",
                    evidence=[f"the Accelerator knows the number of micro-batches ({option.location})"],
                    related=[event.location],
                    repair="remove the division, or leave `gradient_accumulation_steps` out of `Accelerator(...)`",
                )


def _is_same(value: Value, option: Value) -> bool:
    if value is option or (value.is_known and value.constant == option.constant):
        return True
    if isinstance(value, MethodValue):
        name = option.attribute if isinstance(option, MethodValue) else ""
        return value.attribute in (name, "gradient_accumulation_steps")
    return False


def _without_context(analysis: Analysis) -> Iterator[Finding]:
    """`accelerator.backward` always divides; without `accumulate`, a step may follow every micro-batch."""
    option = accumulation_option(analysis)
    if option is None or not option.is_known or analysis.of("enter"):
        return
    for event in analysis.of("backward"):
        step = step_of(analysis, event)
        if event.via != "accelerator" or step is None or "uncalled" in event.contexts or not event.loops:
            continue
        is_each_time = step.loops == event.loops and set(step.guards) <= set(event.guards)
        if is_each_time and not any(_scales_by(factor, option) for factor in factors(event.loss)):
            yield RULE.finding(
                event.location,
                f"`accelerator.backward` divides the loss by {option.constant}, and every micro-batch takes a step",
                evidence=[
                    f"the Accelerator is to accumulate ({option.location})",
                    f"the optimizer takes a step after each backward pass ({step.location})",
                ],
                related=[step.location],
                consequence="the gradients are too small, and no step has the number of samples that it should",
                repair="put the micro-batch into `with accelerator.accumulate(model):`",
            )
            return


def _scales_by(factor: Factor, option: Value) -> bool:
    return factor.operation == "*" and _is_same(factor.operand, option)


def _without_framework(analysis: Analysis) -> Iterator[Finding]:
    option = accumulation_option(analysis)
    for event in analysis.of("backward"):
        if option is None or event.via != "tensor" or "accumulate" not in event.contexts:
            continue
        if _is_mean(event) and not _is_divided(event, option.constant):
            yield RULE.finding(
                event.location,
                "`loss.backward()` does not divide the loss by the number of micro-batches",
                evidence=[f"the Accelerator accumulates ({option.location})"],
                repair="`accelerator.backward(loss)`, which divides by the number of micro-batches",
            )


RULE = Rule(
    "SS602",
    "accumulation-scale",
    "error",
    "the effective learning rate and the threshold of clipping change with the number of micro-batches",
    "`(loss / accumulation_steps).backward()`",
    find,
)
