"""All workers of all ranks draw the same random numbers.

A DataLoader seeds Python, NumPy and torch differently in each of its workers and in each epoch. A `worker_init_fn`
that seeds them with a constant, or with the number of the worker only, makes them equal again: on all ranks and in
every epoch, the same augmentation.

Bad:

```python
import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def init_worker(worker_id):
    np.random.seed(42)  # SS113


dist.init_process_group("gloo")
dataset = list(range(64))
loader = DataLoader(
    dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=2, worker_init_fn=init_worker
)
```

Good:

```python
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def init_worker(worker_id):
    np.random.seed((torch.initial_seed() + dist.get_rank()) % 2**32)


dist.init_process_group("gloo")
dataset = list(range(64))
loader = DataLoader(
    dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=2, worker_init_fn=init_worker
)
```

Source: pytorch/pytorch#5059, huggingface/accelerate#236.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import computed_from


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for seeds in `worker_init_fn` that are the same on all ranks."""
    for event in analysis.of("seed"):
        if "worker_init" not in event.contexts or event.value.differs:
            continue
        if event.value.is_known and event.value.constant is not None:
            yield _finding(event, f"all workers of all ranks have the seed {event.value.constant}", True)
        elif _is_number_of_worker(event):
            yield _finding(event, "the workers of all ranks have the same seeds, in every epoch", False)
    yield from _of_dataset(analysis)


def _of_dataset(analysis: Analysis) -> Iterator[Finding]:
    """A generator that a dataset seeds when it is created, and from which it draws for each sample."""
    if analysis.of("samestep") or any("worker_init_fn" in each.loader.options for each in analysis.of("loader")):
        return
    for event in analysis.of("own_draw"):
        seeded = event.owner.location
        if seeded is None or event.owner.differs or seeded.file != event.location.file:
            continue
        if event.location.function.endswith("__getitem__") and seeded.function.endswith("__init__"):
            yield RULE.finding(
                seeded,
                "the dataset of every rank and of every worker draws the same numbers, in this order",
                evidence=[f"each sample draws from it, in the order in which samples are read ({event.location})"],
                related=[event.location],
                repair="make a generator per sample: `numpy.random.default_rng((seed, epoch, index))`",
            )
            return


def _finding(event: Event, summary: str, is_constant: bool) -> Finding:
    return RULE.finding(
        event.location,
        summary,
        evidence=[f"each worker calls this function when it starts ({event.frames[-1]})"] if event.frames else [],
        severity="error" if is_constant else "warning",
    )


def _is_number_of_worker(event: Event) -> bool:
    """Whether a seed is computed from the number of the worker and constants alone."""
    node = event.node
    if not isinstance(node, ast.Call) or not node.args:
        return False
    parts = list(ast.walk(node.args[0]))
    names = [each.id for each in parts if isinstance(each, ast.Name)]
    is_simple = not any(isinstance(each, ast.Call | ast.Attribute | ast.Subscript) for each in parts)
    is_simple &= not any(each.name.endswith("initial_seed") for each in computed_from(event.value))
    return is_simple and bool(names) and all("worker" in name for name in names)


RULE = Rule(
    "SS113",
    "same-worker-noise",
    "error",
    "the augmentation is the same on all ranks and in every epoch",
    "seed with `torch.initial_seed()`, which differs between workers and epochs, and add the rank",
    find,
)
