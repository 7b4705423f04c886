"""A loader with both a sampler and `shuffle=True`.

A DataLoader raises ValueError if it has a sampler and `shuffle=True`, because the sampler already decides the order.
A DistributedSampler shuffles by default.

Bad:

```python
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
dataset = list(range(64))
loader = DataLoader(dataset, batch_size=8, shuffle=True, sampler=DistributedSampler(dataset))  # SS114
```

Good:

```python
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
dataset = list(range(64))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=True))
```

Source: ultralytics/yolov3#231, NVIDIA/tacotron2#168.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import SamplerValue, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for loaders whose options exclude each other."""
    for event in analysis.of("loader"):
        options = event.loader.options
        shuffle = options.get("shuffle")
        if shuffle is None or shuffle.constant is not True:
            continue
        for name in ("sampler", "batch_sampler"):
            samplers = options_of(options.get(name))
            if samplers and all(isinstance(each, SamplerValue) for each in samplers):
                yield RULE.finding(
                    event.location,
                    f"the loader has `{name}` and `shuffle=True`",
                    evidence=[f"the sampler is created here ({samplers[0].location})"],
                )


RULE = Rule(
    "SS114",
    "shuffle-with-sampler",
    "error",
    "DataLoader raises ValueError",
    "remove `shuffle=True`; a DistributedSampler shuffles by default",
    find,
)
