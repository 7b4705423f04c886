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
from samestep.lint.events import Event, Guard, source_text
from samestep.lint.rank_decisions import collective_name, collectives, is_matched, rank_guard
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain
from samestep.lint.values import ContainerValue, TensorValue, Value, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for collectives that only some ranks reach."""
    found = collectives(analysis)
    for event in found:
        guard = rank_guard(event)
        if guard is None:
            yield from _per_own_item(analysis, event)
        elif not is_matched(analysis, event, found) and not _is_made_once(event):
            yield _finding(event, guard)
    for event in analysis.of("fit"):
        guard = rank_guard(event)
        if guard is not None and not _runs_alone(event, guard):
            yield _finding(event, guard)


def _is_made_once(event: Event) -> bool:
    """Whether a function makes a group when it is first called, which may be on all ranks, and keeps it."""
    texts = (guard.text for guard in event.guards)
    return (
        event.kind == "collective"
        and event.name == "new_group"
        and any("hasattr(" in each or each.endswith(" is None") for each in texts)
    )


def _per_own_item(analysis: Analysis, event: Event) -> Iterator[Finding]:
    """A collective in a loop over the rank's own part, such as `names[rank::world]`: the parts may differ by one."""
    guard = event.guards[-1] if event.guards and event.guards[-1].kind == "loop" else None
    loop = next((each for each in event.loops if guard is not None and each.node is guard.node), None)
    if guard is None or loop is None or loop.loader is not None or isinstance(loop.iterable, TensorValue):
        return
    parts = [part for part in analysis.of("shard") if any(part.location == each.location for each in guard.taints)]
    if not parts or parts[0].how != "stride" or _has_even_length(parts[0].source):
        return
    location = call_in_guard(event, guard)
    yield RULE.finding(
        location,
        f"`{collective_name(event)}` is called once per item of the rank's own part, and the parts may differ by one",
        evidence=[f"`{source_text(parts[0].node)}` is the part of each rank ({parts[0].location})"],
        related=[each for each in (loop.location, event.location) if each != location],
        repair="call the collective after the loop, or give all ranks the same number of items",
    )


def _has_even_length(source: Value | None) -> bool:
    lengths = [each.length if isinstance(each, ContainerValue) else each.constant for each in options_of(source)]
    return any(isinstance(length, int) and length % 2 == 0 for length in lengths)


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
