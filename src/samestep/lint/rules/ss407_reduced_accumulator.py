"""A running sum that is reduced in place and accumulated further.

After `dist.all_reduce(total)`, `total` has the sums of all ranks. If the loop adds to it and reduces it again, the
old sums are counted once more by every rank.

Bad:

```python
import torch
import torch.distributed as dist


def train(losses):
    dist.init_process_group("nccl")
    total = torch.zeros(1)
    for step, loss in enumerate(losses):
        total += loss
        if step % 10 == 0:
            dist.all_reduce(total)  # SS407
            print(total)
```

Good:

```python
import torch
import torch.distributed as dist


def train(losses):
    dist.init_process_group("nccl")
    total = torch.zeros(1)
    for step, loss in enumerate(losses):
        total += loss
        if step % 10 == 0:
            everyone = total.clone()
            dist.all_reduce(everyone)
            print(everyone)
```

Source: the documentation of `torch.distributed.all_reduce`, which works in place.
"""

import ast
from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding
from samestep.lint.function_source import assigned_names, passed
from samestep.lint.rank_decisions import own_loops
from samestep.lint.rule import Analysis, Rule

_RESETS: Final = frozenset({"zero_", "fill_", "copy_", "clear"})


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for in-place reductions inside of the loop that accumulates."""
    for event in analysis.of("collective"):
        source = passed(event, 0, "tensor")
        if event.name != "all_reduce" or event.service is not None or not isinstance(source, ast.Name | ast.Attribute):
            continue
        loop = next(own_loops(event), None)
        name = ast.unparse(source)
        if loop is None or not _is_sum(event.keywords.get("op")):
            continue
        added = _additions(loop.node, name)
        if added and not _is_reset(loop.node, name):
            yield RULE.finding(
                event.location,
                f"`{name}` is reduced in place, and accumulated further in the next iteration",
                evidence=[f"it is accumulated here (line {added[0].lineno})"],
            )


def _is_sum(op: object) -> bool:
    name = getattr(op, "qualname", "")
    return op is None or str(name).rpartition(".")[2] in ("SUM", "AVG")


def _additions(loop: ast.AST, name: str) -> list[ast.AugAssign]:
    return [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and ast.unparse(node.target) == name
    ]


def _is_reset(loop: ast.AST, name: str) -> bool:
    """Whether the loop also assigns the name, or sets the tensor to zero."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in assigned_names(node) or any(ast.unparse(each) == name for each in targets):
                return True
        if isinstance(node, ast.Attribute) and node.attr in _RESETS and ast.unparse(node.value) == name:
            return True
    return False


RULE = Rule(
    "SS407",
    "reduced-accumulator",
    "error",
    "what was already reduced is counted again, once per rank",
    "reduce a copy: `everyone = total.clone()`, `dist.all_reduce(everyone)`; or set `total` to zero afterwards",
    find,
)
