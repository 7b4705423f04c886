"""All ranks use the same GPU.

"cuda" means the current device, which is `cuda:0` in every process until `torch.cuda.set_device(local_rank)` is
called. All ranks then train on the first GPU: NCCL fails with "Duplicate GPU detected", or the GPU runs out of memory
while the others are idle.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
device = torch.device("cuda")  # SS706
model = DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
```

Good:

```python
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
```

Source: pytorch/pytorch#23138, NVIDIA/apex#200, NVIDIA/nccl#1241.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import InstanceValue, ModelValue, Value, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for models on "cuda" in scripts that do not choose the device of each rank."""
    if not analysis.wrapped or analysis.of("accelerator", "fabric", "trainer", "samestep"):
        return
    current = analysis.of("set_device")
    for event in current:
        if isinstance(event.value.constant, int) and event.rank_guard is None and "uncalled" not in event.contexts:
            yield _finding(event, f"every rank uses GPU {event.value.constant}")
    is_hidden = _is_hidden(analysis)
    chooses = bool(current) or is_hidden or _binds_group(analysis)
    for event in analysis.of("device", "to_device"):
        if "uncalled" in event.contexts or event.rank_guard is not None or not _is_of_model(event):
            continue
        names = _devices(event)
        if event.kind == "device" and _is_chosen_again(analysis, event):
            continue
        if ("cuda:0" in names and not is_hidden) or ("cuda" in names and not chooses):
            yield _finding(event, "every rank uses the first GPU")
            return


def _is_chosen_again(analysis: Analysis, event: Event) -> bool:
    """Whether the script also creates the device of the rank: `device = torch.device("cuda", local_rank)`."""
    others = [each for each in analysis.of("device") if each is not event]
    return any(each.value.differs or (each.index is not None and each.index.differs) for each in others)


def _finding(event: Event, summary: str) -> Finding:
    return RULE.finding(event.location, summary, evidence=["the device does not depend on the rank"])


def _is_of_model(event: Event) -> bool:
    if event.kind == "device":
        return True
    return any(
        isinstance(each, ModelValue) or (isinstance(each, InstanceValue) and each.is_module)
        for each in options_of(event.owner)
    )


def _devices(event: Event) -> list[str]:
    """The devices that an event names: `torch.device("cuda", 1)` and `.cuda(1)` have a number."""
    value: Value | None = event.value if event.kind == "device" else event.device
    if event.kind == "device" and event.index is not None:
        return []
    if event.kind == "to_device" and event.call is not None and event.call.name == "cuda":
        return ["cuda"] if value is None else ["cuda:0"] if value.constant == 0 else []
    if value is None or value.differs:
        return []
    return [each.constant for each in options_of(value) if isinstance(each.constant, str)]


def _is_hidden(analysis: Analysis) -> bool:
    """Whether the script lets each process see one GPU only."""
    return any("CUDA_VISIBLE_DEVICES" in file.text for file in analysis.files)


def _binds_group(analysis: Analysis) -> bool:
    calls = [event.call for event in analysis.of("init_group") if event.call is not None]
    return any("device_id" in call.keywords for call in calls)


RULE = Rule(
    "SS706",
    "all-ranks-on-one-device",
    "error",
    "NCCL fails because two ranks use one GPU, or that GPU runs out of memory while the others are idle",
    'use the GPU of the rank: `device = torch.device("cuda", local_rank)` and `torch.cuda.set_device(device)`',
    find,
)
