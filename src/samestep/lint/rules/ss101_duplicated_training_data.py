"""Every rank trains on the same samples.

Without a DistributedSampler, or something else that divides the data by rank, each rank reads all of it. N ranks then
do the work of one: every sample counts N times, and an epoch takes as long as on one rank. The same holds for a
hand-written sampler or an IterableDataset that does not skip the samples of other ranks, for a WeightedRandomSampler
with the same seed on all ranks, and for a loader that is not passed to `accelerator.prepare` or
`fabric.setup_dataloaders`.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(64.0).reshape(64, 1))
loader = DataLoader(dataset, batch_size=8, shuffle=True)  # SS101
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(64.0).reshape(64, 1))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
```

Source: pytorch/pytorch#23430, PatrickHua/SimSiam#16, yaak-ai/rbyte#106, open-mmlab/mmdetection#1331.
"""

import ast
from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding, Location
from samestep.lint.events import Event, Loop
from samestep.lint.loader_loops import (
    division,
    is_data_parallel,
    is_iterable,
    iteration_events,
    location_of,
    training_loops,
    where_wrapped,
)
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import InstanceValue, LoaderValue, SamplerValue, Value, options_of

_MAX_LINES: Final = 20  # of a call of DataLoader
_REPLACES_SAMPLER: Final = ("use_distributed_sampler", "replace_sampler_ddp", "replace_sampler")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for loaders that give all ranks the same samples."""
    if analysis.uses_samestep:
        return
    if analysis.of("trainer"):
        yield from _in_lightning(analysis)
    elif is_data_parallel(analysis):
        for event, loop, loaders in training_loops(analysis):
            if all(division(analysis, each) == "all" for each in loaders) and not _takes_own_rows(analysis, loop):
                yield _finding(analysis, loaders[0], event)


def _takes_own_rows(analysis: Analysis, loop: Loop) -> bool:
    """Whether each rank trains on other rows of the same batch, as in `model(batch[rank::world_size])`."""
    calls = analysis.inside(loop, "model_call")
    return any(argument.depends_on_rank for call in calls for argument in call.arguments)


def _finding(analysis: Analysis, loader: LoaderValue, event: Event) -> Finding:
    location = location_of(loader, event.location)
    evidence = [*where_wrapped(analysis), f"this loop trains on the loader ({event.location})"]
    sampler = _innermost_sampler(loader.sampler)
    if is_iterable(loader.dataset):
        inner = _faulty_line(analysis, loader) or location
        return RULE.finding(
            inner,
            "the IterableDataset yields the same samples on every rank",
            evidence=[f"the loader reads it ({location})", *evidence],
            related=[location],
            repair="yield every `world_size`-th sample from `rank` on: `islice(samples, rank, None, world_size)`",
        )
    if sampler is not None:
        return RULE.finding(
            location_of(sampler, location),
            f"`{sampler.kind}` gives every rank the same samples",
            evidence=[f"the loader uses it ({location})", *evidence],
            related=[location],
            repair="use `DistributedSampler(dataset)`, or take every `world_size`-th of its indices from `rank` on",
        )
    shuffle = loader.options.get("shuffle")
    is_here = shuffle is not None and shuffle.constant is True and shuffle.location is not None
    if is_here and shuffle is not None and shuffle.location is not None:
        is_here = 0 <= shuffle.location.line - location.line < _MAX_LINES and shuffle.location.file == location.file
    place = location_of(shuffle, location) if is_here else location
    return RULE.finding(place, _summary(analysis), evidence=evidence, repair=_repair(analysis))


def _innermost_sampler(value: Value | None) -> SamplerValue | None:
    """The sampler that chooses the samples: of a BatchSampler the one inside."""
    sampler = next((each for each in options_of(value) if isinstance(each, SamplerValue)), None)
    if sampler is not None and sampler.kind == "BatchSampler":
        return _innermost_sampler(sampler.dataset) or sampler
    return sampler


def _summary(analysis: Analysis) -> str:
    if analysis.of("accelerator"):
        return "the loader is not passed to `accelerator.prepare`, so every rank trains on all samples"
    if analysis.of("fabric"):
        return "the loader is not passed to `fabric.setup_dataloaders`, so every rank trains on all samples"
    return "the loader has no DistributedSampler, so every rank trains on all samples"


def _repair(analysis: Analysis) -> str:
    if analysis.of("accelerator"):
        return "`loader = accelerator.prepare(loader)`"
    return "`loader = fabric.setup_dataloaders(loader)`" if analysis.of("fabric") else RULE.repair


def _faulty_line(analysis: Analysis, loader: LoaderValue) -> Location | None:
    """The line of an IterableDataset that divides the samples by worker only, or the loop that yields them."""
    for dataset in options_of(loader.dataset):
        events = iteration_events(analysis, dataset) or []
        yields = [event for event in events if event.kind == "yield"]
        if not isinstance(dataset, InstanceValue) or dataset.class_value is None:
            continue
        by_worker = _worker_line(analysis, dataset)
        if by_worker is not None:
            return by_worker
        if yields:
            return yields[0].loops[-1].location if yields[0].loops else yields[0].location
    return None


def _worker_line(analysis: Analysis, dataset: InstanceValue) -> Location | None:
    method = dataset.class_value.method("__iter__") if dataset.class_value is not None else None
    if method is None or method.node is None or method.module is None:
        return None
    for node in ast.walk(method.node):
        is_statement = isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.If)
        head = node.test if isinstance(node, ast.If) else node.iter if isinstance(node, ast.For) else node
        if is_statement and any(isinstance(e, ast.Attribute) and e.attr == "num_workers" for e in ast.walk(head)):
            return method.module.file.locate(node, "__iter__")
    return None


def _in_lightning(analysis: Analysis) -> Iterator[Finding]:
    """Lightning adds a DistributedSampler, unless that is switched off or the dataset is iterable."""
    trainers = [event for event in analysis.of("trainer") if analysis.is_lightning]
    for loader in _lightning_loaders(analysis, None):
        if is_iterable(loader.dataset) and division(analysis, loader) == "all":
            yield from (_finding(analysis, loader, event) for event in trainers[:1])
    for event in trainers:
        options = [event.service.options.get(name) for name in _REPLACES_SAMPLER]
        is_off = any(each is not None and each.constant is False for each in options)
        loaders = _lightning_loaders(analysis, event.service) if is_off else ()
        plain = [each for each in loaders if division(analysis, each) == "all" and not is_iterable(each.dataset)]
        if plain:
            yield RULE.finding(
                event.location,
                "`use_distributed_sampler=False` with a loader that has no DistributedSampler",
                evidence=[f"every rank trains on all samples of this loader ({plain[0].location})"],
                related=[location_of(plain[0], event.location)],
                repair="remove `use_distributed_sampler=False`, or give the loader a DistributedSampler",
            )


def _lightning_loaders(analysis: Analysis, trainer: Value | None) -> Iterator[LoaderValue]:
    """Loaders that Lightning trains on, with one Trainer or with any."""
    for event in analysis.of("return"):
        if "hook:train_dataloader" in event.contexts:
            yield from (each for each in options_of(event.value) if isinstance(each, LoaderValue))
    fits = [event for event in analysis.of("fit") if trainer is None or event.trainer is trainer]
    for event in fits:
        values = [event.keywords.get("train_dataloaders"), *event.arguments[1:2]]
        yield from (each for value in values for each in options_of(value) if isinstance(each, LoaderValue))


RULE = Rule(
    "SS101",
    "duplicated-training-data",
    "error",
    "N ranks do the work of one: every sample counts N times, and an epoch takes as long as on one rank",
    "`DataLoader(dataset, batch_size=..., sampler=DistributedSampler(dataset))`, without `shuffle=True`",
    find,
)
