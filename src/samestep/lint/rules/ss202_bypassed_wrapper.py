"""The model is trained without its wrapper.

DDP prepares the exchange of gradients when the wrapper itself is called. A script that calls the wrapped module, or a
method of `model.module` that computes the loss, trains it as if there were no DDP: every rank has its own weights after
the first step. Put what the loss needs into `forward`, and call the wrapper.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
net = nn.Linear(8, 1)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    x = torch.randn(16, 8)
    loss = net(x).square().mean()  # SS202
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
net = nn.Linear(8, 1)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    x = torch.randn(16, 8)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
```

Source: intel/e2eAIOK#198, kohya-ss/sd-scripts#924.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.lint.events import Event
from samestep.lint.module_trees import Freezing, contains, is_exchanged, key_of, site
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ModelValue, Value, options_of

_NAMES = {"ddp": "DDP", "fsdp": "FSDP", "prepared": "`prepare`"}


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for calls with gradients of modules that a wrapper holds."""
    freezing = Freezing(analysis)
    wrappers = list(_wrappers(analysis))
    reported = set[Location]()
    for call in analysis.of("model_call"):
        if not call.is_grad or call.is_nested:
            continue
        for called in options_of(call.model):
            wrapper = _wrapper_of(wrappers, called, call.order)
            backward = _backward_after(analysis, call)
            if wrapper is None or backward is None or wrapper.location is None:
                continue
            is_meant = freezing.is_frozen(called, call.order) or _calls_wrapper(analysis, wrapper, backward)
            location = site(call, backward.location.function, backward.location.file)
            if is_meant or location in reported or is_exchanged(analysis, called, "gradient"):
                continue
            reported.add(location)
            yield RULE.finding(
                location,
                f"this calls the module inside of {_NAMES[wrapper.wrapper]}, not the wrapper",
                evidence=[
                    f"the model is wrapped ({wrapper.location})",
                    f"the backward pass follows ({backward.location})",
                ],
                related=[call.location],
            )


def _wrappers(analysis: Analysis) -> Iterator[tuple[int, ModelValue]]:
    for event in analysis.of("wrap", "prepare"):
        values = [event.model] if event.kind == "wrap" else event.results
        for value in values:
            if isinstance(value, ModelValue) and value.wrapper in _NAMES:
                yield event.order, value


def _wrapper_of(wrappers: list[tuple[int, ModelValue]], called: Value, order: int) -> ModelValue | None:
    if isinstance(called, ModelValue):
        return None
    return next((each for at, each in wrappers if at < order and contains(each.raw, called)), None)


def _backward_after(analysis: Analysis, call: Event) -> Event | None:
    """The backward pass of the same iteration."""
    for event in analysis.of("backward"):
        if event.order > call.order and call.loops and event.loops and call.loops[-1] in event.loops:
            return event
    return None


def _calls_wrapper(analysis: Analysis, wrapper: ModelValue, backward: Event) -> bool:
    """Whether the same iteration calls the wrapper with gradients as well."""
    for event in analysis.of("model_call"):
        if event.is_grad and event.loops and event.loops[-1] in backward.loops:
            models = [each for each in options_of(event.model) if isinstance(each, ModelValue)]
            if any(key_of(each) == key_of(wrapper) for each in models):
                return True
    return False


RULE = Rule(
    "SS202",
    "bypassed-wrapper",
    "error",
    "gradients are not exchanged: each rank trains its own model, and only that of one rank is saved",
    "call the wrapper, `model(x)`, and compute the loss from its outputs or inside of `forward`",
    find,
)
