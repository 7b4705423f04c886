"""A collective under a condition on the rank.

All ranks of a process group must call the same collectives in the same order. A rank that calls one alone waits for the
others until the timeout, or exchanges data that does not belong together. Some collectives do not look like one: the
state dict of a sharded model, `compute()` of torchmetrics, `self.log(..., sync_dist=True)` of Lightning, `new_group`.

Bad:

```python
import torch.distributed as dist

dist.init_process_group("nccl")
if dist.get_rank() == 0:
    dist.barrier()  # SS301
```

Good:

```python
import torch.distributed as dist

dist.init_process_group("nccl")
dist.barrier()
if dist.get_rank() == 0:
    print("all ranks are here")
```

Source: huggingface/accelerate#3861, pytorch/pytorch#73383, Lightning-AI/pytorch-lightning#19045.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event, Guard
from samestep.lint.rank_decisions import collective_name, collectives, is_matched, rank_guard
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for collectives that only some ranks reach."""
    found = collectives(analysis)
    for event in found:
        guard = rank_guard(event)
        if guard is None or is_matched(analysis, event, found):
            continue
        yield _finding(event, guard)
    for event in analysis.of("fit"):
        guard = rank_guard(event)
        if guard is not None and not _runs_alone(event, guard):
            yield _finding(event, guard)


def _finding(event: Event, guard: Guard) -> Finding:
    location = call_in_guard(event, guard)
    where = f" (in {event.location.function}, line {event.location.line})" if location != event.location else ""
    name = "the Trainer" if event.kind == "fit" else f"`{collective_name(event)}`"
    return RULE.finding(
        location,
        f"{name}{where} is called on some ranks only",
        evidence=explain(guard),
        related=[event.location] if location != event.location else [],
    )


def _runs_alone(event: Event, guard: Guard) -> bool:
    """Whether a Trainer is for one process, or is created under the same condition."""
    options = event.trainer.options
    devices = options.get("devices")
    created = event.trainer.location
    is_inside = created is not None and created.file == guard.location.file and created.line > guard.location.line
    return is_inside or (devices is not None and devices.constant == 1)


RULE = Rule(
    "SS301",
    "collective-on-some-ranks",
    "error",
    "the rank that calls it waits for the others until the timeout",
    "call the collective on every rank; do only output under a condition on the rank",
    find,
)
