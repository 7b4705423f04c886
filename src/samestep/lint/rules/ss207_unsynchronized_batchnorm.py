"""BatchNorm with very few samples per rank.

Under DDP each rank normalizes with the mean and the variance of the samples on this rank. With four samples or fewer
these are noise, although the batch of all ranks is large. Larger batches per rank are common and not reported.

Bad:

```python
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def build(dataset):
    dist.init_process_group("nccl")
    model = DDP(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))  # SS207
    return model, DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))
```

Good:

```python
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def build(dataset):
    dist.init_process_group("nccl")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    return model, DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))
```

Source: pytorch/pytorch#2584, LibreYOLO/libreyolo#531.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.module_trees import batch_norm_in
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import Value

_FEW = 4


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for wrapped models with BatchNorm, and loaders with few samples per batch."""
    if any(event.name.endswith("convert_sync_batchnorm") for event in analysis.of("call")):
        return
    loaders = [event.loader for event in analysis.of("loader") if event.loader.is_sharded]
    sizes = [loader.options.get("batch_size") for loader in loaders]
    small = [each for each in sizes if each is not None and _is_small(each)]
    if not small or len(small) != len(sizes):
        return
    for wrap in analysis.wrapped:
        layer = batch_norm_in(wrap.inner) if wrap.wrapper == "ddp" else None
        if layer is not None:
            yield RULE.finding(
                wrap.location,
                f"each rank normalizes with the statistics of {small[0].constant} samples",
                evidence=[f"BatchNorm ({layer.location})", f"the batch size ({small[0].location or wrap.location})"],
                related=[layer.location] if layer.location is not None else [],
            )


def _is_small(value: Value) -> bool:
    return isinstance(value.constant, int) and not isinstance(value.constant, bool) and 1 <= value.constant <= _FEW


RULE = Rule(
    "SS207",
    "unsynchronized-batchnorm",
    "note",
    "statistics of so few samples are noise, and depend on the number of ranks",
    "`model = nn.SyncBatchNorm.convert_sync_batchnorm(model)` before DDP, or GroupNorm",
    find,
    is_sure=False,
)
