"""An asynchronous collective that nothing waits for.

With `async_op=True`, the call returns before the result is there. Without `wait()` on the handle, the tensor may still
have its old value when it is used.

Bad:

```python
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
value = torch.rand(1, device="cuda")
dist.all_reduce(value, async_op=True)  # SS311
print(value)
```

Good:

```python
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
value = torch.rand(1, device="cuda")
work = dist.all_reduce(value, async_op=True)
work.wait()
print(value)
```

Source: the documentation of `torch.distributed` on asynchronous collectives.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.function_source import assigned_names, function_around, statement_around, uses_of
from samestep.lint.rule import Analysis, Rule


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for handles that are dropped."""
    for event in analysis.of("collective"):
        flag = event.keywords.get("async_op")
        if flag is None or flag.constant is not True:
            continue
        statement = statement_around(analysis, event)
        function = function_around(analysis, event.location)
        if isinstance(statement, ast.Assign) and function is not None:
            names = assigned_names(statement)
            is_dropped = len(names) == 1 and not any(True for _ in uses_of(function, names[0]))
            if len(names) == 1 and not is_dropped and _is_overwritten(event, statement, names[0]):
                yield RULE.finding(
                    event.location,
                    f"only the last `{event.name}` of this loop is waited for",
                    evidence=[f"each iteration assigns `{names[0]}`, and no statement of the loop uses it"],
                    repair="collect the handles, `works.append(dist.all_reduce(value, async_op=True))`, and call "
                    "`wait()` on each of them",
                )
        else:
            is_dropped = isinstance(statement, ast.Expr)
        if is_dropped:
            yield RULE.finding(event.location, f"nothing waits for this `{event.name}`")


def _is_overwritten(event: Event, statement: ast.Assign, name: str) -> bool:
    """Whether a loop around the statement assigns the name of a handle again before something uses it."""
    target = statement.targets[0]
    loop = next((each.node for each in reversed(event.loops) if any(n is statement for n in ast.walk(each.node))), None)
    return loop is not None and isinstance(target, ast.Name) and not any(True for _ in uses_of(loop, name))


RULE = Rule(
    "SS311",
    "unawaited-collective",
    "error",
    "the tensor may be used before the result is there",
    "keep the handle, `work = dist.all_reduce(value, async_op=True)`, and call `work.wait()` before the value is used",
    find,
)
