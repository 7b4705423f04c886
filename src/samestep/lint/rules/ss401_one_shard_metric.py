"""The metric of one rank's samples is reported as everyone's.

With a DistributedSampler, or a loader that Accelerate or Fabric prepared, each rank evaluates its own part of the
data. What rank 0 prints without a reduction covers its part only, and the part depends on the number of ranks.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def evaluate(model, dataset):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)
    correct, total = torch.tensor(0), torch.tensor(0)
    for x, y in DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False, drop_last=True)):
        correct += (model(x).argmax(1) == y).sum()
        total += len(y)
    accuracy = correct / total  # SS401
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.3f}")
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def evaluate(model, dataset):
    dist.init_process_group("nccl")
    model = DistributedDataParallel(model)
    correct, total = torch.tensor(0), torch.tensor(0)
    for x, y in DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False, drop_last=True)):
        correct += (model(x).argmax(1) == y).sum()
        total += len(y)
    dist.all_reduce(correct)
    dist.all_reduce(total)
    accuracy = correct / total
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.3f}")
```

Source: Lightning-AI/pytorch-lightning#2398, huggingface/accelerate#226.
"""

import ast
from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding, Location
from samestep.lint.events import Event
from samestep.lint.rank_decisions import evaluation_taint, metric_origin, rank_guard, sharded_evaluation
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import (
    OWN_BATCH,
    ContainerValue,
    InstanceValue,
    ServiceValue,
    Taint,
    TensorValue,
    Value,
    options_of,
)

_MAX_STEPS: Final = 20
_ENDS: Final = frozenset(
    f"hook:{name}" for name in ("on_validation_epoch_end", "on_test_epoch_end", "on_validation_end", "on_test_end")
)

_LOGGING: Final = frozenset({
    "info", "warning", "debug", "log", "log_metrics", "add_scalar", "add_scalars", "write", "print", "dump",
    "log_metric", "rank_zero_info", "writerow", "report",
})  # fmt: skip


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for output on one rank of values that come from its own evaluation samples."""
    loops = sharded_evaluation(analysis)
    if not (loops or analysis.is_lightning) or analysis.uses_samestep:
        return
    texts = {id(event.node): event for event in analysis.of("text")}
    evaluating = {
        (each.location.file, each.location.function) for each in analysis.of("loop") if each.loop.loader is not None
    }
    reported = set[tuple[str, int]]()
    for event in analysis.of("print", "call"):
        if not _is_output(event) or not _is_on_one_rank(event):
            continue
        for value in _values(event, texts):
            origin = metric_origin(value) or _quotient(value)
            taint = evaluation_taint(value.taints, loops) or _batch_taint(event, value)
            if origin is None or taint is None:
                continue
            is_mixed = _is_reduced(origin.parts[0]) if origin.operation == "/" else False
            location = _location(origin, event, evaluating) if not is_mixed else origin.location or event.location
            if (location.file, location.line) in reported:
                continue
            reported.add((location.file, location.line))
            yield RULE.finding(
                location,
                "a sum over all ranks is divided by a number of one rank"
                if is_mixed
                else "the metric covers the samples of one rank, and is reported for all",
                evidence=[f"{taint.text} ({taint.location})", f"one rank reports it ({event.location})"],
                related=[event.location],
            )


def _batch_taint(event: Event, value: Value) -> Taint | None:
    """Why what Lightning computes at the end of an evaluation covers this rank's batches only."""
    if not _ENDS.intersection(event.contexts):
        return None
    return next((each for each in value.taints if each.text == OWN_BATCH), None)


def _is_reduced(value: Value) -> bool:
    return any(isinstance(each, TensorValue) and each.is_reduced for each in options_of(value))


def _quotient(value: Value) -> TensorValue | None:
    """The quotient of a sum over the samples of a rank and a number that is the same on all ranks: `/ len(dataset)`."""
    current = next((each for each in options_of(value) if isinstance(each, TensorValue)), None)
    for _ in range(_MAX_STEPS):
        if current is None or not current.operation or len(current.parts) < 2:
            return None
        if current.operation == "/":
            return None if _is_size(current.parts[0]) or current.parts[1].clock is not None else current
        parts = [option for each in current.parts for option in options_of(each)]
        current = next((each for each in parts if isinstance(each, TensorValue) and each.operation), None)
    return None


def _is_size(value: Value) -> bool:
    """Whether it is a number of samples: a quotient of it is a rate."""
    for each in options_of(value):
        if isinstance(each, TensorValue) and each.operation in ("+", "-"):
            return all(_is_size(part) for part in each.parts)
        if isinstance(each, TensorValue) and each.name not in ("Tensor.size", "Tensor.numel", "len"):
            return False
    return True


def _location(origin: TensorValue, event: Event, evaluating: set[tuple[str, str]]) -> Location:
    """The quotient, if it is where the samples are read; a mean that a meter computes is reported where it is used."""
    found = origin.location
    if found is None or ((found.file, found.function) not in evaluating and found.function != event.location.function):
        return event.location
    return found


def _is_output(event: Event) -> bool:
    return event.kind == "print" or str(event.name).rpartition(".")[2] in _LOGGING


def _is_on_one_rank(event: Event) -> bool:
    if rank_guard(event) is not None:
        return True
    owner = event.data.get("owner")
    if isinstance(owner, InstanceValue) and owner.class_value is not None and event.name == "print":
        return owner.class_value.derives_from("LightningModule")
    return isinstance(owner, ServiceValue) and owner.kind in ("accelerator", "fabric")


def _values(event: Event, texts: dict[int, Event]) -> Iterator[Value]:
    """What is written, also inside of f-strings and dictionaries."""
    inside = [texts[id(node)] for node in ast.walk(event.node) if id(node) in texts]
    passed: list[Value] = [*event.arguments, *(part for text in inside for part in text.parts)]
    for value in passed:
        yield value
        if isinstance(value, ContainerValue):
            yield from value.values()


RULE = Rule(
    "SS401",
    "one-shard-metric",
    "error",
    "the reported metric covers a part of the data, and which part depends on the number of ranks",
    "`dist.all_reduce` the sum and the count before the division; `accelerator.gather_for_metrics`; torchmetrics",
    find,
)
