"""Parameters that are unfrozen after DDP has wrapped the model.

DDP registers the parameters that require a gradient when it wraps a model. A backbone that is frozen at that time and
trained in a second stage is unknown to it: its gradients are not exchanged, and every rank trains its own backbone.

Bad:

```python
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
backbone = nn.Linear(8, 8)
backbone.requires_grad_(False)
net = nn.Sequential(backbone, nn.Linear(8, 1))
model = DDP(net)
backbone.requires_grad_(True)  # SS215
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
backbone = nn.Linear(8, 8)
backbone.requires_grad_(False)
net = nn.Sequential(backbone, nn.Linear(8, 1))
model = DDP(net)
backbone.requires_grad_(True)
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
```

Source: Lightning-AI/pytorch-lightning#20340, facebookresearch/detectron2#2486.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.module_trees import Freezing, is_trained, site, wrapper_before
from samestep.lint.rule import Analysis, Rule


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for modules that are frozen when DDP wraps them, and trained later."""
    freezing = Freezing(analysis)
    for change in freezing.changes:
        if change.is_frozen:
            continue
        for module in change.modules:
            wrap = wrapper_before(analysis, module, change.event.order, with_parents=True)
            frozen = freezing.was_frozen(module, wrap.order) if wrap is not None else None
            if wrap is None or frozen is None or not is_trained(analysis, module, after=change.event.order):
                continue
            yield RULE.finding(
                site(change.event, wrap.location.function, wrap.location.file),
                "these parameters were frozen when DDP wrapped the model, so it does not exchange their gradients",
                evidence=[f"frozen ({frozen.event.location})", f"wrapped ({wrap.location})"],
                related=[change.event.location, wrap.location],
            )


RULE = Rule(
    "SS215",
    "unfrozen-after-wrapping",
    "error",
    "each rank trains its own copy of these parameters, and only that of one rank is saved",
    "wrap the model again after the change: `model = DistributedDataParallel(net)`",
    find,
)
