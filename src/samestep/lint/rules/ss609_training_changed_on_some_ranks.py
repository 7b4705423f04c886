"""Only some ranks clear, clip or change what all ranks train.

The ranks keep the same weights only if each of them does all that changes the gradients or the weights. If rank 0 alone
clears or clips its gradients, clamps the weights, or continues in evaluation mode, the ranks drift apart.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    if dist.get_rank() == 0:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # SS609
        print(norm)
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if dist.get_rank() == 0:
        print(norm)
    optimizer.step()
```

Source: the documentation of DistributedDataParallel: it averages gradients and assumes that all else is equal.
"""

from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding
from samestep.lint.events import Event, are_opposite
from samestep.lint.module_trees import is_exchanged, is_module, modules_of, overlap, raw_module
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain
from samestep.lint.values import TensorValue, Value, options_of

_SUMMARIES: Final = {
    "zero_grad": "only some ranks clear their gradients",
    "clip": "only some ranks clip the gradients",
    "in_place": "only some ranks change these weights or gradients",
    "mode": "only some ranks go on in evaluation mode",
}


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for changes under a condition on the rank, in a loop in which all ranks train."""
    for event in analysis.of(*_SUMMARIES):
        guard = event.rank_guard
        if guard is None or guard.kind != "if" or "uncalled" in event.contexts or not _is_in_training(analysis, event):
            continue
        if not _matters(analysis, event) or _has_counterpart(analysis, event):
            continue
        yield RULE.finding(
            call_in_guard(event, guard),
            _SUMMARIES[event.kind],
            evidence=explain(guard),
            related=[event.location],
            severity="warning" if event.kind == "mode" else None,  # without dropout and batch norm it changes nothing
            repair="call `model.train()` again after the evaluation" if event.kind == "mode" else "",
        )


def _is_in_training(analysis: Analysis, event: Event) -> bool:
    """Whether a loop around it has a backward pass of all ranks."""
    backward = (each for each in analysis.of("backward") if each.rank_guard is None)
    return any(loop in event.loops for each in backward for loop in each.loops)


def _matters(analysis: Analysis, event: Event) -> bool:
    if event.kind == "mode":
        return event.mode == "eval" and _is_wrapped(analysis, event.model) and not _is_trained_again(analysis, event)
    if event.kind != "in_place":
        return bool(analysis.wrapped)
    tensors = [each for each in options_of(event.owner) if isinstance(each, TensorValue)]
    models = [model for each in tensors if each.content in ("parameter", "gradient") for model in modules_of(each)]
    sent = any(is_exchanged(analysis, each, "parameter", "state", after=event.order) for each in models)
    return any(_is_wrapped(analysis, each) for each in models) and not sent


def _is_wrapped(analysis: Analysis, model: Value) -> bool:
    trees = [tree for wrap in analysis.wrapped for tree in options_of(wrap.inner) if is_module(tree)]
    return any(
        is_module(each) and overlap(raw_module(tree), raw_module(each)) for tree in trees for each in options_of(model)
    )


def _is_trained_again(analysis: Analysis, event: Event) -> bool:
    """Whether the loop around it has a call of `train()`."""
    modes = (each for each in analysis.of("mode") if each.mode == "train")
    return any(event.loops[0] in each.loops for each in modes)


def _has_counterpart(analysis: Analysis, event: Event) -> bool:
    """Whether the other ranks do the same in another branch."""
    others = (each.rank_guard for each in analysis.of(event.kind) if each is not event)
    own = event.rank_guard
    return own is not None and any(each is not None and are_opposite(own, each) for each in others)


RULE = Rule(
    "SS609",
    "training-changed-on-some-ranks",
    "error",
    "the weights of the ranks drift apart although their gradients are equal",
    "do it on every rank, and print on rank 0 only",
    find,
)
