"""A DDP or FSDP model that not all ranks call.

DDP sends the buffers of rank 0 to all ranks in the forward pass, and exchanges gradients in the backward pass. FSDP
gathers weights in both. A rank that evaluates with the wrapper alone, or skips the backward pass of a batch alone
because its own loss is not finite, leaves the others waiting.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18


def evaluate(batches):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(resnet18())
    if dist.get_rank() == 0:
        with torch.no_grad():
            print([model(x) for x in batches])  # SS305
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18


def evaluate(batches):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(resnet18())
    if dist.get_rank() == 0:
        with torch.no_grad():
            print([model.module(x) for x in batches])
```

Source: pytorch/pytorch#54059, Lightning-AI/pytorch-lightning#5243.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event, Guard
from samestep.lint.module_trees import key_of
from samestep.lint.rank_decisions import (
    comes_from_reduce,
    data_guard,
    has_buffers,
    is_matched,
    leaves_loop,
    may_have_buffers,
    rank_guard,
)
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain, is_wrapped
from samestep.lint.values import InstanceValue, ModelValue, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for wrapped models under conditions in which ranks differ."""
    sharded = _sharded_in_place(analysis)
    calls = [
        event
        for event in analysis.of("model_call")
        if not event.is_nested
        and (is_wrapped(event.model) or sharded.get(key_of(event.model), event.order) < event.order)
    ]
    for event in calls:
        guard = rank_guard(event)
        if guard is None or "join" in event.contexts or is_matched(analysis, event, calls):
            continue
        certain = _communicates(event)
        if certain is not False:
            yield _call_finding(event, guard, certain is None)
    yield from _skipped_steps(analysis)


def _sharded_in_place(analysis: Analysis) -> dict[int, int]:
    """The modules that `fully_shard` changes, and when it does."""
    wraps = [wrap for wrap in analysis.wrapped if wrap.wrapper == "fsdp"]
    return {
        key_of(each): wrap.order
        for wrap in wraps
        for each in options_of(wrap.inner)
        if isinstance(each, InstanceValue) and not isinstance(wrap.model, ModelValue)
    }


def _communicates(event: Event) -> bool | None:
    """Whether the forward pass of a wrapper communicates; None if that depends on its buffers, which are unknown."""
    found = [each for each in options_of(event.model) if isinstance(each, ModelValue)]
    if event.is_grad or not found or any(each.wrapper == "fsdp" for each in found):
        return True
    sends = [each.options.get("broadcast_buffers") for each in found]
    if any(each is not None and each.constant is False for each in sends):
        return False
    known = [has_buffers(each) for each in found]
    if True in known:
        return True
    return None if any(may_have_buffers(each) for each in found) else False


def _call_finding(event: Event, guard: Guard, is_unknown: bool) -> Finding:
    location = call_in_guard(event, guard)
    where = f" (in {event.location.function}, line {event.location.line})" if location != event.location else ""
    condition = " if it has buffers, such as those of BatchNorm" if is_unknown else ""
    return RULE.finding(
        location,
        f"a wrapped model is called{where} on some ranks only; the call communicates{condition}",
        evidence=explain(guard),
        related=[event.location] if location != event.location else [],
        severity="warning" if is_unknown else None,
    )


def _skipped_steps(analysis: Analysis) -> Iterator[Finding]:
    """Backward passes that a rank skips because of its samples."""
    steps = analysis.of("backward")
    if (not analysis.wrapped and not analysis.of("prepare")) or _has_own_group(analysis):
        return
    reported = set[int]()
    for event in steps:
        guard = data_guard(event) or rank_guard(event)
        if guard is None or id(guard.node) in reported or "join" in event.contexts:
            continue
        if comes_from_reduce(guard.taints) or is_matched(analysis, event, steps) or leaves_loop(analysis, guard):
            continue
        reported.add(id(guard.node))
        yield RULE.finding(
            guard.location,
            "a rank skips the backward pass alone, in which the others exchange gradients",
            evidence=[*explain(guard), f"the backward pass needs all ranks ({event.location})"],
            related=[event.location],
            repair="decide together: `dist.all_reduce(flag, op=dist.ReduceOp.MAX)` before the condition",
        )


def _has_own_group(analysis: Analysis) -> bool:
    """Whether DDP, or a strategy of Lightning, exchanges gradients in a group of some ranks."""
    wraps = [each.model.options for each in analysis.wrapped if isinstance(each.model, ModelValue)]
    calls = [each.keywords for each in analysis.of("call") if each.name.endswith("Strategy")]
    groups = [each.get("process_group") for each in (*wraps, *calls)]
    return any(each is not None and each.constant is not None for each in groups)


RULE = Rule(
    "SS305",
    "wrapper-on-some-ranks",
    "error",
    "DDP and FSDP communicate in this call, so the ranks wait for each other until the timeout",
    "evaluate with `model.module` on one rank, or with the wrapper on all ranks",
    find,
)
