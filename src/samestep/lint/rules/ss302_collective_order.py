"""Collectives in an order that differs between ranks.

A set of strings has another order in every process, because Python salts the hashes, and a folder lists its files in
any order. A loop over it that calls a collective exchanges values of different names, without an error if their shapes
are the same.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
values = {"loss": torch.zeros(1), "accuracy": torch.zeros(1)}
for name in set(values):  # SS302
    dist.all_reduce(values[name])
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
values = {"loss": torch.zeros(1), "accuracy": torch.zeros(1)}
for name in sorted(values):
    dist.all_reduce(values[name])
```

Source: meta-pytorch/torchrec#4648.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Loop
from samestep.lint.rank_decisions import collective_name, collectives
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ContainerValue, sources_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for collectives in loops over sets and folders."""
    reported = set[int]()
    for event in collectives(analysis):
        for loop in event.loops:
            container = _unordered(loop)
            if container is None or id(loop.node) in reported:
                continue
            reported.add(id(loop.node))
            origin = container.order_from or container.location
            yield RULE.finding(
                loop.location,
                f"`{collective_name(event)}` is called in an order that differs between ranks",
                evidence=[
                    f"the order comes from here ({origin})" if origin is not None else "the order is that of a set",
                    f"`{collective_name(event)}` is called for each item ({event.location})",
                ],
                related=[event.location],
            )


def _unordered(loop: Loop) -> ContainerValue | None:
    for source in sources_of(loop.iterable):
        if isinstance(source, ContainerValue) and source.is_unordered:
            numbers = [isinstance(item.constant, int) for item in source.values()]
            if not numbers or not all(numbers):  # hashes of numbers are the same everywhere
                return source
    return None


RULE = Rule(
    "SS302",
    "collective-order",
    "error",
    "the ranks exchange values that do not belong together, or hang if the shapes differ",
    "sort what the loop reads: `for name in sorted(names)`",
    find,
)
