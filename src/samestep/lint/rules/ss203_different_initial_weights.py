"""The ranks start with different weights.

DDP and FSDP send the weights of rank 0 to all ranks when they wrap a model. A script that averages gradients by itself
must do that too. A seed that depends on the rank before the model is built, or a checkpoint that only rank 0 loads
after the model was wrapped, gives each rank its own weights: averaged gradients belong to none of them.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.Linear(8, 1)  # SS203
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.Linear(8, 1)
for p in model.parameters():
    dist.broadcast(p.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
```

Source: pytorch/pytorch#75870.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.module_trees import (
    contains,
    exchanges,
    has_parameters,
    has_unknown_exchange,
    is_exchanged,
    is_module,
    is_trained,
    key_of,
    modules_of,
    optimized,
    overlap,
    raw_module,
    seed_before,
)
from samestep.lint.rank_decisions import rank_guard
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain
from samestep.lint.values import InstanceValue, MethodValue, ModelValue, OptimizerValue, Value, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for models that are built or loaded differently on the ranks, and that nothing equalizes."""
    if analysis.of("trainer"):
        return
    yield from _loaded_on_some_ranks(analysis)
    if not analysis.of("accelerator", "fabric"):
        yield from _seeded_by_rank(analysis)
        yield from _initialized_after_wrapping(analysis)
        yield from _initialized_on_some_ranks(analysis)


def _initialized_on_some_ranks(analysis: Analysis) -> Iterator[Finding]:
    """Weights that rank 0 draws in a script that averages gradients by itself."""
    if not exchanges(analysis, "gradient"):
        return
    for event in analysis.of("call"):
        guard = event.rank_guard
        if (
            guard is None
            or "uncalled" in event.contexts
            or not _initializes(event)
            or _has_opposite_call(analysis, event)
        ):
            continue
        for module in _initialized(event):
            if not _is_equalized(analysis, module, event) and _runs_everywhere(analysis, module, event.order):
                yield RULE.finding(
                    event.location,
                    "only some ranks initialize these weights, and nothing sends them to the others",
                    evidence=explain(guard),
                )
                return


def _has_opposite_call(analysis: Analysis, event: Event) -> bool:
    own = event.rank_guard
    return any(
        _initializes(each) and own is not None and guard.node is own.node and guard.is_negated != own.is_negated
        for each in analysis.of("call")
        for guard in each.guards
    )


def _initialized(event: Event) -> list[Value]:
    """The modules whose weights a call draws."""
    target = event.owner if event.owner is not None else next(iter(event.arguments), None)
    return modules_of(target.owner if isinstance(target, MethodValue) else target)


def _seeded_by_rank(analysis: Analysis) -> Iterator[Finding]:
    if not exchanges(analysis, "gradient"):
        return
    models = [model for event in analysis.of("optimizer") for model, _ in optimized(event.optimizer.parameters)]
    for event in analysis.of("create"):
        instance = event.instance
        if not any(not isinstance(model, ModelValue) and key_of(model) == key_of(instance) for model in models):
            continue
        seed = seed_before(analysis, event)
        if seed is None or not has_parameters(instance) or _is_equalized(analysis, instance, event):
            continue
        taints = [f"{taint.text} ({taint.location})" for taint in seed.value.taints]
        yield RULE.finding(
            event.location,
            "each rank builds its model with another seed, and nothing sends the weights of rank 0 to the others",
            evidence=[*taints, f"the seed depends on the rank ({seed.location})"],
            related=[seed.location],
        )


def _is_equalized(analysis: Analysis, model: Value, event: Event) -> bool:
    """Whether a wrapper, a broadcast or a checkpoint gives all ranks the same weights later."""
    wrapped = any(overlap(tree, model) for wrap in analysis.wrapped for tree in options_of(wrap.inner))
    loads = (each for each in analysis.of("load_state") if each.rank_guard is None and is_module(each.owner))
    is_loaded = any(overlap(owner, model) for each in loads for owner in options_of(each.owner))
    is_sent = is_exchanged(analysis, model, "parameter", "state", after=event.order)
    return wrapped or is_loaded or is_sent or has_unknown_exchange(analysis, after=event.order)


def _loaded_on_some_ranks(analysis: Analysis) -> Iterator[Finding]:
    for event in analysis.of("load_state"):
        guard = event.rank_guard
        owners = [each for each in options_of(event.owner) if is_module(each) and not isinstance(each, OptimizerValue)]
        if guard is None or not owners or "uncalled" in event.contexts or _has_opposite(analysis, event):
            continue
        raw = raw_module(owners[0])
        later = [wrap for wrap in analysis.wrapped if wrap.order > event.order]
        prepared = [each for wrap in analysis.of("prepare") if wrap.order > event.order for each in wrap.arguments]
        trees = [*(wrap.inner for wrap in later), *prepared]
        is_sent = any(overlap(tree, raw) for each in trees for tree in options_of(each) if is_module(tree))
        is_sharded = any(
            wrap.wrapper == "fsdp" and contains(tree, raw)
            for wrap in analysis.wrapped
            for tree in options_of(wrap.inner)
        )
        is_silent = is_sent or is_sharded or not isinstance(raw, InstanceValue)
        if is_silent or not _runs_everywhere(analysis, raw, event.order) or not is_trained(analysis, raw):
            continue
        if _is_sent_later(analysis, raw, event):
            continue
        yield RULE.finding(
            call_in_guard(event, guard),
            "only some ranks load these weights, and nothing sends them to the others",
            evidence=explain(guard),
            related=[event.location],
            repair="load the checkpoint on every rank, or on rank 0 before DDP wraps the model",
        )


def _initialized_after_wrapping(analysis: Analysis) -> Iterator[Finding]:
    """Weights that each rank draws again after DDP has sent those of rank 0."""
    for event in analysis.of("call"):
        if event.rank_guard is not None or "uncalled" in event.contexts or not _initializes(event):
            continue
        modules = _initialized(event)
        wraps = [wrap for wrap in analysis.wrapped if wrap.order < event.order and wrap.wrapper == "ddp"]
        wrap = next((e for e in wraps if any(overlap(t, m) for t in options_of(e.inner) for m in modules)), None)
        seed = seed_before(analysis, event)
        if wrap is None or seed is None or any(_is_sent_later(analysis, each, event) for each in modules):
            continue
        yield RULE.finding(
            event.location,
            "each rank draws these weights from another seed, after DDP has sent the weights of rank 0",
            evidence=[
                *(f"{taint.text} ({taint.location})" for taint in seed.value.taints),
                f"the seed depends on the rank ({seed.location})",
                f"DDP wraps the model ({wrap.location})",
            ],
            related=[wrap.location, seed.location],
            repair="initialize the weights before DDP wraps the model",
        )


def _initializes(event: Event) -> bool:
    is_random = not event.name.endswith(("zeros_", "ones_", "constant_", "eye_", "dirac_"))
    return event.name in ("reset_parameters", "init_weights") or (event.name.startswith("torch.nn.init.") and is_random)


def _has_opposite(analysis: Analysis, event: Event) -> bool:
    own = event.rank_guard
    return any(
        each is not event and each.rank_guard is not None and own is not None and each.rank_guard.node is own.node
        and each.rank_guard.is_negated != own.is_negated
        for each in analysis.of("load_state")
    )  # fmt: skip


def _is_sent_later(analysis: Analysis, model: Value, event: Event) -> bool:
    is_sent = is_exchanged(analysis, model, "parameter", "state", after=event.order)
    return is_sent or has_unknown_exchange(analysis, after=event.order)


def _runs_everywhere(analysis: Analysis, model: Value, order: int) -> bool:
    """Whether all ranks train the model after a line."""
    return any(
        call.order > order and rank_guard(call) is None and any(overlap(each, model) for each in options_of(call.model))
        for call in analysis.of("model_call")
        if call.is_grad
    )


RULE = Rule(
    "SS203",
    "different-initial-weights",
    "error",
    "each rank trains another model, and averaged gradients belong to none of them",
    "send the weights of rank 0: `for p in model.parameters(): dist.broadcast(p.data, src=0)`, or use DDP",
    find,
)
