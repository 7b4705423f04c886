"""All ranks draw the same random numbers.

`torch.manual_seed(42)` on every rank gives all ranks the same stream. Noise that the training step draws for its
samples is then the same on every rank: a step of N ranks sees as many different draws as one rank.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(42)  # SS109
dataset = torch.arange(64.0).reshape(64, 1)
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    noise = torch.randn_like(x)
    optimizer.zero_grad()
    (model(x + noise) - noise).square().mean().backward()
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(42)
dataset = torch.arange(64.0).reshape(64, 1)
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(42 + dist.get_rank())
for x in loader:
    noise = torch.randn_like(x)
    optimizer.zero_grad()
    (model(x + noise) - noise).square().mean().backward()
    optimizer.step()
```

Source: huggingface/accelerate#236, Robbyant/lingbot-vla-v2#41.
"""

from collections.abc import Iterator

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.loader_loops import is_data_parallel, seeds_of, training_loops
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ContainerValue, Value


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for noise of the training step whose seed is the same on all ranks."""
    if analysis.of("samestep") or not is_data_parallel(analysis):
        return
    for event in analysis.of("draw"):
        if not _is_noise_of_step(analysis, event) or not _has_rows(event):
            continue
        if event.generator is not None and event.generator.constant is not None:
            yield from _of_generator(analysis, event)
            continue
        library = "numpy" if event.name.startswith("numpy") else "torch"
        seeds = seeds_of(analysis, library, None if analysis.of("trainer") else event)
        last = seeds[-1:] if seeds and seeds[-1].which.endswith("set_rng_state") else seeds
        if seeds and not any(each.value.differs for each in last) and seeds[-1].rank_guard is None:
            yield _finding(seeds[-1], event)
            return


def _finding(seed: Event, draw: Event) -> Finding:
    return RULE.finding(
        seed.location,
        "this seed is the same on all ranks, and the training step draws its noise from it",
        evidence=[f"`{draw.name}` draws the noise of each sample ({draw.location})"],
        related=[draw.location],
    )


def _of_generator(analysis: Analysis, event: Event) -> Iterator[Finding]:
    """A separate generator, whose seed is the same on all ranks."""
    seeds = [each for each in analysis.of("seed_generator") if each.owner is event.generator]
    loops = {id(loop) for _, loop, _ in training_loops(analysis)}
    if len(seeds) != 1 or event.generator.differs or seeds[0].order > event.order:
        return
    is_for_step = any(id(loop) in loops for loop in seeds[0].loops) or "hook:training_step" in seeds[0].contexts
    if not is_for_step and seeds[0].rank_guard is None and seeds[0].value.clock is None:
        yield _finding(seeds[0], event)


def _is_noise_of_step(analysis: Analysis, event: Event) -> bool:
    if event.rank_guard is not None or not event.is_grad or "dataset" in event.contexts:
        return False
    if "hook:training_step" in event.contexts:
        return True
    loops = {id(loop) for _, loop, _ in training_loops(analysis)}
    return any(id(loop) in loops for loop in event.loops)


def _has_rows(event: Event) -> bool:
    """Whether there is a draw for each sample: the shape comes from the batch. Ranks may have to agree on a number."""
    if event.name.endswith("_like"):
        return True
    return any(_is_from_batch(value) for value in event.arguments)


def _is_from_batch(value: Value) -> bool:
    values = [value, *value.values()] if isinstance(value, ContainerValue) else [value]
    sources = [source for each in values for source in (each, each.size_of) if source is not None]
    return any(taint.kind == "data" for each in sources for taint in each.taints)


RULE = Rule(
    "SS109",
    "same-noise",
    "error",
    "the noise of the ranks is not independent: a step of N ranks sees as many different draws as one rank",
    "add the rank to the seed after the model is built: `torch.manual_seed(seed + rank)`",
    find,
)
