"""DDP gets the same device on every rank.

`device_ids` is the GPU of this process. `device_ids=[0]` makes every rank use the first one, and a list of all GPUs
is refused: DDP works with one device per process.

Bad:

```python
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[0])  # SS707
```

Good:

```python
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[local_rank])
```

Source: pytorch/pytorch#13200, pytorch/pytorch#26385.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ContainerValue, ModelValue


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for constant lists of devices."""
    for event in analysis.of("wrap"):
        options = event.model.options if isinstance(event.model, ModelValue) else {}
        given = options.get("device_ids")
        if not isinstance(given, ContainerValue) or not given.items or given.differs:
            continue
        numbers = [each.constant for each in given.values()]
        if given.length is not None and all(isinstance(each, int) for each in numbers):
            yield RULE.finding(
                event.location,
                f"`device_ids={numbers}` on every rank",
                evidence=["the device does not depend on the rank"],
            )


RULE = Rule(
    "SS707",
    "constant-device-ids",
    "error",
    "all ranks use the same GPU, or DDP refuses several devices",
    "pass the GPU of the rank: `device_ids=[local_rank]`",
    find,
)
