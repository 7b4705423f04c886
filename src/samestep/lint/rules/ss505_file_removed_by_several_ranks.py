"""Several ranks remove the same file.

The rank that comes second fails with FileNotFoundError, or removes what another rank has just written. With
`ignore_errors=True` it does not fail, but if the ranks do not wait for each other, it still removes what a faster rank
has already written to the folder.

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
from samestep.lint.events import Event
from samestep.lint.file_access import (
    is_inside_path,
    is_on_all_ranks,
    is_same_path,
    is_shared,
    is_synchronized,
    is_tried,
    path_text,
)
from samestep.lint.rule import Analysis, Rule


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for files and folders that all ranks remove."""
    for event in analysis.of("remove"):
        if not is_on_all_ranks(event) or not is_shared(event.path) or event.path.clock is not None:
            continue
        if analysis.is_in_launcher(event):
            continue
        written = _next_write(analysis, event)
        if written is not None:
            yield RULE.finding(
                event.location,
                f"every rank removes `{path_text(event)}`, also after a faster rank has written to it",
                evidence=[f"it is written here, without a barrier in between ({written.location})"],
                related=[written.location],
                repair="remove it on rank 0 only, or call `dist.barrier()` before anything is written",
            )
        elif not event.ignores_missing and not is_tried(analysis, event):
            yield RULE.finding(
                event.location,
                f"every rank removes `{path_text(event)}`",
                evidence=["there is no condition on the rank"],
            )


def _next_write(analysis: Analysis, remove: Event) -> Event | None:
    """The first write to a folder that was removed that ranks reach without waiting for each other."""
    if remove.call is None or remove.call.last != "rmtree" or any(each.kind == "except" for each in remove.guards):
        return None
    for event in analysis.of("write"):
        if event.order < remove.order or "uncalled" in event.contexts:
            continue
        if is_same_path(remove, event) or is_inside_path(remove, event):
            return None if is_synchronized(analysis, remove, event) else event
    return None


RULE = Rule(
    "SS505",
    "file-removed-by-several-ranks",
    "warning",
    "the rank that comes second fails, or removes what another rank has just written",
    "remove it on rank 0 only: `if dist.get_rank() == 0:`",
    find,
)
