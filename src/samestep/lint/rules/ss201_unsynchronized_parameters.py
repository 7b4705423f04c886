"""Parameters that are trained, but whose gradients are not exchanged.

DDP exchanges the gradients of the parameters that its module has when it is wrapped. What the optimizer holds besides
them is trained by every rank on its own samples: a second model outside of DDP, a head that is added after wrapping, a
model that was not passed to `accelerator.prepare`. The weights of the ranks drift apart without an error, and a
checkpoint has those of one rank. Gradients that are averaged by hand must be averaged after the backward pass.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
encoder = nn.Linear(8, 8)
model = DDP(nn.Linear(8, 1))
params = list(model.parameters()) + list(encoder.parameters())  # SS201
optimizer = torch.optim.SGD(params, lr=0.1)
for step in range(100):
    x = torch.randn(16, 8)
    loss = model(encoder(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
encoder = DDP(nn.Linear(8, 8))
model = DDP(nn.Linear(8, 1))
params = list(model.parameters()) + list(encoder.parameters())
optimizer = torch.optim.SGD(params, lr=0.1)
for step in range(100):
    x = torch.randn(16, 8)
    loss = model(encoder(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
```

Source: Lightning-AI/pytorch-lightning#20340, facebookresearch/detectron2#2486.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.lint.events import Event
from samestep.lint.module_trees import (
    Freezing,
    contains,
    derived_from,
    exchanges,
    has_own_parameters,
    has_parameters,
    has_unknown_exchange,
    is_exchanged,
    is_module,
    is_passed_on,
    is_trained,
    optimized,
    overlap,
    parts_of,
    raw_module,
    site,
    wrapper_before,
)
from samestep.lint.rank_decisions import is_matched, rank_guard
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain
from samestep.lint.values import InstanceValue, ModelValue, OptimizerValue, TensorValue, Value, options_of

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_END = 10**9


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for trained modules outside of wrappers, new ones inside of them, and exchanges at the wrong time."""
    if analysis.of("accelerator", "fabric"):
        yield from _not_prepared(analysis)
    elif not analysis.of("trainer"):
        yield from _outside_of_wrapper(analysis)
        yield from _without_wrapper(analysis)
        yield from _exchanged_at_wrong_time(analysis)
    yield from _added_after_wrapping(analysis)
    yield from _frozen_on_some_ranks(analysis)


def _stepped(analysis: Analysis) -> list[Event]:
    """Optimizers that take steps."""
    stepped = [each for event in analysis.of("optimizer_step") for each in options_of(event.optimizer)]
    places = {each.location for each in stepped if isinstance(each, OptimizerValue)}
    return [event for event in analysis.of("optimizer") if event.optimizer.location in places]


def _is_unsynchronized(analysis: Analysis, module: Value) -> bool:
    """Whether a module is trained and nothing is seen that exchanges its gradients."""
    if isinstance(module, TensorValue):
        losses = [each for event in analysis.of("backward") for each in derived_from(event.loss)]
        is_used = any(each is module or each.location == module.location for each in losses)
    else:
        is_used = isinstance(module, InstanceValue) and is_trained(analysis, module) and has_parameters(module)
    return (
        is_used
        and not Freezing(analysis).is_frozen(module, _END)
        and not is_exchanged(analysis, module, "gradient", "parameter", "state")
        and not is_passed_on(analysis, module)
        and not any(event.name in _HOOKS for event in analysis.of("call"))
    )


def _outside_of_wrapper(analysis: Analysis) -> Iterator[Finding]:
    wraps = analysis.wrapped
    trees = [raw_module(each) for wrap in wraps for each in options_of(wrap.inner)]
    if not trees or not all(is_module(tree) for tree in trees) or has_unknown_exchange(analysis):
        return
    for event in _stepped(analysis):
        for model, origin in optimized(event.optimizer.parameters):
            raw = raw_module(model)
            if isinstance(model, ModelValue) or any(overlap(tree, raw) for tree in trees):
                yield from _beside_wrapped_parts(analysis, raw, trees, origin or event.location)
                continue
            if origin is not None and _is_unsynchronized(analysis, raw):
                yield RULE.finding(
                    origin,
                    f"the optimizer trains {_name(raw)}, which is outside of DDP",
                    evidence=[f"DDP wraps another module ({wraps[0].location})"],
                    related=[event.location],
                )


def _beside_wrapped_parts(analysis: Analysis, model: Value, trees: list[Value], where: Location) -> Iterator[Finding]:
    """Parameters of a model of which only submodules are wrapped."""
    frozen = Freezing(analysis)
    own = [part for part in parts_of(model) if has_own_parameters(part) and not frozen.was_frozen(part, _END)]
    left = [part for part in own if not any(contains(tree, part) for tree in trees)]
    if left and len(left) < len(own) and not exchanges(analysis, "gradient", "parameter", "state"):
        yield RULE.finding(
            where,
            f"the optimizer trains {_name(model)}, of which only submodules are wrapped",
            evidence=[f"this is outside of them ({left[0].location})"],
            related=[analysis.wrapped[0].location],
            repair="wrap the model itself too: `fully_shard(model)` after its layers, `DistributedDataParallel(model)`",
        )


def _name(module: Value) -> str:
    if isinstance(module, InstanceValue) and module.class_name:
        return f"a module of the class {module.class_name}"
    return "a parameter"


def _without_wrapper(analysis: Analysis) -> Iterator[Finding]:
    """Ranks with their own samples, and nothing that exchanges gradients."""
    loops = [loader for _, loader, role in analysis.loader_loops if role == "train" and loader.is_sharded]
    is_silent = analysis.wrapped or exchanges(analysis, "gradient", "parameter", "state")
    if not analysis.is_plain or not loops or is_silent or has_unknown_exchange(analysis):
        return
    for event in _stepped(analysis):
        for model, _ in optimized(event.optimizer.parameters):
            location = model.location
            if isinstance(model, InstanceValue) and location is not None and _is_unsynchronized(analysis, model):
                yield RULE.finding(
                    location,
                    f"the ranks train {_name(model)} on their own samples, and nothing exchanges its gradients",
                    evidence=[f"each rank reads its own samples ({loops[0].location})"],
                    related=[event.location],
                    repair="wrap the model: `model = DistributedDataParallel(model)`",
                )


def _not_prepared(analysis: Analysis) -> Iterator[Finding]:
    prepared = [each for event in analysis.of("prepare") for each in event.arguments]
    flat = [option for each in prepared for option in options_of(each)]
    if any(type(each) is Value and not each.is_known for each in flat) or not analysis.of("backward"):
        return
    if analysis.of("accelerator") and analysis.of("fabric"):
        return  # which of them trains a model depends on the arguments
    modules = [each for each in flat if is_module(each)]
    services = analysis.of("accelerator", "fabric")
    for event in _stepped(analysis):
        if not any(event.is_run_with(each) for each in services):
            continue
        for model, _ in optimized(event.optimizer.parameters):
            raw = raw_module(model)
            if isinstance(model, ModelValue) or any(overlap(each, raw) for each in modules):
                continue
            if not isinstance(raw, TensorValue) and _is_unsynchronized(analysis, raw):
                location = _prepare_of(analysis, event) or event.location
                is_fabric = bool(analysis.of("fabric"))
                call = (
                    "fabric.setup(model, optimizer)" if is_fabric else "accelerator.prepare(model, optimizer, loader)"
                )
                yield RULE.finding(
                    location,
                    f"{_name(raw)} is trained, but `{call.partition('(')[0]}` does not get it",
                    related=[event.location, *([raw.location] if raw.location is not None else [])],
                    repair=f"pass the model as well: `{call}`",
                )


def _prepare_of(analysis: Analysis, optimizer: Event) -> Location | None:
    for event in analysis.of("prepare"):
        options = [option for each in event.arguments for option in options_of(each)]
        if any(isinstance(each, OptimizerValue) and each.location == optimizer.optimizer.location for each in options):
            return event.location
    return None


def _added_after_wrapping(analysis: Analysis) -> Iterator[Finding]:
    for event in analysis.of("assign_attribute", "assign_item", "call"):
        value = _added_module(event)
        wrap = _wrap_around(analysis, event) if value is not None else None
        if value is None or wrap is None or not is_trained(analysis, value, after=event.order):
            continue
        if has_parameters(value) and not Freezing(analysis).is_frozen(value, _END):
            yield RULE.finding(
                site(event, wrap.location.function, wrap.location.file),
                f"{_name(raw_module(value))} is added to a model that is already wrapped",
                evidence=[f"the wrapper exchanges the parameters that the model has here ({wrap.location})"],
                related=[event.location, wrap.location],
                repair="wrap the model again after the change, or add the module before wrapping",
            )


def _added_module(event: Event) -> Value | None:
    if event.kind == "call":
        if event.owner is None or event.name not in ("append", "add_module", "register_module", "insert"):
            return None
        values = [each for each in event.arguments if is_module(each)]
        return values[-1] if values and is_module(event.owner) else None
    return event.value if is_module(event.value) and is_module(event.owner) else None


def _wrap_around(analysis: Analysis, event: Event) -> Event | None:
    """The wrapper that had got the module before a change, unless it is wrapped again afterwards."""
    wraps = [wrapper_before(analysis, owner, event.order) for owner in options_of(event.owner)]
    return next((each for each in wraps if each is not None), None)


def _frozen_on_some_ranks(analysis: Analysis) -> Iterator[Finding]:
    """Parameters of a wrapped model that are frozen, or trained, on some ranks only."""
    trees = [each for wrap in analysis.wrapped for each in options_of(wrap.inner)]
    reported = set[int]()
    for change in Freezing(analysis).changes:
        guard = rank_guard(change.event)
        is_wrapped = any(overlap(tree, module) for tree in trees for module in change.modules)
        if guard is None or not is_wrapped or id(guard.node) in reported:
            continue
        if is_matched(analysis, change.event, [each.event for each in Freezing(analysis).changes]):
            continue
        reported.add(id(guard.node))
        location = call_in_guard(change.event, guard)
        yield RULE.finding(
            location,
            f"parameters are {'frozen' if change.is_frozen else 'trained'} on some ranks only",
            evidence=[*explain(guard), f"all ranks wrap the model ({analysis.wrapped[0].location})"],
            related=[change.event.location] if location != change.event.location else [],
            consequence="the ranks exchange gradients of different parameters: DDP fails, or its sums are wrong",
            repair="freeze the same parameters on every rank",
        )


def _exchanged_at_wrong_time(analysis: Analysis) -> Iterator[Finding]:
    """An all-reduce of gradients before the backward pass that computes them, or after the step that applies them."""
    for exchange in exchanges(analysis, "gradient"):
        shared = [each for each in analysis.of("backward") if each.loops and each.loops[-1] in exchange.loops]
        steps = [each for each in analysis.of("optimizer_step") if shared and shared[0].loops[-1] in each.loops]
        if not shared or not steps:
            continue
        is_early = exchange.order < shared[0].order < steps[-1].order and exchange.order < steps[0].order
        is_late = exchange.order > steps[-1].order > shared[-1].order
        if is_early or is_late:
            where = shared[0].location
            what = "before the backward pass that computes them" if is_early else "after the step that applies them"
            yield RULE.finding(
                site(exchange, where.function, where.file),
                f"gradients are exchanged {what}",
                evidence=[f"the backward pass ({where})", f"the step ({steps[-1].location})"],
                related=[exchange.location],
                repair="exchange the gradients between `loss.backward()` and `optimizer.step()`",
            )


RULE = Rule(
    "SS201",
    "unsynchronized-parameters",
    "error",
    "these weights differ on every rank, and a checkpoint has those of one rank",
    "wrap everything that is trained: `encoder = DistributedDataParallel(encoder)`, or one module with all parts",
    find,
)
