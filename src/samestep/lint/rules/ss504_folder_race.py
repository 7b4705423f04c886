"""All ranks create the same folder, and fail if it exists.

`os.makedirs(path)` raises FileExistsError on every rank but the first. A test with `os.path.exists` before it does
not help: another rank may create the folder between the test and the call.

Bad:

```python
import os

import torch.distributed as dist

dist.init_process_group("gloo")
if not os.path.exists("checkpoints"):
    os.makedirs("checkpoints")  # SS504
```

Good:

```python
import os

import torch.distributed as dist

dist.init_process_group("gloo")
os.makedirs("checkpoints", exist_ok=True)
```

Source: NVIDIA-BioNeMo/CodonFM#1, facebookresearch/ClassyVision#182.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.file_access import is_on_all_ranks, is_shared, is_tried, path_text
from samestep.lint.rule import Analysis, Rule


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for folders that must not exist yet, on all ranks."""
    for event in analysis.of("folder"):
        if event.may_exist or not is_on_all_ranks(event) or not is_shared(event.path):
            continue
        if event.path.clock is not None or analysis.is_in_launcher(event):
            continue
        if any(guard.kind == "except" for guard in event.guards) or is_tried(analysis, event):
            continue
        yield RULE.finding(
            event.location,
            f"every rank creates `{path_text(event)}`, and all but the first fail",
            evidence=["there is no condition on the rank, and no `exist_ok=True`"],
        )


RULE = Rule(
    "SS504",
    "folder-race",
    "warning",
    "the rank that comes second fails with FileExistsError",
    "pass `exist_ok=True`",
    find,
)
