"""Several ranks remove the same file.

The rank that comes second fails with FileNotFoundError, or removes what another rank has just written.

Bad:

```python
import os

import torch.distributed as dist

dist.init_process_group("gloo")
os.remove("cache.pt")  # SS505
```

Good:

```python
import os

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    os.remove("cache.pt")
```

Source: huggingface/transformers#20988, huggingface/diffusers#4977.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.file_access import is_on_all_ranks, is_shared, is_tried, path_text
from samestep.lint.rule import Analysis, Rule


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for files that all ranks remove."""
    spawns = analysis.of("spawn")
    for event in analysis.of("remove"):
        if event.ignores_missing or not is_on_all_ranks(event) or not is_shared(event.path):
            continue
        if event.path.clock is not None or (spawns and event.order < spawns[0].order) or is_tried(analysis, event):
            continue
        yield RULE.finding(
            event.location,
            f"every rank removes `{path_text(event)}`",
            evidence=["there is no condition on the rank"],
        )


RULE = Rule(
    "SS505",
    "file-removed-by-several-ranks",
    "warning",
    "the rank that comes second fails, or removes what another rank has just written",
    "remove it on rank 0 only: `if dist.get_rank() == 0:`",
    find,
)
