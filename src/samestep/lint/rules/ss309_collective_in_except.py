"""A collective in an exception handler.

Only the rank on which the exception happens runs the handler. A collective in it waits for ranks that never come, and
hides the error until the timeout.

Bad:

```python
import torch.distributed as dist


def load(read):
    dist.init_process_group("nccl")
    try:
        return read()
    except RuntimeError:
        dist.barrier()  # SS309
        return None
```

Good:

```python
import torch.distributed as dist


def load(read):
    dist.init_process_group("nccl")
    try:
        data = read()
    except RuntimeError:
        data = None
    dist.barrier()
    return data
```

Source: Lightning-AI/pytorch-lightning#5319, pytorch/pytorch#88000.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event, Guard
from samestep.lint.rank_decisions import catches_failures, collective_name, collectives
from samestep.lint.rule import Analysis, Rule, call_in_guard


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for collectives that only a rank with an exception calls."""
    found = collectives(analysis)
    for event in found:
        guard = next((each for each in reversed(event.guards) if each.kind == "except"), None)
        if guard is None or not isinstance(guard.node, ast.ExceptHandler) or not catches_failures(guard.node):
            continue
        if _is_in_body_too(found, event, guard.node) or _is_about_error(event, guard.node):
            continue
        location = call_in_guard(event, guard)
        yield RULE.finding(
            location,
            f"`{collective_name(event)}` is called only on a rank with an exception",
            evidence=[_describe(guard)],
            related=[guard.location],
        )


def _describe(guard: Guard) -> str:
    return f"this runs only on a rank on which the exception happens ({guard.location})"


def _is_about_error(event: Event, handler: ast.ExceptHandler) -> bool:
    """Whether a condition on the exception itself is around it: `if "..." in str(error)` is an error of all ranks."""
    conditions = [guard.condition for guard in event.guards if guard.kind == "if" and guard.condition is not None]
    names = (each for condition in conditions for each in ast.walk(condition) if isinstance(each, ast.Name))
    return handler.name is not None and any(each.id == handler.name for each in names)


def _is_in_body_too(events: list[Event], event: Event, handler: ast.ExceptHandler) -> bool:
    """Whether ranks without an exception call the same collective inside of `try`."""
    return any(
        isinstance(guard.node, ast.Try) and handler in guard.node.handlers
        for other in events
        if other is not event and other.data.get("name") == event.data.get("name")
        for guard in other.guards
    )


RULE = Rule(
    "SS309",
    "collective-in-except",
    "error",
    "the rank waits for the others until the timeout, and its error is not shown before",
    "call the collective on every rank behind the handler, or let the exception end the rank",
    find,
)
