"""The gradient is not the mean over the ranks.

DDP gives the optimizer the mean of the gradients of all ranks. A hand-written `all_reduce` computes their sum: without
a division by the number of ranks, the step grows with them. A loss that is multiplied with or divided by the number of
ranks under DDP changes the step in the same way, also if that happens in a function that averages it for the log.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # SS205
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
```

Source: mlfoundations/open_clip#616.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.lint.events import Event
from samestep.lint.library.operations import ARITHMETIC
from samestep.lint.module_trees import (
    Freezing,
    contains,
    derived_from,
    exchanged_models,
    exchanges,
    has_own_parameters,
    has_unknown_exchange,
    optimized,
    parts_of,
)
from samestep.lint.rule import Analysis, Rule
from samestep.lint.training_steps import Factor, factors
from samestep.lint.values import ChoiceValue, ExternalValue, TensorValue, Value, options_of

_SCALING = ("div_", "mul_", "true_divide_")
_LEAVE = "leave the loss as it is: DDP divides the sum of the gradients by the number of ranks"
_COPY = "reduce a copy for the log, `loss.detach().clone()`, and call `backward()` on the loss itself"


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for sums of gradients that nothing divides, and for losses that are scaled by the number of ranks."""
    summed = [event for event in exchanges(analysis, "gradient") if event.name == "all_reduce" and _is_sum(event)]
    if summed and not _is_scaled(analysis):
        yield RULE.finding(
            summed[0].location,
            "gradients are summed over the ranks and never divided by their number",
            evidence=["`all_reduce` computes the sum by default"],
        )
    elif summed and not analysis.wrapped:
        yield from _incomplete(analysis, summed)
    if (analysis.wrapped or analysis.of("prepare")) and not exchanges(analysis, "gradient"):
        yield from _scaled_losses(analysis)


def _incomplete(analysis: Analysis, summed: list[Event]) -> Iterator[Finding]:
    """An exchange of the gradients of some submodules of the model that the optimizer trains."""
    exchanged = [model for event in exchanges(analysis, "gradient") for model in exchanged_models(event)]
    has_choice = any(isinstance(value, ChoiceValue) for event in summed for value in event.tensors)
    if not exchanged or has_choice or has_unknown_exchange(analysis):
        return
    for event in analysis.of("optimizer"):
        for model, _ in optimized(event.optimizer.parameters):
            inside = [each for each in exchanged if contains(model, each)]
            own = [part for part in parts_of(model) if has_own_parameters(part)]
            left = [part for part in own if not any(contains(each, part) for each in exchanged)]
            if inside and left and not any(contains(each, model) for each in exchanged):
                frozen = Freezing(analysis)
                if not all(frozen.was_frozen(part, summed[0].order) for part in left):
                    yield RULE.finding(
                        _where_chosen(analysis, summed[0]),
                        "only the gradients of some submodules are exchanged",
                        evidence=[f"the optimizer trains the whole model ({event.location})"],
                        related=[event.location, summed[0].location],
                        repair="exchange the gradients of all parameters: `for p in model.parameters(): ...`",
                    )
                    return


def _where_chosen(analysis: Analysis, exchange: Event) -> Location:
    """The line that says whose gradients are exchanged: the call of the function that does it if it gets a module."""
    nodes = [each.node for each in analysis.of("parameters") if each.frames == exchange.frames]
    owners = [each.func.value for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)]
    is_passed = all(isinstance(each, ast.Name) and each.id != "self" for each in owners)
    return exchange.frames[-1] if is_passed and exchange.frames else exchange.location


def _is_sum(event: Event) -> bool:
    operation = event.keywords.get("op") or (event.arguments[1] if len(event.arguments) > 1 else None)
    if operation is None:
        return True
    return isinstance(operation, ExternalValue) and operation.qualname.endswith(".SUM")


def _is_scaled(analysis: Analysis) -> bool:
    """Whether something that may be the gradient, the loss or the learning rate is divided."""
    for event in analysis.of("in_place"):
        is_gradient = any(
            isinstance(each, TensorValue) and each.content == "gradient" for each in options_of(event.owner)
        )
        if is_gradient and (event.name in _SCALING or _has_factor(event.value)):
            return True
        if event.name in _SCALING and event.value is not None and event.value.is_world:
            return True
    for event in analysis.of("assign_attribute"):
        if event.name in ("grad", "data") and (_has_factor(event.value) or event.value is None or event.value.is_world):
            return True
    for event in analysis.of("call"):  # torch._foreach_div_, torch.div(..., out=)
        if "div" in event.name.rpartition(".")[2] or "foreach_mul" in event.name:
            return True
    losses = [event.loss for event in analysis.of("backward")]
    rates = [event.optimizer.options.get("lr") for event in analysis.of("optimizer")]
    return any(each is not None and each.is_world for each in (*losses, *rates))


def _has_factor(value: Value | None) -> bool:
    return any(isinstance(each, TensorValue) and each.operation in ("/", "*") for each in derived_from(value))


def _scaled_losses(analysis: Analysis) -> Iterator[Finding]:
    for event in analysis.of("backward"):
        loss = next((each for each in options_of(event.loss) if isinstance(each, TensorValue)), None)
        if loss is None or not loss.is_mean or _has_collective(analysis, event):
            continue
        found = [*factors(loss), *_in_place(analysis, event, loss)]
        scaled = [each for each in found if _is_world_size(each.operand)]
        if len(scaled) != 1 or scaled[0].location is None or _compensates(found, scaled[0]):
            continue
        verb = "multiplied with" if scaled[0].operation == "*" else "divided by"
        is_logged = any(_is_in_loss(each, event.loss) for each in analysis.of("collective"))
        yield RULE.finding(
            scaled[0].location,
            f"the loss is a mean and {verb} the number of ranks, but DDP computes the mean of the gradients",
            evidence=[f"the backward pass ({event.location})"],
            related=[event.location],
            repair=_COPY if is_logged else _LEAVE,
        )


def _in_place(analysis: Analysis, backward: Event, loss: TensorValue) -> list[Factor]:
    """What a loss is scaled by with `loss.div_(...)`, and by the mean that `accelerator.reduce` computes."""
    before = [event for event in analysis.of("in_place", "collective") if event.order < backward.order]
    parts = {id(each) for each in derived_from(loss)}
    found = [
        Factor("*" if event.name == "mul_" else "/", event.value, event.location)
        for event in before
        if event.kind == "in_place" and event.name in _SCALING and id(event.owner) in parts and event.value is not None
    ]
    for event in before:
        how = event.call.get("reduction", 1) if event.kind == "collective" and event.service is not None else None
        is_mean = event.name == "reduce" and how is not None and how.constant == "mean"
        if is_mean and _is_in_loss(event, loss):
            found.append(Factor("/", Value(is_world=True), event.location))
    return found


def _is_world_size(value: Value) -> bool:
    """Whether it is the number of ranks itself, not a number of micro-batches that is computed from it."""
    return value.is_world and not isinstance(value, TensorValue) and value.name != ARITHMETIC


def _compensates(found: list[Factor], scaled: Factor) -> bool:
    """Whether another factor is a tensor, such as a count of all ranks."""
    return any(isinstance(each.operand, TensorValue) for each in found if each is not scaled)


def _has_collective(analysis: Analysis, backward: Event) -> bool:
    """Whether the loss may contain samples of other ranks."""
    inside = backward.loops[0] if backward.loops else None
    names = ("all_gather", "all_gather_into_tensor", "all_reduce", "gather", "reduce")
    return any(
        event.name in names and event.order < backward.order and (inside is None or inside in event.loops)
        for event in analysis.of("collective")
        if not _is_in_loss(event, backward.loss)
    )


def _is_in_loss(event: Event, loss: Value) -> bool:
    """Whether a collective changes the value of the loss for the log: its gradient stays that of this rank."""
    if event.name not in ("all_reduce", "reduce") or not event.tensors:
        return False
    reduced = [each for each in options_of(event.tensors[0]) if isinstance(each, TensorValue) and each.needs_grad]
    parts = [each for each in derived_from(loss) if isinstance(each, TensorValue)]
    return any(each is part for each in reduced for part in parts)


RULE = Rule(
    "SS205",
    "wrong-gradient",
    "error",
    "the size of a step depends on the number of ranks",
    "divide after the sum: `p.grad /= dist.get_world_size()`, or pass `op=dist.ReduceOp.AVG` (NCCL)",
    find,
)
