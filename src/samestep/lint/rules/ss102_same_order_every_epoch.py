"""Every epoch has the same order.

A DistributedSampler shuffles with its seed and its epoch. If nothing calls `set_epoch`, every epoch replays the same
batches in the same order, on every rank. The same happens if `set_epoch` changes an attribute of a dataset whose
workers are persistent: they keep the copy of the first epoch.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.arange(64.0).reshape(64, 1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):  # SS102
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
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
```

Source: pytorch/pytorch#31771, lucidrains/DALLE-pytorch#230, huggingface/datasets#6673, starVLA/starVLA#470.
"""

import ast
from collections.abc import Iterator

from samestep.findings import Edit, Finding, Location
from samestep.lint.events import Event, Loop
from samestep.lint.fixes import insert_lines
from samestep.lint.loader_loops import is_shuffled, location_of, training_loops
from samestep.lint.module_trees import site
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import InstanceValue, LoaderValue, SamplerValue, Value, options_of


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for epochs over a sampler, or over persistent workers, that do not learn the number of the epoch."""
    if analysis.of("trainer", "samestep"):
        return
    for event, loop, loaders in training_loops(analysis):
        epochs = [each for each in event.loops if each is not loop]
        if not epochs or len(loaders) != 1 or loaders[0].is_prepared or event.kind == "next":
            continue
        yield from _of_sampler(analysis, loaders[0], epochs)
        yield from _of_workers(analysis, loaders[0], epochs)


def _of_sampler(analysis: Analysis, loader: LoaderValue, epochs: list[Loop]) -> Iterator[Finding]:
    samplers = [each for each in options_of(loader.sampler) if isinstance(each, SamplerValue)]
    name = "sampler" if loader.options.get("batch_sampler") is None else "batch_sampler"
    while samplers and samplers[0].kind == "BatchSampler":
        name = f"{name}.sampler"
        samplers = [each for each in options_of(samplers[0].dataset) if isinstance(each, SamplerValue)]
    if len(samplers) != 1 or not _needs_epoch(samplers[0]):
        return
    sampler = samplers[0]
    if _is_created_in(analysis, sampler, epochs) or _is_set(analysis, sampler, loader, epochs):
        return
    other = _set_elsewhere(analysis, epochs[-1])
    yield RULE.finding(
        other or epochs[-1].location,
        f"`{sampler.kind}.set_epoch` is not called in the loop over epochs"
        if other is None
        else "`set_epoch` is called for another sampler than that of the training loop",
        evidence=[f"the sampler shuffles with its seed and its epoch ({sampler.location})"],
        related=[location_of(sampler, epochs[-1].location)],
        repair=f"call `loader.{name}.set_epoch(epoch)` at the beginning of each epoch",
        edits=_edits(analysis, sampler, loader, epochs[-1], name),
    )


def _edits(analysis: Analysis, sampler: SamplerValue, loader: LoaderValue, epochs: Loop, name: str) -> tuple[Edit, ...]:
    """Set the epoch in the first line of the loop over epochs, by a name of the loader that is in use there."""
    file, node = analysis.file_of(epochs.location), epochs.node
    if file is None or not isinstance(node, ast.For) or not isinstance(node.target, ast.Name) or node.target.id == "_":
        return ()
    text = _text_of(loader, epochs, node)
    if not text:
        return ()
    call = f"{text}.{name}.set_epoch({node.target.id})"
    is_sometimes = any(_is_conditional(analysis, each) for each in (sampler, loader))
    if is_sometimes or _reads_others(analysis, loader, epochs):
        return insert_lines(file, node.body[0], [f'if hasattr({text}.{name}, "set_epoch"):', f"    {call}"])
    return insert_lines(file, node.body[0], [call])


def _text_of(loader: LoaderValue, epochs: Loop, node: ast.For) -> str:
    """The name or attribute that is the loader in the body of a loop; empty if the loop assigns it, or has none."""
    inside = [each for statement in node.body for each in ast.walk(statement)]
    names = dict.fromkeys(each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load))
    assigned = {ast.unparse(each) for each in inside if isinstance(getattr(each, "ctx", None), ast.Store)}
    for name in names:
        value = epochs.scope.get(name) if epochs.scope is not None and name not in assigned else None
        if value is loader:
            return name
        attributes = value.attributes if isinstance(value, InstanceValue) else {}
        found = next((f"{name}.{each}" for each, item in attributes.items() if item is loader), "")
        if found and found not in assigned and found.replace(".", "").replace("_", "").isalnum():
            return found
    return ""


def _is_conditional(analysis: Analysis, value: SamplerValue | LoaderValue) -> bool:
    """Whether a value is created under a condition, such as `if distributed`, or after a return; True if not known."""
    event = next((each for each in analysis.of("sampler", "loader") if value in each.data.values()), None)
    file = analysis.file_of(event.location) if event is not None else None
    if event is None or file is None:
        return True
    node: ast.AST | None = event.node
    while (node := file.parents.get(node)) is not None:
        if isinstance(node, ast.If | ast.IfExp | ast.Try | ast.Match):
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return any(isinstance(each, ast.Return) and each.lineno < event.location.line for each in ast.walk(node))
    return False


def _reads_others(analysis: Analysis, loader: LoaderValue, epochs: Loop) -> bool:
    """Whether the function with the loop over epochs is called with other loaders too."""
    return any(
        each is not loader and any(loop.node is epochs.node and loop is not epochs for loop in event.loops)
        for event, each, _ in analysis.loader_loops
    )


def _needs_epoch(sampler: SamplerValue) -> bool:
    instance = sampler.options.get("instance")
    if isinstance(instance, InstanceValue) and instance.class_value is not None:
        shuffle = instance.attributes.get("shuffle") or instance.arguments.get("shuffle")
        if instance.class_value.derives_from("DistributedSampler"):
            return shuffle is None or shuffle.constant is True
        if shuffle is not None and shuffle.constant is False:
            return False
        return instance.class_value.method("set_epoch") is not None
    return sampler.is_distributed and is_shuffled(sampler)


def _is_created_in(analysis: Analysis, sampler: SamplerValue, epochs: list[Loop]) -> bool:
    """Whether each epoch has a new sampler, or a sampler of the project whose creation is not known."""
    created = [event for event in analysis.of("sampler") if event.sampler is sampler]
    return any(loop in event.loops for event in created for loop in epochs)


def _is_set(analysis: Analysis, sampler: SamplerValue, loader: LoaderValue, epochs: list[Loop]) -> bool:
    for event in analysis.of("set_epoch"):
        targets = options_of(event.target)
        is_own = any(each is sampler or each is loader or _is_unknown(each) for each in targets)
        is_constant = event.epoch is not None and event.epoch.is_known
        is_inside = any(loop in epochs for loop in event.loops)
        if is_own and is_inside and not is_constant:
            return True
    return False


def _set_elsewhere(analysis: Analysis, epochs: Loop) -> Location | None:
    """The line of the loop over epochs that sets the epoch of other samplers."""
    events = [each for each in analysis.of("set_epoch") if epochs in each.loops]
    return site(events[0], epochs.location.function, epochs.location.file) if events else None


def _is_unknown(value: Value) -> bool:
    return not isinstance(value, SamplerValue | LoaderValue)


def _of_workers(analysis: Analysis, loader: LoaderValue, epochs: list[Loop]) -> Iterator[Finding]:
    persistent, workers = loader.options.get("persistent_workers"), loader.options.get("num_workers")
    if persistent is None or persistent.constant is not True or (workers is not None and workers.constant == 0):
        return
    for event in analysis.of("assign_attribute"):
        if _is_own_attribute(event, loader) and any(loop in epochs for loop in event.loops):
            yield RULE.finding(
                location_of(loader, event.location),
                f"`{event.name}` of the dataset is set in each epoch, but persistent workers keep their copy of it",
                evidence=[f"this changes the copy of the main process only ({event.location})"],
                related=[event.location],
                repair="remove `persistent_workers=True`, or keep the epoch in shared memory: "
                "`self.epoch = torch.zeros(1).share_memory_()`, `self.epoch.fill_(epoch)`",
            )
            return


def _is_own_attribute(event: Event, loader: LoaderValue) -> bool:
    datasets = [each for each in options_of(loader.dataset) if isinstance(each, InstanceValue)]
    is_random = any(part in event.name for part in ("epoch", "seed", "round", "iteration"))
    return is_random and any(owner is each for owner in options_of(event.owner) for each in datasets)


RULE = Rule(
    "SS102",
    "same-order-every-epoch",
    "error",
    "every epoch replays the same batches in the same order, so the data is not shuffled after the first one",
    "call `sampler.set_epoch(epoch)` at the beginning of each epoch",
    find,
)
