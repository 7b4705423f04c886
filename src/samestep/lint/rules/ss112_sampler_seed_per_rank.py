"""The ranks take their parts of different permutations.

A DistributedSampler shuffles all indices with its seed and then takes every N-th of them. If the seed differs between
ranks, the parts overlap: some samples come several times in an epoch, and others never. The same holds for indices
that are shuffled by hand with a seed of the rank, or without a seed, and then divided: `random.shuffle(names)` draws
other numbers in every process.

Bad:

```python
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
dataset = list(range(64))
sampler = DistributedSampler(dataset, seed=7 + dist.get_rank())  # SS112
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
```

Good:

```python
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
dataset = list(range(64))
sampler = DistributedSampler(dataset, seed=7)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
```

Source: NVlabs/LongLive#71, TensorAuto/OpenTau#501.
"""

from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding, Location
from samestep.lint.events import Event
from samestep.lint.library.partitions import IS_PART
from samestep.lint.loader_loops import library_of, seeds_of
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ContainerValue, InstanceValue, Taint, Value, options_of

_ORDERS: Final = ("randperm", "permutation", "shuffle", "sample")
_GLOBAL: Final = ("random", "numpy.random", "torch")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for permutations that differ between ranks and are then divided among them."""
    for event in analysis.of("sampler"):
        if event.sampler.is_distributed:
            yield from _of_seed(event)
            for source in _orders_of(event.sampler.dataset):
                yield from _of_order(analysis, event, source)
    for event in analysis.of("shard"):
        for source in options_of(event.source):
            yield from _of_order(analysis, event, source)


def _of_seed(event: Event) -> Iterator[Finding]:
    seed, shuffle = event.sampler.options.get("seed"), event.sampler.options.get("shuffle")
    if seed is None or (shuffle is not None and shuffle.constant is False):
        return
    if seed.differs:
        yield _finding(event.location, _reasons(seed.taints))
    elif seed.clock is not None:
        yield _finding(event.location, [f"each process reads its own clock for the seed ({seed.clock})"])


def _orders_of(dataset: Value | None) -> Iterator[Value]:
    """Lists that a dataset of the project has in its attributes: an index is a position in them."""
    for option in options_of(dataset):
        if isinstance(option, InstanceValue) and option.class_value is not None:
            yield from (each for each in option.attributes.values() if isinstance(each, ContainerValue))


def _of_order(analysis: Analysis, event: Event, source: Value) -> Iterator[Finding]:
    """A part of what was shuffled, with a generator of the rank or with the global one."""
    package, _, last = source.name.rpartition(".")
    is_divided = any(IS_PART in taint.text for taint in source.taints)  # the ranks shuffle their own parts
    if last not in _ORDERS or is_divided or "uncalled" in event.contexts:
        return
    where = f"the parts are taken here ({event.location})"
    location = (source.order_from if isinstance(source, ContainerValue) else None) or event.location
    if source.differs:
        yield _finding(location, [*_reasons(source.taints), where])
    elif source.clock is not None:
        yield _finding(location, [f"each process reads its own clock for the seed ({source.clock})", where])
    elif package in _GLOBAL:
        yield from _of_global_generator(analysis, event, source, location)


def _of_global_generator(analysis: Analysis, event: Event, source: Value, location: Location) -> Iterator[Finding]:
    draws = [each for each in analysis.of("draw") if each.name == source.name and each.order < event.order]
    library = library_of(source.name)
    if not draws or draws[-1].rank_guard is not None or _is_in_worker(analysis, event):
        return
    if draws[-1].generator is not None and draws[-1].generator.constant is not None:
        return
    if draws[-1].location.file == event.location.file:
        location = draws[-1].location
    seeds = seeds_of(analysis, library, draws[-1])
    where = f"the parts are taken here ({event.location})"
    if seeds and seeds[-1].value.differs:
        reasons = _reasons(seeds[-1].value.taints)
        yield _finding(location, [*reasons, f"the seed depends on it ({seeds[-1].location})", where])
    elif not seeds and library != "torch" and not _may_be_seeded(analysis, draws[-1]):
        yield _finding(location, [f"nothing seeds {library}, so each process draws other numbers", where])


def _may_be_seeded(analysis: Analysis, draw: Event) -> bool:
    """Whether a function of a package may seed all generators, by its name."""
    return any("seed" in each.name.lower() and each.order < draw.order for each in analysis.of("call"))


def _is_in_worker(analysis: Analysis, event: Event) -> bool:
    """Whether workers of a loader run this: torch seeds their generators from its own, which ranks may share."""
    loaders = [each.loader for each in analysis.of("iterate") if each.start <= event.order < each.order]
    counts = [each.options.get("num_workers") for each in loaders]
    return any(each is not None and each.constant != 0 for each in counts)


def _reasons(taints: tuple[Taint, ...]) -> list[str]:
    return [f"{taint.text} ({taint.location})" for taint in taints[:2]]


def _finding(location: Location, evidence: list[str]) -> Finding:
    return RULE.finding(location, "the parts of the ranks come from different permutations", evidence=evidence)


RULE = Rule(
    "SS112",
    "sampler-seed-per-rank",
    "error",
    "in an epoch, some samples come several times and others never",
    "use the same seed on all ranks; the sampler gives each rank its own part",
    find,
)
