"""All buffers of a gather are the same tensor.

`[torch.zeros_like(x)] * world_size` repeats one tensor. `dist.all_gather` writes the parts of all ranks into it, one
over the other, so that the list has the same part several times.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
value = torch.rand(1)
parts = [torch.zeros_like(value)] * dist.get_world_size()
dist.all_gather(parts, value)  # SS312
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
value = torch.rand(1)
parts = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
dist.all_gather(parts, value)
```

Source: the documentation of `torch.distributed.all_gather`, whose output list needs a tensor per rank.
"""

import ast
from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding
from samestep.lint.function_source import function_around, last_assignment, passed
from samestep.lint.rule import Analysis, Rule

_LISTS: Final = {
    "all_gather": (0, "tensor_list"),
    "gather": (1, "gather_list"),
    "all_to_all": (0, "output_tensor_list"),
}


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for lists that repeat one tensor."""
    for event in analysis.of("collective"):
        if event.name not in _LISTS or event.service is not None:
            continue
        position, name = _LISTS[event.name]
        source = passed(event, position, name)
        function = function_around(analysis, event.location)
        if isinstance(source, ast.Name) and function is not None:
            source = last_assignment(function, source.id, event.location.line)
        if source is not None and _repeats_tensor(source):
            yield RULE.finding(
                event.location,
                f"all buffers of `{event.name}` are the same tensor",
                evidence=[f"`{ast.unparse(source)}` repeats one tensor (line {source.lineno})"],
            )


def _repeats_tensor(source: ast.expr) -> bool:
    if not isinstance(source, ast.BinOp) or not isinstance(source.op, ast.Mult):
        return False
    lists = [each for each in (source.left, source.right) if isinstance(each, ast.List)]
    return any(isinstance(item, ast.Call | ast.Name) for each in lists for item in each.elts)


RULE = Rule(
    "SS312",
    "aliased-gather-buffers",
    "error",
    "the parts of the ranks overwrite each other",
    "make a tensor per rank: `[torch.zeros_like(value) for _ in range(world_size)]`",
    find,
)
