"""A collective under a condition on this rank's own data.

The accuracy of a rank's own validation samples, its own loss, or the content of its own batch is not the same on all
ranks. If a condition on it decides whether a collective is called, some ranks call it and others do not.

Bad:

```python
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def check(dataset):
    dist.init_process_group("nccl")
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False))
    smallest = min(x.min().item() for x in loader)
    if smallest < 0:
        dist.barrier()  # SS308
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def check(dataset):
    dist.init_process_group("nccl")
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False))
    smallest = torch.tensor(min(x.min().item() for x in loader))
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    if smallest.item() < 0:
        dist.barrier()
```

Source: Lightning-AI/pytorch-lightning#5865, Lightning-AI/pytorch-lightning#19045.
"""

import re
from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.rank_decisions import (
    collective_name,
    collectives,
    comes_from_reduce,
    data_guard,
    is_matched,
    leaves_loop,
    syncs_log,
)
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain
from samestep.lint.values import ContainerValue, options_of

_CLOCK: Final = re.compile(r"time|now\(|today|clock|perf_counter|monotonic")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for collectives that depend on values of one rank."""
    yield from _of_own_names(analysis)
    found = collectives(analysis)
    yield from _by_clock(analysis, found)
    for event in found:
        guard = data_guard(event)
        if guard is None or comes_from_reduce(guard.taints) or is_matched(analysis, event, found):
            continue
        if leaves_loop(analysis, guard):
            continue
        location = call_in_guard(event, guard)
        where = f" (in {event.location.function}, line {event.location.line})" if location != event.location else ""
        yield RULE.finding(
            location,
            f"`{collective_name(event)}`{where} is called only if this rank's own data says so",
            evidence=explain(guard),
            related=[guard.location, event.location],
        )


def _by_clock(analysis: Analysis, found: list[Event]) -> Iterator[Finding]:
    """Collectives that a rank calls when its own clock says that it is time."""
    reported = set[int]()
    for event in found:
        guard = next((each for each in reversed(event.guards) if each.clock is not None and each.kind == "if"), None)
        if guard is None or guard.clock is None or guard.is_negated or id(guard.node) in reported:
            continue
        file = analysis.file_of(guard.clock)
        is_clock = file is not None and _CLOCK.search(file.lines[guard.clock.line - 1]) is not None
        if not is_clock or not event.loops or event.differing_guard is not None:
            continue
        reported.add(id(guard.node))
        location = call_in_guard(event, guard)
        yield RULE.finding(
            location,
            f"`{collective_name(event)}` is called only if this rank's own clock says so",
            evidence=[f"each process reads its own clock ({guard.clock})", f"the condition ({guard.location})"],
            related=[guard.location, event.location],
        )


def _of_own_names(analysis: Analysis) -> Iterator[Finding]:
    """`self.log_dict(values, sync_dist=True)` with names that depend on the rank's own samples."""
    for event in analysis.of("log"):
        containers = [each for each in options_of(event.value) if isinstance(each, ContainerValue) and each.size_taints]
        if containers and syncs_log(event):
            taints = containers[0].size_taints
            yield RULE.finding(
                event.location,
                "which values are reduced depends on this rank's own data",
                evidence=[f"{taint.text} ({taint.location})" for taint in taints[:2]],
                repair="log the same names on all ranks",
            )


RULE = Rule(
    "SS308",
    "collective-by-own-data",
    "error",
    "ranks that decide differently wait for each other until the timeout",
    "reduce the value over all ranks before the condition, or broadcast the decision of rank 0",
    find,
)
