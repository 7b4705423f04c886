"""Samples that one rank trains on and another one evaluates.

A random split must be the same on all ranks. If it is drawn from a generator whose seed depends on the rank, or from
Python's or NumPy's generator without a seed, every rank has another split, and the model has trained on samples that
the metric counts.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, random_split

dist.init_process_group("gloo")
torch.manual_seed(7 + dist.get_rank())
dataset = list(range(64))
train_set, val_set = random_split(dataset, [48, 16])  # SS107
loader = DataLoader(train_set, batch_size=8, sampler=DistributedSampler(train_set))
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, random_split

dist.init_process_group("gloo")
torch.manual_seed(7 + dist.get_rank())
dataset = list(range(64))
train_set, val_set = random_split(dataset, [48, 16], generator=torch.Generator().manual_seed(7))
loader = DataLoader(train_set, batch_size=8, sampler=DistributedSampler(train_set))
```

Source: TensorAuto/OpenTau#498, Lightning-AI/pytorch-lightning#7728, Lightning-AI/pytorch-lightning#18638.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.loader_loops import library_of, seeds_of
from samestep.lint.rule import Analysis, Rule


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for splits that differ between ranks."""
    for event in analysis.of("split"):
        if event.rank_guard is not None or "uncalled" in event.contexts:
            continue
        generator = event.generator
        is_drawn = generator is not None and generator.constant is not None and "random_split" not in event.name
        if generator is not None and generator.differs:
            reasons = [f"{taint.text} ({taint.location})" for taint in generator.taints[:2]]
            yield _finding(event, [*reasons, "the generator of the split depends on it"])
        elif event.name.startswith("Generator."):
            continue  # seeded for itself
        elif generator is None or generator.constant is None or (is_drawn and "train_test_split" not in event.name):
            yield from _of_global_generator(analysis, event)


def _of_global_generator(analysis: Analysis, event: Event) -> Iterator[Finding]:
    library = library_of(event.name)
    seeds = seeds_of(analysis, library, event)
    if seeds and seeds[-1].value.differs:
        taints = seeds[-1].value.taints
        reasons = [f"{taint.text} ({taint.location})" for taint in taints[:2]]
        where = f"the seed of the split depends on it ({seeds[-1].location})"
        yield _finding(event, [*reasons, where], seeds[-1], _draw_of(analysis, event))
    elif not seeds and library != "torch":
        why = f"nothing seeds {library}, so each process draws other numbers"
        yield _finding(event, [why], draw=_draw_of(analysis, event))


def _draw_of(analysis: Analysis, event: Event) -> Event | None:
    """Where the indices of a part were drawn; None if the split draws them itself."""
    draws = [each for each in analysis.of("draw") if each.name == event.name and each.order < event.order]
    return draws[-1] if draws and draws[-1].location.file == event.location.file else None


def _finding(event: Event, evidence: list[str], seed: Event | None = None, draw: Event | None = None) -> Finding:
    if draw is not None:
        evidence = [*evidence, f"the parts are taken here ({event.location})"]
    return RULE.finding(
        draw.location if draw is not None else event.location,
        "every rank draws its own split into training and evaluation data",
        evidence=evidence,
        related=[seed.location] if seed is not None else [],
    )


RULE = Rule(
    "SS107",
    "leaked-evaluation-data",
    "error",
    "the model has trained on samples that the metric counts, so the metric is too good",
    "use the same seed on all ranks: `random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))`",
    find,
)
