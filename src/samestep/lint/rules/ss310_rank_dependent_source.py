"""A broadcast or scatter whose source is another rank on every rank.

All ranks must name the same source. `src=dist.get_rank()` makes every rank a sender: nothing is exchanged, or the
ranks wait for each other.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
value = torch.rand(1)
dist.broadcast(value, src=dist.get_rank())  # SS310
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
value = torch.rand(1)
dist.broadcast(value, src=0)
```

Source: the documentation of `torch.distributed.broadcast`.
"""

from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding
from samestep.lint.rank_decisions import collectives
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ServiceValue, Value

_POSITIONS: Final = {
    "broadcast": (1, "src"), "broadcast_object_list": (1, "src"), "scatter": (2, "src"), "reduce": (1, "dst"),
    "scatter_object_list": (2, "src"), "gather": (2, "dst"), "gather_object": (2, "dst"),
}  # fmt: skip


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for a source or destination that derives from the rank."""
    for event in collectives(analysis):
        if event.kind != "collective" or event.name not in _POSITIONS:
            continue
        position, name = _POSITIONS[event.name]
        if isinstance(event.service, ServiceValue):  # fabric.broadcast(obj, src=0)
            if event.service.kind != "fabric":
                continue
            position = 1
        passed: Value | None = event.keywords.get(name)
        if passed is None and len(event.arguments) > position:
            passed = event.arguments[position]
        if passed is not None and passed.depends_on_rank:
            yield RULE.finding(
                event.location,
                f"`{name}` of `{event.name}` is another rank on every rank",
                evidence=[f"{taint.text} ({taint.location})" for taint in passed.taints],
            )


RULE = Rule(
    "SS310",
    "rank-dependent-source",
    "error",
    "every rank is the source: the ranks wait for each other, or keep their own values",
    "name the same rank everywhere, such as `src=0`",
    find,
)
