"""Something that all ranks use is changed on some ranks only.

Code under `if rank == 0:`, in a method with `@rank_zero_only` or in Lightning's `prepare_data` runs on one rank. If
it changes the dataset, its resolution or a vocabulary, the other ranks keep the old state, or have none at all.

Bad:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self):
        self.resolution = 64

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(3, self.resolution, self.resolution)


dist.init_process_group("gloo")
images = Images()
if dist.get_rank() == 0:
    images.resolution = 128  # SS110
loader = DataLoader(images, batch_size=8, sampler=DistributedSampler(images))
```

Good:

```python
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self):
        self.resolution = 64

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(3, self.resolution, self.resolution)


dist.init_process_group("gloo")
images = Images()
images.resolution = 128
if dist.get_rank() == 0:
    print("resolution", images.resolution)
loader = DataLoader(images, batch_size=8, sampler=DistributedSampler(images))
```

Source: Lightning-AI/pytorch-lightning#2299, Lightning-AI/pytorch-lightning#11220.
"""

import ast
from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding, Location
from samestep.lint.events import Event, Guard
from samestep.lint.rank_decisions import rank_guard
from samestep.lint.rule import Analysis, Rule, call_in_guard, explain
from samestep.lint.values import ClassValue, InstanceValue, MethodValue, Value, options_of

_KINDS: Final = ("Dataset", "IterableDataset", "LightningDataModule", "LightningModule", "Sampler", "nn.Module")
_READERS: Final = (
    "__getitem__", "__iter__", "__len__", "forward", "training_step", "validation_step", "test_step", "setup",
    "train_dataloader", "val_dataloader", "test_dataloader", "configure_optimizers", "predict_dataloader",
)  # fmt: skip
_SHARED: Final = ("datamodule", "train_dataloader", "train_dataloaders", "dataset")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for changes of shared state under a condition on the rank."""
    for event in analysis.of("assign_attribute"):
        guard = rank_guard(event)
        if guard is None or "uncalled" in event.contexts or not _is_rank_only(guard):
            continue
        for owner in options_of(event.owner):
            if _is_shared_attribute(owner, event) or _root(owner) in _SHARED:
                yield _finding(event, guard, event.name)
                break
    for event in analysis.of("call"):
        guard = rank_guard(event)
        is_shared = guard is not None and event.owner is not None and _root(event.owner) in _SHARED
        if guard is not None and is_shared and any(_changes(each, event.name) for each in _fitted(analysis)):
            yield _finding(event, guard, event.name)


def _is_rank_only(guard: Guard) -> bool:
    """Whether the other ranks do not do the same in another branch, as far as the condition says."""
    node = guard.node
    return not (isinstance(node, ast.If) and node.orelse) and guard.kind in ("if", "decorator")


def _finding(event: Event, guard: Guard, name: str) -> Finding:
    is_prepare = guard.label == "prepare_data"
    location: Location = event.location if is_prepare else call_in_guard(event, guard)
    if guard.kind == "decorator" and not is_prepare:
        location = guard.location
    return RULE.finding(
        location,
        f"`{name}` is {'set' if is_prepare else 'changed'} on one rank only, and all ranks use it",
        evidence=explain(guard),
        related=[event.location] if location != event.location else [],
        repair="set it in `setup`, which Lightning calls on every rank" if is_prepare else "",
    )


def _is_shared_attribute(owner: Value, event: Event) -> bool:
    if not isinstance(owner, InstanceValue) or owner.class_value is None:
        return False
    if not owner.class_value.derives_from(*_KINDS) or event.location.function == "__init__":
        return False
    return _reads(owner.class_value, event.name, event.location.function)


def _reads(class_value: ClassValue, attribute: str, writer: str) -> bool:
    """Whether a method that all ranks call reads an attribute, itself or through other methods, before it sets it."""
    reached, waiting = set[str](), [name for name in _READERS if class_value.method(name) is not None]
    while waiting:
        name = waiting.pop()
        method = class_value.method(name)
        if name in reached or method is None or method.node is None or name == writer:
            continue
        reached.add(name)
        uses = [each for each in ast.walk(method.node) if isinstance(each, ast.Attribute) and _is_self(each.value)]
        if any(each.attr == attribute and isinstance(each.ctx, ast.Store) for each in uses):
            return False
        if any(each.attr == attribute for each in uses):
            return True
        waiting += [each.attr for each in uses]
    return False


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _root(value: Value) -> str:
    """`datamodule` of `trainer.datamodule.x`."""
    found = ""
    while isinstance(value, MethodValue):
        found = value.attribute if value.attribute in _SHARED else found
        if value.owner is None:
            break
        value = value.owner
    return found


def _fitted(analysis: Analysis) -> Iterator[ClassValue]:
    """Classes of what is passed to `trainer.fit`."""
    for event in analysis.of("fit"):
        for value in (*event.arguments, *event.keywords.values()):
            for each in options_of(value):
                if isinstance(each, InstanceValue) and each.class_value is not None:
                    yield each.class_value


def _changes(class_value: ClassValue, name: str) -> bool:
    method = class_value.method(name)
    if method is None or method.node is None:
        return False
    return any(
        isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and _is_self(each.value)
        for each in ast.walk(method.node)
    )


RULE = Rule(
    "SS110",
    "state-changed-on-some-ranks",
    "error",
    "the ranks work with different state, or fail where it is missing",
    "change the state on every rank, and print on rank 0 only",
    find,
)
