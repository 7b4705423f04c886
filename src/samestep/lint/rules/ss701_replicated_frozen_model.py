"""A large frozen model is on every rank.

A teacher that only computes targets is the same on all ranks. If every rank has its own copy of it, the memory of N
ranks holds N copies of weights that never change, which is often what limits the batch size. Lint reports it if the
sizes are in the script and the frozen model is at least four times as large as the one that is trained, and for
language models that `from_pretrained` loads. Weights that are mapped from a file, with `torch.load(mmap=True)` and
`load_state_dict(assign=True)`, are in memory once per machine.

Bad:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
teacher = torch.nn.Sequential(torch.nn.Linear(64, 65536), torch.nn.ReLU(), torch.nn.Linear(65536, 8))  # SS701
teacher.eval().requires_grad_(False)
student = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
dataset = torch.zeros(64, 64)
for x in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)):
    with torch.no_grad():
        target = teacher(x)
    optimizer.zero_grad()
    (student(x) - target).square().mean().backward()
    optimizer.step()
```

Good:

```python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
student = DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
dataset = TensorDataset(torch.zeros(64, 64), torch.zeros(64, 8))  # with the outputs of the teacher
for x, target in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)):
    optimizer.zero_grad()
    (student(x) - target).square().mean().backward()
    optimizer.step()
```

Source: facebookresearch/fairscale#1119, huggingface/transformers#45941.
"""

import ast
from collections.abc import Iterator
from typing import Final

from samestep.findings import Finding, Location
from samestep.lint.events import Event
from samestep.lint.library.call import is_on
from samestep.lint.loader_loops import training_loops
from samestep.lint.rule import Analysis, Rule
from samestep.lint.values import ContainerValue, InstanceValue, ModelValue, Value, options_of

_MIN_RATIO: Final = 4
_MIN_PARAMETERS: Final = 500_000  # 2 MB in float32
_MIN_LOADED: Final = 100_000  # if weights come from a file, which usually holds more than the script says
_LANGUAGE_MODELS: Final = ("ForCausalLM", "ForSequenceClassification", "LMHeadModel", "ForConditionalGeneration")


def find(analysis: Analysis) -> Iterator[Finding]:
    """Look for models that the training step calls without gradients and that are larger than what is trained."""
    trained = [raw for event in analysis.wrapped if isinstance(raw := _raw(event.model), InstanceValue)]
    loops = {id(loop) for _, loop, _ in training_loops(analysis)}
    if not trained or analysis.of("samestep"):
        return
    largest = max(count_parameters(each) for each in trained)
    minimum = _MIN_LOADED if analysis.of("torch_load", "load_state") else _MIN_PARAMETERS
    seen = set[int]()
    for event in analysis.of("model_call"):
        model = _raw(event.model)
        is_inside = any(id(loop) in loops for loop in event.loops) and not event.is_grad and not event.is_nested
        if not is_inside or event.rank_guard is not None or not isinstance(model, InstanceValue) or id(model) in seen:
            continue
        if any(model is each for each in trained) or model.differs:
            continue
        if not _is_large(model, largest, minimum) and not _is_copy_of_sharded(analysis, model):
            continue
        if _is_mapped(analysis, model):
            continue
        seen.add(id(model))
        location = _assigned(analysis, event) or model.location or event.location
        yield RULE.finding(
            location,
            f"every rank has its own copy of a frozen model{_sizes(model, largest)}",
            evidence=[f"the training step calls it without gradients ({event.location})"],
            related=[event.location],
        )


def _is_copy_of_sharded(analysis: Analysis, model: InstanceValue) -> bool:
    """Whether it is a copy of a model that FSDP shards, so that the whole model is on every rank after all."""
    sharded = (_raw(event.model) for event in analysis.wrapped if event.wrapper == "fsdp")
    trees = (each for each in sharded if isinstance(each, InstanceValue) and each is not model)
    return any(each.arguments is model.arguments and each.children for each in trees)


def _is_mapped(analysis: Analysis, model: InstanceValue) -> bool:
    """Whether the weights are the pages of a file, which processes share: `assign=True` from a file that is mapped."""
    mapped = {each.location for each in analysis.of("torch_load") if is_on(each.call, "mmap")}
    for load in analysis.of("load_state"):
        if _raw(load.owner) is model and is_on(load.call, "assign", 2):
            states = options_of(load.call.get("state_dict", 0))
            return any(each.location in mapped or each.name == "safetensors.torch.load_file" for each in states) and (
                not any(_raw(each.owner) is model and each.order > load.order for each in analysis.of("to_device"))
            )
    return False


def _raw(value: Value | None) -> Value | None:
    option = next(iter(options_of(value)), value)
    return option.raw if isinstance(option, ModelValue) else option


def _is_large(model: InstanceValue, trained: int, minimum: int) -> bool:
    if model.qualname.endswith("from_pretrained"):
        is_placed = any(name in model.arguments for name in ("device_map", "quantization_config", "load_in_8bit"))
        return not is_placed and any(name in model.qualname for name in _LANGUAGE_MODELS)
    size = count_parameters(model)
    return size >= minimum and trained > 0 and size >= _MIN_RATIO * trained


def _sizes(model: InstanceValue, trained: int) -> str:
    size = count_parameters(model)
    return f", {size / trained:.0f} times as large as the one that is trained" if size and trained else ""


def count_parameters(model: Value, depth: int = 6) -> int:
    """The weights of a module as far as their numbers are in the script; loops over layers count once."""
    if not isinstance(model, InstanceValue) or depth == 0:
        return 0
    if model.class_value is None and model.qualname.startswith("torch.nn."):
        sizes = [each.constant for each in model.arguments.values()][:3]
        numbers = [each for each in sizes if isinstance(each, int) and not isinstance(each, bool)]
        name = model.class_name
        if name in ("Linear", "Embedding") and len(numbers) > 1:
            return numbers[0] * numbers[1]
        if name.startswith("Conv") and len(numbers) > 2:
            return numbers[0] * numbers[1] * numbers[2] ** (int(name[4]) if name[4:5].isdigit() else 1)
    parts = {id(each): each for each in (*model.attributes.values(), *model.arguments.values())}
    items = {id(item): item for part in parts.values() for item in _items(part)}
    return sum(count_parameters(item, depth - 1) for item in items.values())


def _items(part: Value) -> list[Value]:
    return list(part.values()) if isinstance(part, ContainerValue) else options_of(part)


def _assigned(analysis: Analysis, event: Event) -> Location | None:
    """Where the variable that is called gets its value, in the same function or class."""
    node = event.node
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    for file in analysis.files:
        if str(file.path) != event.location.file:
            continue
        around: ast.AST | None = node
        kinds = ast.ClassDef | ast.Module if name.startswith("self.") else ast.FunctionDef | ast.Module
        while around is not None and not isinstance(around, kinds):
            around = file.parents.get(around)
        for each in ast.walk(around) if around is not None else ():
            if isinstance(each, ast.Assign) and any(ast.unparse(target) == name for target in each.targets):
                return file.locate(each, event.location.function)
    return None


RULE = Rule(
    "SS701",
    "replicated-frozen-model",
    "warning",
    "the memory of N ranks holds N copies of weights that never change",
    "load it on one rank that serves the others, shard it with FSDP, or compute its outputs before training; in "
    "samestep, `run.teacher(...)`",
    find,
    is_sure=False,
)
