"""Gradients are cleared at the wrong time, or never.

`optimizer.zero_grad()` belongs after a step or before the first micro-batch of the next one. Between the backward pass
and the step it discards the gradient that should be applied. In a loop over micro-batches it discards those of all
micro-batches but the last. Without it, each step applies the gradients of all steps before it.

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
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.zero_grad()  # SS603
    optimizer.step()
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
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
```

Source: bytetriper/RAE#67, huggingface/accelerate#1299, pytorch/torchtitan#3575.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.rule import Analysis, Rule
from samestep.lint.training_steps import accumulates, accumulations, mentions, step_of
from samestep.lint.values import OptimizerValue, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look at the order of backward pass, step and zero_grad in the loops of a script."""
    yield from _between(analysis)
    yield from _per_micro_batch(analysis)
    yield from _in_accelerate(analysis)
    if not analysis.of("trainer"):
        yield from _never(analysis)


def _between(analysis: Analysis) -> Iterator[Finding]:
    for backward in analysis.of("backward"):
        step = step_of(analysis, backward)
        if step is None or step.loops != backward.loops or len(_optimizers(analysis)) > 1:
            continue
        for clear in analysis.of("zero_grad"):
            is_between = backward.order < clear.order < step.order and clear.loops == step.loops
            if is_between and all(guard in step.guards for guard in clear.guards):
                yield RULE.finding(
                    clear.location,
                    "the gradients are cleared between the backward pass and the step",
                    evidence=[f"the backward pass ({backward.location})", f"the step ({step.location})"],
                    related=[backward.location, step.location],
                )


def _optimizers(analysis: Analysis) -> set[object]:
    steps = [each for event in analysis.of("optimizer_step") for each in options_of(event.optimizer)]
    return {each.location for each in steps if isinstance(each, OptimizerValue)}


def _per_micro_batch(analysis: Analysis) -> Iterator[Finding]:
    if len(_optimizers(analysis)) > 1:
        return
    yield from _in_inner_loop(analysis)
    for group in accumulations(analysis):
        if group.is_inner:
            continue  # an inner loop that clears gradients is not taken for an accumulation
        for clear in analysis.inside(group.loop, "zero_grad"):
            is_every = not any(guard not in group.backward.guards for guard in clear.guards)
            if is_every and clear.loops == group.backward.loops:
                yield RULE.finding(
                    clear.location,
                    "this clears the gradients of every micro-batch, but the step comes after several of them",
                    evidence=[f"the step ({group.step.location})"],
                    related=[group.step.location],
                    repair="clear the gradients where the optimizer takes its step, under the same condition",
                )


def _in_inner_loop(analysis: Analysis) -> Iterator[Finding]:
    """`for micro_batch in micro_batches: optimizer.zero_grad(); ...; loss.backward()`, and then one step."""
    for backward in analysis.of("backward"):
        step = step_of(analysis, backward)
        outer = len(step.loops) if step is not None else 0
        if step is None or not outer or backward.loops[:outer] != step.loops or len(backward.loops) != outer + 1:
            continue
        inner = backward.loops[-1]
        for clear in analysis.inside(inner, "zero_grad"):
            is_every = (
                clear.order < backward.order and clear.loops == backward.loops and clear.guards == backward.guards
            )
            if is_every and inner.loader is None and analysis.inside(inner, "model_call"):
                yield RULE.finding(
                    clear.location,
                    "this clears the gradients of every micro-batch, but the step comes after the loop over them",
                    evidence=[f"the step ({step.location})"],
                    related=[step.location],
                    repair="clear the gradients before the loop over the micro-batches, or after the step",
                )


def _in_accelerate(analysis: Analysis) -> Iterator[Finding]:
    """Accelerate lets zero_grad pass in the last micro-batch, where it discards those before it."""
    if not accumulates(analysis):
        return
    for clear in analysis.of("zero_grad"):
        if "accumulate" not in clear.contexts or any(
            mentions(analysis, each, "sync_gradients") for each in clear.guards
        ):
            continue
        later = [each for each in analysis.of("backward") if each.order > clear.order and each.loops == clear.loops]
        before = [each for each in analysis.of("backward") if each.order < clear.order and each.loops == clear.loops]
        if later and not before and "accumulate" in later[0].contexts:
            yield RULE.finding(
                clear.location,
                "in the last micro-batch of a step this discards the gradients of those before it",
                evidence=[f"the backward pass follows ({later[0].location})"],
                related=[later[0].location],
                repair="call `optimizer.zero_grad()` after `optimizer.step()`, at the end of the block",
            )


def _never(analysis: Analysis) -> Iterator[Finding]:
    for step in analysis.of("optimizer_step"):
        if not step.loops or "uncalled" in step.contexts or _is_cleared(analysis, step):
            continue
        if any(each.loops and each.loops[0] is step.loops[0] for each in analysis.of("backward")):
            yield RULE.finding(
                step.location,
                "no line of the loop clears the gradients",
                repair="`optimizer.zero_grad()` after `optimizer.step()`",
                consequence="each step applies the gradients of all steps before it",
            )
            return


def _is_cleared(analysis: Analysis, step: Event) -> bool:
    if analysis.of("zero_grad") or any(event.name == "zero_grad" for event in analysis.of("call")):
        return True
    return any(event.name == "grad" for event in analysis.of("assign_attribute"))


RULE = Rule(
    "SS603",
    "misplaced-zero-grad",
    "error",
    "the optimizer applies gradients that are zero, incomplete or of other steps",
    "clear the gradients before the first backward pass of a step, or after the step",
    find,
)
