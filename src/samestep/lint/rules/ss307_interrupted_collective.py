"""An exception that is caught on one rank jumps over a collective.

If something inside of `try` fails on one rank, for example because of its samples or its memory, the handler
continues behind the collective. The other ranks wait in it.

Bad:

```python
import torch
import torch.distributed as dist


def evaluate(compute, batches):
    dist.init_process_group("nccl")
    for batch in batches:
        try:
            score = torch.tensor(compute(batch))
            dist.all_reduce(score)  # SS307
        except ValueError:
            print("no score for this batch")
```

Good:

```python
import torch
import torch.distributed as dist


def evaluate(compute, batches):
    dist.init_process_group("nccl")
    for batch in batches:
        try:
            score = torch.tensor(compute(batch))
        except ValueError:
            score = torch.tensor(0.0)
        dist.all_reduce(score)
```

Source: pytorch/pytorch#88000, Lightning-AI/pytorch-lightning#5319.
"""

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from samestep.findings import Finding
from samestep.lint.events import Event, Guard
from samestep.lint.rank_decisions import collective_name, exchanging_events, swallows
from samestep.lint.rule import Analysis, Rule, call_in_guard

_SAFE: Final = frozenset({"print", "info", "debug", "warning", "zero_grad", "train", "eval", "len", "range", "barrier"})


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for collectives inside of `try`, behind something that may fail on one rank."""
    reported = set[int]()
    events = sorted(exchanging_events(analysis), key=lambda each: each.order)
    for event in events:
        if event.kind == "model_call":
            continue
        for guard in event.guards:
            if guard.kind != "try" or id(guard.node) in reported or not isinstance(guard.node, ast.Try):
                continue
            handler = next((each for each in guard.node.handlers if swallows(each)), None)
            if (
                handler is None
                or not _may_fail_before(guard.node, event, guard)
                or not _continues(analysis, events, event, guard)
            ):
                continue
            reported.add(id(guard.node))
            name = "backward pass" if event.kind == "backward" else f"`{collective_name(event)}`"
            yield RULE.finding(
                call_in_guard(event, guard),
                f"an exception on one rank jumps over this {name}",
                evidence=[
                    f"what fails in this `try` skips it ({guard.location})",
                    f"and the rank continues after line {handler.lineno}, which catches the exception",
                ],
                related=[guard.location, event.location],
            )


def _may_fail_before(node: ast.Try, event: Event, guard: Guard) -> bool:
    """Whether the body calls something before the event that may fail."""
    line = call_in_guard(event, guard).line
    for statement in node.body:
        for each in ast.walk(statement):
            if isinstance(each, ast.Call) and each.lineno <= line and each is not event.node and not _is_safe(each):
                return each.lineno < line
    return False


def _is_safe(call: ast.Call) -> bool:
    function = call.func
    return (function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")) in _SAFE


def _continues(analysis: Analysis, events: Sequence[Event], event: Event, guard: Guard) -> bool:
    """Whether ranks still need each other after the handler: in the next iteration, or later."""
    around = [each for each in analysis.of("loop") if each.loop in event.loops]
    if any(guard not in each.guards for each in around):
        return True
    return any(other.order > event.order and guard not in other.guards for other in events)


RULE = Rule(
    "SS307",
    "interrupted-collective",
    "warning",
    "the other ranks wait in it until the timeout",
    "catch the exception before the collective, and let the rank take part with a neutral value",
    find,
    is_sure=False,
)
