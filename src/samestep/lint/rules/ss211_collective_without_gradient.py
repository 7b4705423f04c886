"""A collective in the loss that cuts the gradient.

`dist.all_gather` and `accelerator.gather` return tensors without a gradient. A loss that compares the samples of all
ranks, such as a contrastive loss, then treats the gathered features as constants: a part of its gradient is missing,
and the result depends on the number of ranks.

Bad:

```python
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    features = model(torch.randn(16, 8))
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)  # SS211
    logits = features @ torch.cat(parts).t()
    loss = F.cross_entropy(logits, torch.arange(16))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
model = DDP(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    features = model(torch.randn(16, 8))
    parts = dist_fn.all_gather(features)
    logits = features @ torch.cat(parts).t()
    loss = F.cross_entropy(logits, torch.arange(16))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
```

Source: HobbitLong/SupContrast#26, huggingface/accelerate#1154, mlfoundations/open_clip#616.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.module_trees import derived_from
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ContainerValue, TensorValue, Value, options_of

_CUTTING = ("all_gather", "all_gather_into_tensor", "gather", "gather_for_metrics")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for gathered features that a loss is computed from."""
    losses = [(event.order, event.loss, event.location) for event in analysis.of("backward")]
    losses += [
        (event.order, event.value, event.location)
        for event in analysis.of("return")
        if "hook:training_step" in event.contexts and event.location.function == "training_step"
    ]
    for event in analysis.of("collective"):
        if event.name not in _CUTTING or not event.is_grad or _keeps_gradient(event):
            continue
        source, results = _source(event), _results(event)
        if source is None or _puts_own_back(analysis, event, results):
            continue
        for order, loss, location in losses:
            if order > event.order and _reaches(loss, event, results):
                yield RULE.finding(
                    event.location,
                    f"the loss is computed from what `{event.name}` returns, which has no gradient",
                    evidence=[f"the features have a gradient ({source.location})", f"the loss is used ({location})"],
                    related=[location],
                )
                break


def _keeps_gradient(event: Event) -> bool:
    flag = event.keywords.get("sync_grads") or (event.arguments[2] if len(event.arguments) > 2 else None)
    return event.service is not None and flag is not None and flag.constant is True


def _source(event: Event) -> TensorValue | None:
    """What is gathered, if it has a gradient."""
    position = 0 if event.service is not None else 1
    given = event.arguments[position] if len(event.arguments) > position else event.keywords.get("tensor")
    return next((each for each in options_of(given) if isinstance(each, TensorValue) and each.needs_grad), None)


def _results(event: Event) -> list[Value]:
    """Where the gathered tensors are written to."""
    return [] if event.service is not None or not event.arguments else list(options_of(event.arguments[0]))


def _reaches(loss: Value, event: Event, results: list[Value]) -> bool:
    for each in derived_from(loss):
        if any(each is result for result in results):
            return True
        if event.service is not None and isinstance(each, TensorValue) and each.is_reduced:
            return each.location == event.location
    return False


def _puts_own_back(analysis: Analysis, event: Event, results: list[Value]) -> bool:
    """`parts[rank] = features`: the own features keep their gradient."""
    lists = [each for each in results if isinstance(each, ContainerValue)]
    return any(
        any(owner is each for owner in options_of(write.owner) for each in lists)
        for write in analysis.of("assign_item")
        if write.order > event.order
    )


RULE = Rule(
    "SS211",
    "collective-without-gradient",
    "error",
    "a part of the gradient is missing, and the result depends on the number of ranks",
    "`torch.distributed.nn.functional.all_gather(features)`, or `all_gather(features, sync_grads=True)` in Lightning",
    find,
)
