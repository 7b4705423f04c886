"""A rank reads a file that another one may not have written yet.

All ranks read a file that rank 0 writes. Without a barrier in between, a rank finds no file, half of it or an old
one, depending on which rank is faster.

Bad:

```python
import json

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    with open("vocab.json", "w") as file:
        json.dump(["a", "b"], file)
with open("vocab.json") as file:  # SS502
    vocab = json.load(file)
```

Good:

```python
import json

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    with open("vocab.json", "w") as file:
        json.dump(["a", "b"], file)
dist.barrier()
with open("vocab.json") as file:
    vocab = json.load(file)
```

Source: LLM360/Reasoning360#88, pyg-team/pytorch_geometric#9456.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.file_access import is_same_path, is_synchronized, path_text
from samestep.lint.rule import Analysis, Rule, explain


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for reads of what one rank has just written."""
    if analysis.of("trainer"):
        return
    for event in analysis.of("write"):
        guard = event.rank_guard
        if guard is None or "uncalled" in event.contexts:
            continue
        read = _next_read(analysis, event)
        if read is not None and not is_synchronized(analysis, event, read):
            yield RULE.finding(
                read.location,
                f"all ranks read `{path_text(read)}`, which one rank writes, without a barrier in between",
                evidence=[*explain(guard), f"it is written here ({event.location})"],
                related=[event.location],
            )


def _next_read(analysis: Analysis, write: Event) -> Event | None:
    """The first time after a write that other ranks read the same file."""
    for event in analysis.of("read"):
        is_later = event.order > write.order and "uncalled" not in event.contexts
        if is_later and event.rank_guard is None and is_same_path(write, event):
            return event
    return None


RULE = Rule(
    "SS502",
    "unsynchronized-read",
    "error",
    "the rank finds no file, half of it or an old one, depending on which rank is faster",
    "call `dist.barrier()` between the write and the read, on all ranks",
    find,
)
