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

import ast
from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.file_access import is_same_path, is_synchronized, path_node, path_text
from samestep.lint.rule import Analysis, Rule, explain


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for reads of what one rank has just written."""
    if analysis.of("trainer"):
        return
    for event in analysis.of("write"):
        guard = event.rank_guard
        if guard is None or "uncalled" in event.contexts:
            continue
        read = _next_read(analysis, event) or _read_in_next_iteration(analysis, event)
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


def _read_in_next_iteration(analysis: Analysis, write: Event) -> Event | None:
    """A read of the same file, or of its pattern, earlier in the loop of a write after which no rank waits."""
    loop = write.loops[-1] if write.loops else None
    if loop is None or any(loop in each.loops for each in analysis.of("collective") if each.order > write.order):
        return None
    reads = [each for each in analysis.of("read") if loop in each.loops and each.order < write.order]
    waits = [each.order for each in analysis.of("collective", "wrap", "backward") if loop in each.loops]
    for event in reads:
        if event.rank_guard is None and min(waits, default=write.order) > event.order and _may_match(event, write):
            return event
    return None


def _may_match(read: Event, write: Event) -> bool:
    """Whether a pattern such as "stage-*.pt" begins like the path of a write."""
    pattern, node = read.path.constant, path_node(write)
    start = pattern.partition("*")[0] if isinstance(pattern, str) and "*" in pattern else ""
    text = node.values[0] if isinstance(node, ast.JoinedStr) else node
    return is_same_path(read, write) or bool(start and isinstance(text, ast.Constant) and str(text.value) == start)


RULE = Rule(
    "SS502",
    "unsynchronized-read",
    "error",
    "the rank finds no file, half of it or an old one, depending on which rank is faster",
    "call `dist.barrier()` between the write and the read, on all ranks",
    find,
)
