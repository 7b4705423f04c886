"""The result of `dist.reduce` is used on all ranks.

`dist.reduce` gives the sum to one rank. On the others, the tensor has no defined value, often a partial sum. A
decision on it, such as a learning rate or an early stop, is another one on every rank.

Bad:

```python
import torch
import torch.distributed as dist


def train(batches, evaluate):
    dist.init_process_group("nccl")
    for batch in batches:
        dist.barrier()
        loss = torch.tensor(evaluate(batch))
        dist.reduce(loss, dst=0)  # SS406
        if loss.item() < 0.1:
            break
```

Good:

```python
import torch
import torch.distributed as dist


def train(batches, evaluate):
    dist.init_process_group("nccl")
    for batch in batches:
        dist.barrier()
        loss = torch.tensor(evaluate(batch))
        dist.all_reduce(loss)
        if loss.item() < 0.1:
            break
```

Source: rmchurch/disruptcnn#3.
"""

from collections.abc import Iterable, Iterator

from samestep.findings import Finding, Location
from samestep.lint.library.collective_library import REDUCE_TEXT
from samestep.lint.rank_decisions import comes_from_reduce, exchanging_events, learning_rate_decisions, rank_guard
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import Taint


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for decisions of all ranks on the result of a reduction to one of them."""
    reported = set[Location]()
    for location, taints in _decisions(analysis):
        taint = next((each for each in taints if each.text == REDUCE_TEXT), None)
        if taint is None or taint.location in reported:
            continue
        reported.add(taint.location)
        yield RULE.finding(
            taint.location,
            "all ranks use the result of `dist.reduce`, which only its destination has",
            evidence=[f"it decides here on all ranks ({location})"],
            related=[location],
        )


def _decisions(analysis: Analysis) -> Iterator[tuple[Location, Iterable[Taint]]]:
    for location, _, taints in learning_rate_decisions(analysis):
        yield location, taints
    for event in [*analysis.of("break", "return", "continue", "optimizer_step"), *exchanging_events(analysis)]:
        for guard in event.guards:
            is_exit = event.kind != "return" or bool(event.loops)
            if is_exit and comes_from_reduce(guard.taints) and rank_guard(event) is None:
                yield guard.location, guard.taints


RULE = Rule(
    "SS406",
    "reduce-result-everywhere",
    "error",
    "the ranks decide differently: their learning rates or weights drift apart, or they wait for each other",
    "use `dist.all_reduce`, or use the result on the destination only",
    find,
)
