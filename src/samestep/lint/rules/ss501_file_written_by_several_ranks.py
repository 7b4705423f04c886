"""Several ranks write to the same file.

Every rank runs the whole script. A `torch.save`, a log or an archive that is extracted without a condition on the
rank is written by all ranks at the same time: rows appear twice or are lost, and a checkpoint may be corrupt.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
torch.save(model.module.state_dict(), "model.pt")  # SS501
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
```

Source: pytorch/tutorials#3065, pytorch/vision#8707, open-mmlab/mmpretrain#273.
"""

import re
from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.file_access import (
    GLOBAL_RANK,
    is_on_all_ranks,
    is_same_path,
    is_shared,
    is_synchronized,
    path_text,
)
from samestep.lint.rule import Analysis, Rule, explain

_NODE_PATH: Final = re.compile(r"tmp|temp|cache|local|scratch|node", re.IGNORECASE)


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for files that all ranks write."""
    for event in analysis.of("write"):
        yield from _once_per_node(analysis, event)
        if not is_on_all_ranks(event) or not is_shared(event.path) or event.path.clock is not None:
            continue
        if analysis.is_in_launcher(event) or _is_moved(event) or _is_done_before(analysis, event):
            continue
        yield RULE.finding(
            event.location,
            f"every rank writes `{path_text(event)}`",
            evidence=[f"`{event.how}` has no condition on the rank", *_launch(analysis)],
            severity="warning" if any(word in event.how for word in ("download", "logging.")) else None,
        )


def _once_per_node(analysis: Analysis, event: Event) -> Iterator[Finding]:
    """A write under a condition on the local rank alone: one process of each node does it.

    That is right in a script for one node, and for what the ranks of a node read afterwards.
    """
    guards = [guard for guard in event.guards if guard.depends_on_rank]
    taints = [taint for guard in guards for taint in guard.taints if taint.kind == "rank"]
    is_local = bool(taints) and all(taint.is_local for taint in taints) and guards[-1].kind == "if"
    if is_local and not guards[-1].is_negated and is_shared(event.path) and "uncalled" not in event.contexts:
        yield RULE.finding(
            event.location,
            f"one rank of every node writes `{path_text(event)}`",
            evidence=explain(guards[-1]),
            severity="warning" if _is_for_all_nodes(analysis, event) else "note",
            repair="use the rank among all ranks, `if dist.get_rank() == 0:`, if the nodes share the folder",
        )


def _is_for_all_nodes(analysis: Analysis, event: Event) -> bool:
    """Whether it is a checkpoint that nothing reads, in a script that knows the rank among all ranks as well."""
    file = analysis.file_of(event.location)
    if event.how != "torch.save" or file is None or not GLOBAL_RANK.search(file.text) or analysis.of("spawn"):
        return False
    is_read = any(is_same_path(event, read) for read in analysis.of("read"))
    return not is_read and not _NODE_PATH.search(path_text(event))


def _is_done_before(analysis: Analysis, event: Event) -> bool:
    """Whether one rank has already created the file that all others look for first: `if not path.exists()`."""
    earlier = [each for each in analysis.of("write") if each.node is event.node and each.order < event.order]
    is_waited = any(each.rank_guard is not None and is_synchronized(analysis, each, event) for each in earlier)
    return is_waited and any(
        guard.is_negated or "exists" in guard.text or "is_file" in guard.text for guard in event.guards
    )


def _is_moved(event: Event) -> bool:
    """`os.replace(own, shared)`: each rank writes its own file, and the last one that is complete stays."""
    source = event.call.get("src", 0) if event.call is not None else None
    is_atomic = event.how in ("os.replace", "os.rename")
    return is_atomic and source is not None and (source.differs or source.clock is not None)


def _launch(analysis: Analysis) -> list[str]:
    found = analysis.of("init_group", "accelerator", "fabric", "trainer", "spawn", "wrap")
    return [f"the script runs on several ranks ({found[0].location})"] if found else []


RULE = Rule(
    "SS501",
    "file-written-by-several-ranks",
    "error",
    "the writes interleave: rows appear twice or are lost, and a checkpoint may be corrupt",
    "write on rank 0 only: `if dist.get_rank() == 0:`",
    find,
)
