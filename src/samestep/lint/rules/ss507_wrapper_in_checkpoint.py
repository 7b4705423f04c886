"""A checkpoint of the wrapper is loaded into the bare model, or the other way round.

The state dict of a DistributedDataParallel model has the prefix `module.` in all names, which a bare model does not
know: `load_state_dict` raises an error, and with `strict=False` it silently loads nothing.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 4))
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")  # SS507
dist.barrier()
fresh = nn.Linear(4, 4)
fresh.load_state_dict(torch.load("model.pt", map_location="cpu"), strict=False)
```

Good:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 4))
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.barrier()
fresh = nn.Linear(4, 4)
fresh.load_state_dict(torch.load("model.pt", map_location="cpu"))
```

Source: pytorch/pytorch#9176, the tutorial "Getting Started with Distributed Data Parallel".
"""

import ast
from collections.abc import Iterator
from typing import Any, Final

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.file_access import is_same_path
from samestep.lint.module_trees import is_module
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ContainerValue, ModelValue, ParametersValue, Value, options_of

_WHOLE: Final = None  # the key of a file that is a state dict itself


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for pairs of a file that is saved and loaded, one with a wrapper and one without."""
    loads = [each for each in analysis.of("load_state") if each.call.arguments and is_module(each.owner)]
    files = analysis.of("torch_load")
    if not loads or not files or any("module." in each.text.replace(".module.", "") for each in analysis.files):
        return  # the script knows of the prefix
    for write in analysis.of("write"):
        for key, owner in _saved(write):
            for load in loads:
                file = next((each for each in files if _is_from(load, each, key)), None)
                same = file is not None and is_same_path(write, file)
                if same and _is_wrapped(owner) != _is_wrapped(load.owner) and not _is_choice(owner, load.owner):
                    yield _finding(write, load, _is_wrapped(owner))


def _saved(write: Event) -> Iterator[tuple[Any, Value]]:
    """The models whose state is saved, with the keys of a dictionary around them."""
    saved = write.call.arguments[0] if write.how == "torch.save" and write.call.arguments else None
    items = saved.items.items() if isinstance(saved, ContainerValue) else [(_WHOLE, saved)]
    for key, value in items:
        if isinstance(value, ParametersValue) and value.content == "state" and len(value.models) == 1:
            yield key, value.models[0]


def _is_from(load: Event, file: Event, key: Any) -> bool:
    """Whether a state was read from a file, as a whole or with a key of it."""
    state, source = load.call.arguments[0], load.call.node.args[0]
    if state.name != "torch.load" or state.location != file.location:
        return False
    index = source.slice if isinstance(source, ast.Subscript) else None
    return (index.value if isinstance(index, ast.Constant) else _WHOLE) == key


def _is_wrapped(owner: Value) -> bool:
    return any(isinstance(each, ModelValue) and each.wrapper == "ddp" for each in options_of(owner))


def _is_choice(*owners: Value) -> bool:
    return any(len(options_of(each)) > 1 for each in owners)


def _finding(write: Event, load: Event, is_wrapped: bool) -> Finding:
    what = "has the prefix `module.`, and the model that loads it has not"
    other = "has no prefix `module.`, and the model that loads it is wrapped"
    return RULE.finding(
        write.location,
        f"this state dict {what if is_wrapped else other}",
        evidence=[f"it is loaded here ({load.location})"],
        related=[load.location],
    )


RULE = Rule(
    "SS507",
    "wrapper-in-checkpoint",
    "error",
    "`load_state_dict` fails, or with `strict=False` leaves the weights as they were",
    "save `model.module.state_dict()` of a wrapped model, and load it before the model is wrapped",
    find,
)
