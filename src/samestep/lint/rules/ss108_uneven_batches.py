"""Ranks have different numbers of batches.

DDP exchanges gradients in every backward pass. A rank with more batches than the others waits in its extra step for
ranks that never come. This happens if files or groups of different sizes are dealt to the ranks, or if the number of
steps is computed from the rank.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader

dist.init_process_group("gloo")
sites = ["bern", "graz", "lyon"][dist.get_rank() :: dist.get_world_size()]  # SS108
loader = DataLoader(ConcatDataset([torch.load(site) for site in sites]), batch_size=8, shuffle=True)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader

dist.init_process_group("gloo")
sites = ["bern", "graz", "lyon"][dist.get_rank() :: dist.get_world_size()]
loader = DataLoader(ConcatDataset([torch.load(site) for site in sites]), batch_size=8, shuffle=True)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with model.join():
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
```

Source: Lightning-AI/pytorch-lightning#20404, pytorch/pytorch#33148.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.lint.events import Event, Loop
from samestep.lint.library.data_library import UNSEEDED
from samestep.lint.loader_loops import iteration_events, training_loops
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import InstanceValue, LoaderValue, Taint, Value, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for training loops of DDP whose number of batches differs between ranks."""
    if not any(event.wrapper == "ddp" for event in analysis.wrapped):
        return
    parts = {event.location: event for event in analysis.of("shard")}
    for event, loop, loaders in training_loops(analysis):
        if _is_joined(event) or _stops_early(analysis, loop):
            continue
        for loader in loaders[:1]:
            shard = _uneven_part(analysis, loader, parts)
            if shard is not None and loader.sampler is None:
                yield _finding(shard, event)
    for event in analysis.of("loop"):
        if _has_own_length(analysis, event) and not _is_joined(event) and not _stops_early(analysis, event.loop):
            yield RULE.finding(
                event.location,
                "the number of steps of this loop differs between ranks",
                evidence=[f"{taint.text} ({taint.location})" for taint in event.loop.iterable.taints[:2]],
            )


def _finding(shard: Event, loop: Event) -> Finding:
    return RULE.finding(
        shard.location,
        "whole files or groups are dealt to the ranks, which then have different numbers of batches",
        evidence=[
            *(f"{taint.text} ({taint.location})" for taint in shard.rank.taints[:1]),
            f"DDP waits for all ranks in each step of this loop ({loop.location})",
        ],
        related=[loop.location],
    )


def _is_joined(event: Event) -> bool:
    return any(name.lower() in ("join", "join_uneven_inputs") for name in event.contexts)


def _stops_early(analysis: Analysis, loop: Loop) -> bool:
    """Whether the loop has a limit of steps, or synchronizes by hand whether to continue."""
    leaves = (event for event in analysis.of("break", "return") if event.location.function == loop.location.function)
    return any(loop in event.loops for event in leaves) or any(
        loop in event.loops and event.rank_guard is None for event in analysis.of("collective")
    )


def _uneven_part(analysis: Analysis, loader: LoaderValue, parts: dict[Location, Event]) -> Event | None:
    """Where groups of samples are dealt to the ranks: a list of datasets, or files that are read in turn."""
    for dataset in options_of(loader.dataset):
        if not isinstance(dataset, InstanceValue):
            continue
        if dataset.qualname.endswith(("ConcatDataset", "ChainDataset")):
            found = (parts[taint.location] for taint in dataset.taints if taint.location in parts)
            return next(found, None)
        for event in iteration_events(analysis, dataset) or ():
            if event.kind == "yield" and len(event.loops) > 1 and not _ends_evenly(event):
                found = [parts[t.location] for loop in event.loops[:-1] for t in _taints(loop) if t.location in parts]
                if found and _reads_file(event.loops[-1]):
                    return found[0]
    return None


def _taints(loop: Loop) -> tuple[Taint, ...]:
    return loop.iterable.taints if loop.iterable is not None else ()


def _ends_evenly(event: Event) -> bool:
    """Whether the samples are read for ever, or up to a limit."""
    return any(isinstance(loop.node, ast.While) for loop in event.loops)


def _reads_file(loop: Loop) -> bool:
    """Whether a loop reads the lines of a file."""
    return any(each.name in ("open", "enumerate") for each in _sources(loop.iterable))


def _sources(value: Value | None) -> list[Value]:
    return [inner for each in options_of(value) for inner in (each, *getattr(each, "sources", ()))]


def _has_own_length(analysis: Analysis, event: Event) -> bool:
    """Whether a training loop is `range(n)` with a number that each rank has for itself."""
    loop: Loop = event.loop
    node = loop.node.iter if isinstance(loop.node, ast.For) else None
    is_range = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
    if not is_range or not isinstance(node, ast.Call) or len(node.args) != 1 or loop.iterable is None:
        return False
    is_own = loop.iterable.depends_on_rank or any(UNSEEDED in each.text for each in loop.iterable.taints)
    if not is_own or "uncalled" in event.contexts:
        return False
    return any(loop in each.loops for each in analysis.of("backward"))


RULE = Rule(
    "SS108",
    "uneven-batches",
    "error",
    "a rank with more batches waits in its extra step for ranks that never come: the run hangs",
    "put `with model.join():` around the loop, or use a DistributedSampler, which gives all ranks the same number",
    find,
    is_sure=False,
)
