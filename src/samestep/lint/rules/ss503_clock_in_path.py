"""A folder or file that is named after the clock of each process.

Every rank reads its own clock, so the names differ if the ranks start a moment apart. The parts of a checkpoint are
then scattered over several folders.

Bad:

```python
import os
import time

import torch.distributed as dist

dist.init_process_group("gloo")
folder = f"runs/{time.strftime('%Y-%m-%d-%H-%M-%S')}"  # SS503
os.makedirs(folder, exist_ok=True)
```

Good:

```python
import os
import time

import torch.distributed as dist

dist.init_process_group("gloo")
names = [f"runs/{time.strftime('%Y-%m-%d-%H-%M-%S')}"]
dist.broadcast_object_list(names, src=0)
os.makedirs(names[0], exist_ok=True)
```

Source: TensorAuto/OpenTau#396, Lightning-AI/pytorch-lightning#3071.
"""

from collections.abc import Iterator

from samestep.findings import Finding, Location
from samestep.lint.file_access import is_on_all_ranks
from samestep.lint.library.python_library import IS_OWN
from samestep.lint.rank_decisions import evaluation_taint, sharded_evaluation
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import Value


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for paths that several ranks use and that depend on a clock."""
    seen = set[Location]()
    yield from _named_after_metric(analysis)
    yield from _read_elsewhere(analysis)
    for event in analysis.of("write", "folder"):
        clock = event.path.clock
        if clock is None or clock in seen or not is_on_all_ranks(event):
            continue
        if analysis.is_in_launcher(event):
            continue
        seen.add(clock)
        what = "creates a folder" if event.kind == "folder" else "writes a file"
        yield RULE.finding(
            clock,
            f"every rank {what} that is named after its own clock",
            evidence=[f"the path is used here, on all ranks ({event.location})"],
            related=[event.location],
        )


def _read_elsewhere(analysis: Analysis) -> Iterator[Finding]:
    """Files that one rank writes and all ranks read, in a folder that each process names for itself."""
    for write in analysis.of("write"):
        origin = _own_name(write.path)
        if origin is None or write.rank_guard is None or "uncalled" in write.contexts:
            continue
        reads = (each for each in analysis.of("read") if each.order > write.order and is_on_all_ranks(each))
        read = next((each for each in reads if _own_name(each.path) == origin), None)
        if read is not None:
            yield RULE.finding(
                origin,
                "one rank writes a file that all ranks read, to a path that every process names for itself",
                evidence=[f"one rank writes it ({write.location})", f"all ranks read it ({read.location})"],
                related=[write.location, read.location],
                consequence="the other ranks look for the file under another name, and do not find it",
            )
            return


def _own_name(path: Value) -> Location | None:
    """Where a name is chosen that no other process has: after a clock, or by `tempfile`."""
    if path.clock is not None:
        return path.clock
    own = (taint.location for taint in path.taints if taint.text.endswith(IS_OWN))
    return None if path.depends_on_rank else next(own, None)


def _named_after_metric(analysis: Analysis) -> Iterator[Finding]:
    """Folders that all ranks create and that are named after a metric of the rank's own samples."""
    loops = sharded_evaluation(analysis)
    for event in analysis.of("folder"):
        taint = evaluation_taint(event.path.taints, loops)
        if taint is not None and not event.path.depends_on_rank and is_on_all_ranks(event):
            yield RULE.finding(
                event.location,
                "every rank creates a folder that is named after a number that its samples give",
                evidence=[f"{taint.text} ({taint.location})"],
                related=list(event.frames[-1:]),
                repair="reduce the number over all ranks before it gets into the name",
            )
            return


RULE = Rule(
    "SS503",
    "clock-in-path",
    "error",
    "the files of a run are scattered over folders whose names differ between ranks",
    "let rank 0 choose the name, `names = [name]; dist.broadcast_object_list(names, src=0)`, or use an argument or the "
    "id of the job",
    find,
)
