"""A rank leaves a loop before the others.

Early stopping on the validation loss of this rank's own samples, or on its own clock, ends the loop on one rank. The
others wait in the next backward pass or collective for a rank that never comes.

Bad:

```python
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler


def train(dataset):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(Linear(4, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        if loss.item() < 0.01:  # SS304
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
```

Good:

```python
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler


def train(dataset):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(Linear(4, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        largest = loss.detach().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if largest.item() < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
```

Source: Lightning-AI/pytorch-lightning#5865, Project-MONAI/tutorials#1461.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event, Guard, Loop
from samestep.lint.rank_decisions import (
    catches_failures,
    comes_from_reduce,
    exchanging_loops,
    is_about_sizes,
    is_matched,
    own_loops,
)
from samestep.lint.rule import Analysis, Rule, explain


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for ways out of loops that ranks take at different times."""
    loops = exchanging_loops(analysis)
    reported = set[int]()
    for event in _exits(analysis):
        loop = _left_loop(event, loops)
        guard = _guard(event, loop) if loop is not None else None
        if loop is None or guard is None or id(guard.node) in reported or "join" in event.contexts:
            continue
        if is_matched(analysis, event, analysis.of(event.kind)):
            continue
        reported.add(id(guard.node))
        needed = loops[id(loop)]
        why = (
            explain(guard)
            if guard.differs
            else [f"each process reads its own clock, or looks for a file, at another time ({guard.clock})"]
        )
        yield RULE.finding(
            guard.location,
            "a rank leaves this loop alone, and the others wait for it",
            evidence=[*why, f"the loop needs all ranks ({needed.location})"],
            related=[event.location, needed.location],
        )
    yield from _stopped_trainers(analysis)
    yield from _skipped_by_exceptions(analysis, loops)


def _skipped_by_exceptions(analysis: Analysis, loops: dict[int, Event]) -> Iterator[Finding]:
    """`except ValueError: continue` before the backward pass: the exception comes on the rank with this sample."""
    for event in analysis.of("continue", "break"):
        handler = event.guards[-1] if event.guards else None
        if handler is None or handler.kind != "except" or "join" in event.contexts:
            continue
        loop, node = next(own_loops(event), None), _handler(analysis, event)
        needed = loops.get(id(loop)) if loop is not None else None
        if loop is None or needed is None or node is None or not catches_failures(node) or loop.loader is None:
            continue
        later = [each for each in analysis.inside(loop, "backward") if each.order > event.order]
        if later and event.rank_guard is None:
            yield RULE.finding(
                handler.location,
                "an exception on one rank makes it skip a step that the others take",
                evidence=[
                    f"the rank continues here ({event.location})",
                    f"the step needs all ranks ({later[0].location})",
                ],
                related=[event.location, later[0].location],
                repair="let the exception end the run, or decide together with `dist.all_reduce` of a flag",
                severity="warning",
            )


def _handler(analysis: Analysis, event: Event) -> ast.ExceptHandler | None:
    file = analysis.file_of(event.location)
    node = file.parents.get(event.node) if file is not None else None
    while file is not None and node is not None and not isinstance(node, ast.ExceptHandler):
        node = file.parents.get(node)
    return node if isinstance(node, ast.ExceptHandler) else None


def _stopped_trainers(analysis: Analysis) -> Iterator[Finding]:
    """`trainer.should_stop = True` of Lightning on a rank whose own samples say so."""
    for event in analysis.of("assign_attribute"):
        guard = event.differing_guard
        if event.name == "should_stop" and guard is not None and guard.kind == "if":
            yield RULE.finding(
                event.location,
                "a rank stops its Trainer alone, and the others wait for it",
                evidence=explain(guard),
                related=[guard.location],
                repair='decide together: `trainer.strategy.reduce(loss, reduce_op="mean")` before the condition',
            )


def _exits(analysis: Analysis) -> list[Event]:
    """`break`, `return`, and exits with the status 0; the launcher ends all ranks if one fails."""
    exits = [
        event
        for event in analysis.of("call")
        if event.name in ("sys.exit", "exit", "quit") and _is_success(event.arguments)
    ]
    return [*analysis.of("break", "return"), *exits]


def _is_success(arguments: list[object]) -> bool:
    return not arguments or getattr(arguments[0], "constant", 1) in (0, None)


def _left_loop(event: Event, loops: dict[int, Event]) -> Loop | None:
    around = list(own_loops(event))
    if event.kind == "break":
        around = around[:1]
    return next((loop for loop in around if id(loop) in loops), None)


def _guard(event: Event, loop: Loop) -> Guard | None:
    """The innermost condition inside of the loop in which the ranks differ."""
    for guard in reversed(event.guards):
        is_inside = guard.location.file == loop.location.file and guard.location.line > loop.location.line
        if not is_inside or guard.kind not in ("if", "case") or guard.location.function != loop.location.function:
            continue
        if comes_from_reduce(guard.taints) or is_about_sizes(guard):
            continue
        if guard.differs or (guard.clock is not None and not guard.is_negated):
            return guard
    return None


RULE = Rule(
    "SS304",
    "rank-left-early",
    "error",
    "the other ranks wait for it until the timeout",
    "decide together: `dist.all_reduce` the value before the decision, or `dist.broadcast` the decision of rank 0",
    find,
)
