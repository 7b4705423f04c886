"""An optimizer with parameters that the model does not use.

An optimizer keeps the parameters that a model has when it is created. `fully_shard(model)` and FSDP replace them, and
so does a new head. The optimizer then updates tensors that nothing uses, and the new ones are never trained.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # SS601
model = fully_shard(model)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
model = nn.Linear(8, 1)
model = fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
```

Source: huggingface/accelerate#2665, huggingface/accelerate#3256.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.module_trees import (
    Freezing,
    contains,
    has_parameters,
    is_module,
    is_trained,
    optimized,
    overlap,
    raw_module,
)
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import InstanceValue, ModelValue, OptimizerValue, Value, options_of

_END = 10**9


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for changes of the parameters after the optimizer was created."""
    for event in analysis.of("optimizer"):
        models = [raw_module(model) for model, _ in optimized(event.optimizer.parameters)]
        if not models or _is_extended(analysis, event) or not _takes_steps(analysis, event):
            continue
        change = _sharded(analysis, event, models) or _replaced(analysis, event, models)
        if change is not None:
            what, where = change
            yield RULE.finding(
                event.location,
                f"the optimizer is created before {what}, which gives the model new parameters",
                evidence=[f"the parameters change afterwards ({where.location})"],
                related=[where.location, *where.frames[-1:]],
            )
        elif (stale := _listed_before(analysis, event)) is not None:
            listed, wrap = stale
            yield RULE.finding(
                event.location,
                f"the optimizer holds parameters from before {_name_of(wrap)}, which gives the model new ones",
                evidence=[
                    f"the parameters are listed here ({listed.location})",
                    f"and change afterwards ({wrap.location})",
                ],
                related=[listed.location, wrap.location],
                repair=f"call `model.parameters()` after {_name_of(wrap)}",
            )
        elif _is_elsewhere(analysis, event, models):
            yield RULE.finding(
                event.location,
                "the optimizer holds parameters of a model that the training does not use",
                repair="create the optimizer with the parameters of the model that is trained",
            )


def _takes_steps(analysis: Analysis, event: Event) -> bool:
    steps = [each for step in analysis.of("optimizer_step") for each in options_of(step.optimizer)]
    own = event.optimizer.parameters  # `prepare` makes another optimizer of the same parameters
    return any(isinstance(each, OptimizerValue) and each.parameters is own for each in steps)


def _is_extended(analysis: Analysis, event: Event) -> bool:
    """Whether the optimizer gets more parameters, or is replaced by another one."""
    is_added = any(each.name == "add_param_group" for each in analysis.of("call"))
    others = [each for each in analysis.of("optimizer") if each.location != event.location and each.order > event.order]
    is_made_again = any(each.location.function == event.location.function for each in others)
    return is_added or (is_made_again and len({each.location for each in analysis.of("optimizer")}) == 2)


def _sharded(analysis: Analysis, event: Event, models: list[Value]) -> tuple[str, Event] | None:
    for wrap in analysis.wrapped:
        if wrap.wrapper != "fsdp" or wrap.order < event.order or _keeps_parameters(wrap):
            continue
        if any(overlap(tree, model) for tree in options_of(wrap.inner) for model in models):
            return _name_of(wrap), wrap
    return None


def _name_of(wrap: Event) -> str:
    return "FSDP" if isinstance(wrap.model, ModelValue) else "`fully_shard`"


def _listed_before(analysis: Analysis, event: Event) -> tuple[Event, Event] | None:
    """Where the parameters were put into a list, and the sharding between that and the optimizer."""
    for model, origin in optimized(event.optimizer.parameters):
        listed = [each for each in analysis.of("parameters") if each.location == origin and each.order < event.order]
        wraps = [
            wrap
            for wrap in analysis.wrapped
            if wrap.wrapper == "fsdp" and wrap.order < event.order and not _keeps_parameters(wrap)
            and any(overlap(tree, raw_module(model)) for tree in options_of(wrap.inner))
        ]  # fmt: skip
        if listed and wraps and listed[-1].order < wraps[0].order:
            return listed[-1], wraps[0]
    return None


def _keeps_parameters(wrap: Event) -> bool:
    """`FullyShardedDataParallel(use_orig_params=True)` keeps the objects."""
    option = wrap.model.options.get("use_orig_params") if isinstance(wrap.model, ModelValue) else None
    return option is not None and option.constant is not False


def _replaced(analysis: Analysis, event: Event, models: list[Value]) -> tuple[str, Event] | None:
    for change in analysis.of("assign_attribute", "assign_item"):
        value = change.value
        if change.order < event.order or not is_module(value) or isinstance(value, ModelValue):
            continue
        owners = [each for each in options_of(change.owner) if isinstance(each, InstanceValue) and is_module(each)]
        is_inside = any(contains(model, owner) for owner in owners for model in models)
        is_outside = not is_inside or "forward" in change.contexts or Freezing(analysis).is_frozen(value, _END)
        if not is_outside and has_parameters(value) and is_trained(analysis, value, after=change.order):
            return "a submodule is replaced", change
    return None


def _is_elsewhere(analysis: Analysis, event: Event, models: list[Value]) -> bool:
    """Whether all calls with gradients are of known modules that share nothing with those of the optimizer."""
    outer = [each for each in analysis.of("model_call") if each.is_grad and not each.is_nested]
    calls = [each for each in outer if "uncalled" not in each.contexts]
    called = [option for each in calls for option in options_of(each.model)]
    is_known = all(isinstance(raw_module(each), InstanceValue) for each in called)
    is_full = all(isinstance(model, InstanceValue) and has_parameters(model) for model in models)
    is_single = len({each.location for each in analysis.of("optimizer")}) == 1 and bool(analysis.of("backward"))
    names = {model.class_name for model in models if isinstance(model, InstanceValue)}
    others = [each.model for each in analysis.of("model_call") if "uncalled" in each.contexts]
    if any(isinstance(each, InstanceValue) and each.class_name in names for each in others):
        return False  # another object of the class, in a method that nothing calls
    if not called or not is_known or not is_full or not is_single or analysis.is_lightning:
        return False
    return not any(overlap(model, raw_module(each)) for model in models for each in called)


RULE = Rule(
    "SS601",
    "stale-optimizer-parameters",
    "error",
    "`optimizer.step()` changes nothing that the model uses: these weights stay constant",
    "create the optimizer after the model has its final parameters",
    find,
)
