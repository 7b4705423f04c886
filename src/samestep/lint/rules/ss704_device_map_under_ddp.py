"""Every rank spreads its model over all GPUs.

`device_map="auto"` places the layers of a model on all GPUs of the node, for one process. With one process per GPU,
every rank uses all GPUs: they run out of memory, and DDP refuses a model on several devices.

Bad:

```python
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

dist.init_process_group("nccl")
model = AutoModelForCausalLM.from_pretrained("gpt2", device_map="auto")  # SS704
model = DistributedDataParallel(model)
```

Good:

```python
import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

dist.init_process_group("nccl")
model = AutoModelForCausalLM.from_pretrained("gpt2", device_map={"": int(os.environ["LOCAL_RANK"])})
model = DistributedDataParallel(model)
```

Source: huggingface/transformers#31557, huggingface/accelerate#1534.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.rule import Analysis, Rule

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for device maps over all GPUs in scripts with one process per GPU."""
    if not analysis.of("init_group", "wrap", "spawn", "prepare"):
        return
    for event in analysis.of("pretrained"):
        given = event.keywords.get("device_map")
        if given is None or given.constant not in _STRATEGIES:
            continue
        if event.rank_guard is not None or "uncalled" in event.contexts or _is_conditional(analysis, event):
            continue
        yield RULE.finding(
            event.location,
            f'`device_map="{given.constant}"` in every rank',
            evidence=[f"the script has one process per GPU ({_launch(analysis).location})"],
        )


def _launch(analysis: Analysis) -> Event:
    return analysis.of("init_group", "wrap", "spawn", "prepare")[0]


def _is_conditional(analysis: Analysis, event: Event) -> bool:
    """Whether the map is assigned to a dictionary of options under a condition, which may not hold."""
    given = event.keywords["device_map"]
    return any(each.value is given and each.guards for each in analysis.of("assign_item"))


RULE = Rule(
    "SS704",
    "device-map-under-ddp",
    "error",
    "every rank uses all GPUs: they run out of memory, and DDP refuses a model on several devices",
    'place the model on the GPU of the rank: `device_map={"": local_rank}`',
    find,
)
