"""Every rank loads a checkpoint to the GPU that it was saved from.

`torch.load` without `map_location` puts tensors on the device from which they were saved, usually `cuda:0`. Every
rank then allocates memory on the GPU of rank 0, which runs out of it.

Bad:

```python
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Linear(8, 8).cuda()
model.load_state_dict(torch.load("model.pt"))  # SS705
model = DistributedDataParallel(model)
```

Good:

```python
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Linear(8, 8).cuda()
model.load_state_dict(torch.load("model.pt", map_location="cpu"))
model = DistributedDataParallel(model)
```

Source: pytorch/pytorch#23138.
"""

import ast
import re
from collections.abc import Iterator
from typing import Final

from samestep.findings import Edit, Finding
from samestep.lint.events import Event
from samestep.lint.file_access import path_text
from samestep.lint.fixes import add_keyword
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import options_of

_CHECKPOINT: Final = re.compile(r"check_?point|ckpt|resume|pretrain|weight|snapshot|restore", re.IGNORECASE)
_CUDA: Final = re.compile(r"cuda|nccl")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for checkpoints that are loaded to the device from which they were saved."""
    if not analysis.of("init_group", "wrap", "spawn") or not any(_CUDA.search(file.text) for file in analysis.files):
        return
    for event in analysis.of("torch_load"):
        given = event.map_location
        is_first_gpu = given is not None and given.constant in ("cuda:0", "cuda:00")
        is_missing = given is None or given.constant is None
        if not (is_missing or is_first_gpu) or event.rank_guard is not None:
            continue
        if "uncalled" in event.contexts or "dataset" in event.contexts or not _is_checkpoint(analysis, event):
            continue
        yield RULE.finding(
            event.location,
            "`torch.load` has no `map_location`" if is_missing else "`torch.load` puts tensors on `cuda:0`",
            evidence=["tensors that were saved from `cuda:0` go to `cuda:0` again, on every rank"],
            edits=_edits(analysis, event),
        )


def _edits(analysis: Analysis, event: Event) -> tuple[Edit, ...]:
    """Add `map_location="cpu"`, unless the call passes another one."""
    file = analysis.file_of(event.location)
    if file is None or not isinstance(event.node, ast.Call) or event.map_location is not None:
        return ()
    return add_keyword(file, event.node, 'map_location="cpu"')


def _is_checkpoint(analysis: Analysis, event: Event) -> bool:
    """Whether what is loaded are weights: they go to `load_state_dict`, or the path says so."""
    for load in analysis.of("load_state"):
        state = load.call.arguments[0] if load.call is not None and load.call.arguments else None
        if any(option.name == "torch.load" and option.location == event.location for option in options_of(state)):
            return True
    return bool(_CHECKPOINT.search(path_text(event))) or bool(_CHECKPOINT.search(str(event.path.constant)))


RULE = Rule(
    "SS705",
    "load-without-map-location",
    "warning",
    "every rank allocates memory on the GPU of rank 0, which runs out of it",
    '`torch.load(path, map_location="cpu")`, or the device of the rank',
    find,
)
