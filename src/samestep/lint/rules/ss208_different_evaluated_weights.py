"""The ranks use different weights that should be the same.

Weights outside of DDP are only equal if every rank computes them in the same way. An average of the weights (EMA) that
rank 0 updates alone, a frozen module that is built after a seed that depends on the rank, and running statistics of
BatchNorm with `broadcast_buffers=False` differ between the ranks. If all ranks evaluate with them, the metric is a
mixture of several models, and the saved one is not the one that was measured.

Bad:

```python
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
net = nn.Linear(8, 1)
model = DDP(net)
average = copy.deepcopy(net).requires_grad_(False)


@torch.no_grad()
def update():
    for a, p in zip(average.parameters(), net.parameters()):
        a.lerp_(p, 0.01)


@torch.no_grad()
def evaluate(x):
    return average(x).mean()


for epoch in range(3):
    if dist.get_rank() == 0:
        update()  # SS208
    evaluate(torch.randn(4, 8))
```

Good:

```python
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
net = nn.Linear(8, 1)
model = DDP(net)
average = copy.deepcopy(net).requires_grad_(False)


@torch.no_grad()
def update():
    for a, p in zip(average.parameters(), net.parameters()):
        a.lerp_(p, 0.01)


@torch.no_grad()
def evaluate(x):
    return average(x).mean()


for epoch in range(3):
    update()
    evaluate(torch.randn(4, 8))
```

Source: lucidrains/ema-pytorch#9, pytorch/pytorch#75870, jpata/particleflow#233.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.module_trees import (
    batch_norm_in,
    has_parameters,
    has_unknown_exchange,
    is_exchanged,
    is_module,
    key_of,
    modules_of,
    optimized,
    overlap,
    raw_module,
    seed_before,
)
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain
from samestep.lint.values import InstanceValue, ModelValue, TensorValue, Value, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for weights that only some ranks update, and for frozen weights and buffers that nothing equalizes."""
    yield from _updated_on_some_ranks(analysis)
    yield from _frozen_by_rank(analysis)
    yield from _own_statistics(analysis)


# -- averages of weights


def _updated_on_some_ranks(analysis: Analysis) -> Iterator[Finding]:
    for event in analysis.of("in_place", "call", "load_state"):
        guard, modules = event.rank_guard, _updated(event)
        if guard is None or not modules or "uncalled" in event.contexts:
            continue
        for module in modules:
            use = _use_everywhere(analysis, module, event.order)
            if use is None or _is_wrapped(analysis, module) or _is_sent(analysis, module, event.order):
                continue
            yield RULE.finding(
                call_in_guard(event, guard),
                "only some ranks update these weights, and all ranks use them",
                evidence=[*explain(guard), f"every rank calls the module ({use.location})"],
                related=[event.location, use.location],
                repair="update the weights on every rank, or use them on rank 0 only",
            )
            return


def _updated(event: Event) -> list[Value]:
    """Modules whose weights an event changes."""
    if event.kind == "load_state":
        return [each for each in options_of(event.owner) if isinstance(each, InstanceValue) and is_module(each)]
    if event.kind == "call":
        is_average = event.name == "update_parameters"
        return [each for each in options_of(event.owner) if is_average and isinstance(each, ModelValue)]
    owners = [each for each in options_of(event.owner) if isinstance(each, TensorValue)]
    weights = [each for each in owners if each.content in ("parameter", "state", "buffer")]
    return [model for each in weights for model in modules_of(each)]


def _use_everywhere(analysis: Analysis, module: Value, order: int) -> Event | None:
    """A call of the module on all ranks, without gradients: before or after, as loops go round."""
    for call in analysis.of("model_call"):
        is_own = any(key_of(each) == key_of(module) for each in options_of(call.model))
        if is_own and not call.is_grad and call.rank_guard is None and "uncalled" not in call.contexts:
            return call
    return None


def _is_wrapped(analysis: Analysis, module: Value) -> bool:
    trees = [tree for wrap in analysis.wrapped for tree in options_of(wrap.inner)]
    trees += [each for event in analysis.of("prepare") for value in event.arguments for each in options_of(value)]
    return any(is_module(tree) and overlap(tree, module) for tree in trees)


def _is_sent(analysis: Analysis, module: Value, order: int) -> bool:
    is_sent = is_exchanged(analysis, module, "parameter", "state", "buffer", after=order)
    return is_sent or has_unknown_exchange(analysis, after=order)


# -- frozen modules


def _frozen_by_rank(analysis: Analysis) -> Iterator[Finding]:
    trained = [
        raw_module(model) for event in analysis.of("optimizer") for model, _ in optimized(event.optimizer.parameters)
    ]
    if not trained:
        return
    for event in analysis.of("create"):
        module, seed = event.instance, seed_before(analysis, event)
        if seed is None or not _has_weights(module) or any(overlap(each, module) for each in trained):
            continue
        calls = [each for each in analysis.of("model_call") if _calls(each, module)]
        is_loaded = any(
            overlap(owner, module) for each in analysis.of("load_state") for owner in options_of(each.owner)
            if is_module(owner)
        )  # fmt: skip
        if not calls or is_loaded or _is_wrapped(analysis, module) or _is_sent(analysis, module, event.order):
            continue
        yield RULE.finding(
            event.location,
            "each rank builds this frozen module with another seed, so its weights differ between the ranks",
            evidence=[f"the seed depends on the rank ({seed.location})", f"all ranks use it ({calls[0].location})"],
            related=[seed.location, calls[0].location],
            repair="build it with the same seed on all ranks, or send it: `dist.broadcast(p.data, src=0)`",
        )


def _has_weights(module: Value) -> bool:
    return isinstance(module, InstanceValue) and module.is_module and has_parameters(module)


def _calls(call: Event, module: Value) -> bool:
    is_here = call.rank_guard is None and not call.is_nested and "uncalled" not in call.contexts
    return is_here and any(key_of(each) == key_of(module) for each in options_of(call.model))


# -- running statistics


def _own_statistics(analysis: Analysis) -> Iterator[Finding]:
    if any(event.name.endswith("convert_sync_batchnorm") for event in analysis.of("call")):
        return
    for wrap in analysis.wrapped:
        flag = wrap.model.options.get("broadcast_buffers") if isinstance(wrap.model, ModelValue) else None
        layer = batch_norm_in(wrap.inner)
        if flag is None or flag.constant is not False or layer is None:
            continue
        raw = raw_module(wrap.model)
        use = _use_everywhere(analysis, raw, wrap.order)
        if (
            use is not None
            and not is_exchanged(analysis, raw, "buffer", "state")
            and not has_unknown_exchange(analysis)
        ):
            yield RULE.finding(
                wrap.location,
                "each rank keeps its own running statistics of BatchNorm, and evaluates with them",
                evidence=[f"BatchNorm ({layer.location})", f"every rank evaluates the model ({use.location})"],
                related=[use.location],
                repair="leave out `broadcast_buffers=False`, or use SyncBatchNorm",
            )


RULE = Rule(
    "SS208",
    "different-evaluated-weights",
    "error",
    "the metric is a mixture of several models, and the saved model is not the one that was measured",
    "compute the weights on every rank in the same way, or send those of rank 0 to all ranks",
    find,
)
