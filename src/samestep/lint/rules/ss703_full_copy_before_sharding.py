"""Every rank loads the whole checkpoint of a sharded model.

`broadcast_from_rank0=True` and `sync_module_states=True` send the weights of rank 0 to all ranks. If the other ranks
load the checkpoint too, the host memory of a node holds one full copy per rank, all but one for nothing.

Bad:

```python
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
with torch.device("meta"):
    model = torch.nn.Linear(8, 8)
fully_shard(model)
model.to_empty(device="cpu")
state = torch.load("weights.pt", map_location="cpu")  # SS703
set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
```

Good:

```python
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
with torch.device("meta"):
    model = torch.nn.Linear(8, 8)
fully_shard(model)
model.to_empty(device="cpu")
state = torch.load("weights.pt", map_location="cpu") if dist.get_rank() == 0 else {}
set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
```

Source: facebookresearch/fairscale#844, Lightning-AI/pytorch-lightning#11207.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.lint.events import Event
from samestep.lint.library.call import is_on
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import InstanceValue, ModelValue, Value, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for checkpoints that all ranks load although one rank sends its weights to the others."""
    loads = {event.location: event for event in analysis.of("torch_load") if not _is_lazy(event)}
    for event in analysis.of("collective"):
        if event.name not in ("set_model_state_dict", "set_state_dict") or not _broadcasts(event):
            continue
        for value in (*event.arguments[1:3], *event.keywords.values()):
            yield from _finding(loads, value, event)
    for event in analysis.of("wrap"):
        options = event.model.options if isinstance(event.model, ModelValue) else {}
        sync = options.get("sync_module_states")
        if sync is not None and sync.constant is True:
            for loaded in analysis.of("load_state"):
                if loaded.order < event.order and loaded.call is not None and loaded.rank_guard is None:
                    yield from _finding(loads, loaded.call.get("state_dict", 0), event)


def _is_lazy(event: Event) -> bool:
    """Whether only some ranks load, or the file is mapped into memory."""
    return event.rank_guard is not None or is_on(event.call, "mmap") or "uncalled" in event.contexts


def _broadcasts(event: Event) -> bool:
    options = event.keywords.get("options")
    given = [each for each in options_of(options) if isinstance(each, InstanceValue)]
    values = [each.arguments.get("broadcast_from_rank0") for each in given]
    return any(each is not None and each.constant is True for each in values)


def _finding(loads: dict[Location, Event], value: Value | None, event: Event) -> Iterator[Finding]:
    for option in options_of(value):
        load = loads.get(option.location) if option.location is not None else None
        if load is not None and option.name == "torch.load":
            yield RULE.finding(
                load.location,
                "every rank loads the whole checkpoint, although rank 0 sends it to the others",
                evidence=[f"rank 0 sends its weights here ({event.location})"],
                related=[event.location],
            )


RULE = Rule(
    "SS703",
    "full-copy-before-sharding",
    "warning",
    "the memory of a node holds one full copy per rank, which may be more than it has",
    "load on rank 0 only: `state = torch.load(path) if dist.get_rank() == 0 else {}`",
    find,
)
