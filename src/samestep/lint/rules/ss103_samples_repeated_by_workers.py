"""Every worker of a loader yields the same samples of an IterableDataset.

A DataLoader copies an IterableDataset to each of its workers. If `__iter__` does not look at `get_worker_info()`,
each worker yields everything, and with `num_workers=4` every sample comes four times.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Numbers(IterableDataset):
    def __iter__(self):
        for i in range(dist.get_rank(), 64, dist.get_world_size()):  # SS103
            yield torch.tensor([float(i)])


dist.init_process_group("gloo")
loader = DataLoader(Numbers(), batch_size=8, num_workers=2)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for i in range(dist.get_rank() * workers + worker, 64, dist.get_world_size() * workers):
            yield torch.tensor([float(i)])


dist.init_process_group("gloo")
loader = DataLoader(Numbers(), batch_size=8, num_workers=2)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
```

Source: huggingface/datasets#5360, webdataset/webdataset#138.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.loader_loops import is_iterable, iteration_events, location_of
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import LoaderValue, TensorValue, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for iterable datasets that every worker reads as a whole."""
    for event in analysis.of("loader"):
        loader: LoaderValue = event.loader
        workers, init = loader.options.get("num_workers"), loader.options.get("worker_init_fn")
        if workers is None or not isinstance(workers.constant, int) or workers.constant < 2:
            continue
        if not is_iterable(loader.dataset) or (init is not None and init.constant is not None):
            continue
        for dataset in options_of(loader.dataset):
            events = iteration_events(analysis, dataset) or []
            yields = [each for each in events if each.kind == "yield"]
            if yields and not _looks_at_worker(events) and not _is_random(yields):
                line = yields[0].loops[-1].location if yields[0].loops else yields[0].location
                yield RULE.finding(
                    line,
                    f"each of the {workers.constant} workers of the loader yields all samples of this loop",
                    evidence=[f"the loader starts {workers.constant} workers ({event.location})"],
                    related=[location_of(loader, event.location)],
                )


def _looks_at_worker(events: list[Event]) -> bool:
    return any(event.kind == "call" and "worker" in (event.name or "") for event in events)


def _is_random(yields: list[Event]) -> bool:
    """Whether samples are drawn: workers draw different ones."""
    return any(isinstance(each.value, TensorValue) and each.value.is_noise for each in yields)


RULE = Rule(
    "SS103",
    "samples-repeated-by-workers",
    "error",
    "every sample counts as often as there are workers, and an epoch takes as many times longer",
    "divide by worker too: `info = get_worker_info()`, start at `rank * info.num_workers + info.id`, and step by "
    "`world_size * info.num_workers`",
    find,
)
