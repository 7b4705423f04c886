"""The ranks take their parts of different permutations.

A DistributedSampler shuffles all indices with its seed and then takes every N-th of them. If the seed differs between
ranks, the parts overlap: some samples come several times in an epoch, and others never. The same holds for indices
that are shuffled by hand with a seed of the rank and then divided.

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

from samestep.findings import Finding
from samestep.lint.events import Event
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import TensorValue, Value

_ORDERS = ("randperm", "permutation", "shuffle", "sample")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for permutations that differ between ranks and are then divided among them."""
    for event in analysis.of("sampler"):
        seed, shuffle = event.sampler.options.get("seed"), event.sampler.options.get("shuffle")
        is_shuffled = shuffle is None or shuffle.constant is not False
        if event.sampler.is_distributed and seed is not None and is_shuffled:
            if seed.differs:
                yield _finding(event, [f"{taint.text} ({taint.location})" for taint in seed.taints[:2]])
            elif seed.clock is not None:
                yield _finding(event, [f"each process reads its own clock for the seed ({seed.clock})"])
    for event in analysis.of("shard"):
        if event.how == "stride" and _is_own_order(event.source):
            reasons = [f"{taint.text} ({taint.location})" for taint in event.source.taints[:2]]
            yield _finding(event, ["the indices are shuffled differently on each rank", *reasons])


def _is_own_order(source: Value) -> bool:
    is_order = source.name.rpartition(".")[2] in _ORDERS
    return isinstance(source, TensorValue) and is_order and source.depends_on_rank


def _finding(event: Event, evidence: list[str]) -> Finding:
    return RULE.finding(event.location, "the parts of the ranks come from different permutations", evidence=evidence)


RULE = Rule(
    "SS112",
    "sampler-seed-per-rank",
    "error",
    "in an epoch, some samples come several times and others never",
    "use the same seed on all ranks; the sampler gives each rank its own part",
    find,
)
