"""The best checkpoint is chosen by the metric of one rank.

If a condition on the validation loss of a rank's own samples decides whether a checkpoint is written, the checkpoint
that is kept is the best one for a part of the data, and the ranks disagree about it. The same is true of weights that
are kept in memory and loaded at the end: every rank continues with others.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def keep_best(model, dataset, best):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False, drop_last=True))
    loss = sum(model(x).mean() for x in loader)
    if loss < best and dist.get_rank() == 0:  # SS405
        torch.save(model.module.state_dict(), "best.pt")
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def keep_best(model, dataset, best):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False, drop_last=True))
    loss = sum(model(x).mean() for x in loader)
    dist.all_reduce(loss)
    if loss < best and dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "best.pt")
```

Source: Lightning-AI/pytorch-lightning#5865.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.lint.events import Event, Guard
from samestep.lint.rank_decisions import evaluation_taint, sharded_evaluation
from samestep.lint.rule import Analysis, Rule, explain
from samestep.lint.values import choice_taints


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for files that are written because of a rank's own evaluation."""
    loops = sharded_evaluation(analysis)
    if not loops or analysis.uses_samestep:
        return
    reported = set[int]()
    for event in analysis.of("write"):
        guard = _guard(event, loops)
        if guard is not None and id(guard.node) not in reported:
            reported.add(id(guard.node))
            yield RULE.finding(
                guard.location,
                "a rank's own metric decides whether this checkpoint is the best",
                evidence=[*explain(guard), f"it is written here ({event.location})"],
                related=[event.location],
            )

    for event in analysis.of("load_state"):
        taint = evaluation_taint(choice_taints(event.call.arguments[0]), loops) if event.call.arguments else None
        if taint is not None:
            yield RULE.finding(
                event.location,
                "each rank loads the weights that were the best on its own samples",
                evidence=[f"{taint.text} ({taint.location})", "a comparison of them chooses these weights"],
                related=[taint.location],
                consequence="the ranks go on with different weights",
            )


def _guard(event: Event, loops: set[Location]) -> Guard | None:
    for guard in reversed(event.guards):
        if guard.kind == "if" and evaluation_taint(guard.taints, loops) is not None:
            return guard
    return None


RULE = Rule(
    "SS405",
    "best-by-own-metric",
    "error",
    "the checkpoint that is kept is the best for a part of the data, and depends on the number of ranks",
    "`dist.all_reduce` the sum and the count of the metric before the comparison",
    find,
)
