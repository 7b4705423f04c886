"""Buffers that each rank updates from its own samples.

A forward pass that writes statistics of its batch into a buffer (an EMA codebook, a running mean, a queue of negatives)
writes other values on every rank. DDP does not average buffers: at the next forward pass it overwrites them with those
of rank 0, so that the samples of the other ranks have no effect. With `broadcast_buffers=False` they stay different.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Normalize(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)  # SS210
        return self.linear(x - self.average)


def train(dataset):
    dist.init_process_group("nccl")
    model = DDP(Normalize())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x in DataLoader(dataset, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Normalize(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        if self.training:
            mean = x.detach().mean(0)
            dist.all_reduce(mean)
            self.average.lerp_(mean / dist.get_world_size(), 0.1)
        return self.linear(x - self.average)


def train(dataset):
    dist.init_process_group("nccl")
    model = DDP(Normalize())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x in DataLoader(dataset, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
```

Source: espnet/espnet#6284, lucidrains/vector-quantize-pytorch#17.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.module_trees import contains, is_exchanged, is_trained, key_of, modules_of
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import TensorValue, Value, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for forward passes that write something of their batch into a buffer."""
    buffers = _registered(analysis)
    reported = set[int]()
    for event in analysis.of("in_place", "assign_attribute", "assign_item"):
        if not _is_training(analysis, event) and not ("forward" in event.contexts and event.is_grad):
            continue
        for owner, name in _written(event, buffers):
            written = [each for each in _inputs(event) if any(taint.kind == "data" for taint in each.taints)]
            if not written or key_of(owner) in reported or not _is_trained(analysis, owner):
                continue
            if is_exchanged(analysis, owner, "buffer", "state"):
                continue
            reported.add(key_of(owner))
            reason = next(taint for each in written for taint in each.taints if taint.kind == "data")
            yield RULE.finding(
                event.location,
                f"{name} is updated from the samples of one rank",
                evidence=[f"{reason.text} ({reason.location})"],
            )


def _registered(analysis: Analysis) -> set[tuple[int, str]]:
    found = set[tuple[int, str]]()
    for event in analysis.of("call"):
        if event.name == "register_buffer" and event.owner is not None and event.arguments:
            found.add((key_of(event.owner), str(event.arguments[0].constant)))
    return found


def _written(event: Event, buffers: set[tuple[int, str]]) -> Iterator[tuple[Value, str]]:
    """Modules whose buffer an event writes, and the name of it."""
    for option in options_of(event.owner):
        if event.kind == "assign_attribute":
            if (key_of(option), event.name) in buffers:
                yield option, f"the buffer `{event.name}`"
        elif isinstance(option, TensorValue) and option.content == "buffer":
            for module in modules_of(option):
                yield module, "a buffer"


def _inputs(event: Event) -> list[Value]:
    if event.call is not None:
        return list(event.call.inputs)
    return [each for each in (event.value, event.data.get("key")) if each is not None]


def _is_training(analysis: Analysis, event: Event) -> bool:
    """Whether the forward pass around it is one that is trained: updates are often under no_grad()."""
    backwards = analysis.of("backward")
    return any(loop in each.loops for each in backwards for loop in event.loops)


def _is_trained(analysis: Analysis, module: Value) -> bool:
    """Whether the module belongs to a model that is wrapped, or computes something of the loss outside of it."""
    if analysis.wrapped and is_trained(analysis, module):
        return True
    trees = [tree for wrap in analysis.wrapped for tree in options_of(wrap.inner)]
    trees += [each for event in analysis.of("prepare") for value in event.arguments for each in options_of(value)]
    return any(contains(tree, module) for tree in trees)


RULE = Rule(
    "SS210",
    "rank-dependent-buffers",
    "error",
    "the statistics are those of one rank, and the samples of the others have no effect on them",
    "exchange what is written: `dist.all_reduce(count)` before the update",
    find,
)
