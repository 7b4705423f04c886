"""Modules and what is inside of them: submodules, parameters, which are frozen and which an optimizer holds."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from samestep.findings import Location
from samestep.lint.events import Event
from samestep.lint.rule import Analysis
from samestep.lint.values import (
    ContainerValue,
    InstanceValue,
    ModelValue,
    OptimizerValue,
    ParametersValue,
    TensorValue,
    Value,
    options_of,
)

_MAX_PARTS: Final = 400
_WITHOUT_PARAMETERS: Final = (
    "ReLU", "ReLU6", "GELU", "SiLU", "ELU", "CELU", "SELU", "Tanh", "Sigmoid", "Softmax", "LogSoftmax", "LeakyReLU",
    "Softplus", "Mish", "Hardswish", "Hardtanh", "GLU", "Flatten", "Unflatten", "Identity", "Upsample", "Fold",
    "Unfold", "PixelShuffle", "ModuleList", "ModuleDict", "Sequential", "ParameterList", "CosineSimilarity",
)  # fmt: skip
_LOSSES: Final = ("Loss", "Entropy", "Criterion", "Mixup", "CutMix", "MixUp")  # and mixtures of samples, of packages
_HARMLESS: Final = (
    "print", "len", "isinstance", "hasattr", "getattr", "type", "id", "torch.compile", "sum", "wandb.watch", "setattr",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "torchinfo.summary", "torch.save", "repr", "str",
)  # fmt: skip


def raw_module(value: Value) -> Value:
    """The module inside of DDP, FSDP and others."""
    return value.raw if isinstance(value, ModelValue) else value


def is_module(value: Value | None) -> bool:
    """Whether a value is an nn.Module, wrapped or not."""
    return isinstance(value, ModelValue) or (isinstance(value, InstanceValue) and value.is_module)


def key_of(value: Value) -> int:
    """The same number for the same module; a copy that lint makes of what it knows shares the attributes."""
    raw = raw_module(value)
    return id(raw.attributes) if isinstance(raw, InstanceValue) else id(raw)


def parts_of(value: Value) -> Iterator[Value]:
    """A module, its submodules and single parameters and buffers, each once."""
    waiting, seen = list(options_of(value)), set[int]()
    while waiting and len(seen) < _MAX_PARTS:
        found = raw_module(waiting.pop(0))
        if key_of(found) in seen:
            continue
        seen.add(key_of(found))
        if isinstance(found, InstanceValue):
            if found.is_module:
                yield found
                waiting += [option for each in found.attributes.values() for option in options_of(each)]
        elif isinstance(found, ContainerValue):
            waiting += [option for each in found.values() for option in options_of(each)]
        elif isinstance(found, ModelValue) or (isinstance(found, TensorValue) and found.content):
            yield found


def contains(tree: Value, module: Value) -> bool:
    """Whether a module is the tree itself or inside of it."""
    key = key_of(module)
    return any(key_of(each) == key for each in parts_of(tree))


def overlap(one: Value, other: Value) -> bool:
    """Whether one of two modules is inside of the other."""
    return contains(one, other) or contains(other, one)


def has_parameters(module: Value) -> bool:
    """Whether a module is known to have parameters."""
    return any(has_own_parameters(each) for each in parts_of(module))


def has_own_parameters(part: Value) -> bool:
    """Whether a module has parameters besides those of its submodules; whether a tensor is a parameter."""
    if isinstance(part, TensorValue):
        return part.content == "parameter" and part.needs_grad
    if not isinstance(part, InstanceValue) or part.class_value is not None:
        return False
    name = part.class_name
    is_empty = name.endswith(("Pool1d", "Pool2d", "Pool3d", *_LOSSES, *_WITHOUT_PARAMETERS)) or "Dropout" in name
    return not is_empty


def optimized(value: Value | None) -> list[tuple[Value, Location | None]]:
    """The models and single parameters that an optimizer gets, and where their parameters are asked for."""
    found = dict[int, tuple[Value, Location | None]]()
    for option in options_of(value):
        if isinstance(option, ParametersValue):
            for model, origin in zip(option.models, option.origins, strict=False):
                for each in options_of(model):
                    found.setdefault(key_of(each), (each, origin or option.location))
        elif isinstance(option, ContainerValue):
            for item in option.values():
                found |= {key_of(model): (model, origin) for model, origin in optimized(item)}
        elif isinstance(option, TensorValue) and option.content == "parameter":
            owners = option.models or (option,)
            found |= {key_of(each): (each, option.location) for owner in owners for each in options_of(owner)}
    return list(found.values())


def optimized_models(optimizer: Value | None) -> list[Value]:
    """The models and single parameters of an optimizer."""
    models = list[Value]()
    for option in options_of(optimizer):
        if isinstance(option, OptimizerValue):
            models += [model for model, _ in optimized(option.parameters)]
    return models


def modules_of(value: Value | None) -> list[Value]:
    """The modules that parameters, a state dict or a single tensor belong to; a module itself."""
    found = list[Value]()
    for option in options_of(value):
        if isinstance(option, ParametersValue | TensorValue):
            found += [each for model in option.models for each in options_of(model)]
            if isinstance(option, TensorValue) and option.content == "parameter" and not option.models:
                found.append(option)
        elif is_module(option):
            found.append(option)
    return found


@dataclass(eq=False)
class Change:
    """Parameters of modules are frozen, or trained again."""

    event: Event
    modules: list[Value]
    is_frozen: bool
    is_partial: bool
    """Whether a condition decides for each parameter."""


class Freezing:
    """Which modules are frozen when."""

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis

    @cached_property
    def changes(self) -> list[Change]:
        """In their order."""
        found = list[Change]()
        for event in self._analysis.of("freeze", "unfreeze", "assign_attribute"):
            is_frozen = event.kind == "freeze"
            if event.kind == "assign_attribute":
                if event.name != "requires_grad" or event.value is None or not event.value.is_known:
                    continue
                is_frozen = not event.value.constant
            modules = modules_of(event.owner)
            if modules:
                found.append(Change(event, modules, is_frozen, _is_conditional(event)))
        return found

    @cached_property
    def has_unknown(self) -> bool:
        """Whether something is frozen of which lint does not know what it is."""
        events = self._analysis.of("freeze", "assign_attribute")
        frozen = [each for each in events if each.kind == "freeze" or (each.name == "requires_grad" and each.value)]
        return any(not modules_of(each.owner) for each in frozen if each.kind == "freeze" or not each.value.constant)

    def is_frozen(self, module: Value, order: int) -> bool:
        """Whether all parameters of a module are frozen before an event."""
        state = False
        for change in self.changes:
            if change.event.order < order and any(contains(each, module) for each in change.modules):
                state = change.is_frozen and not change.is_partial
        return state or (isinstance(module, TensorValue) and not module.needs_grad)

    def was_frozen(self, module: Value, order: int) -> Change | None:
        """The last change before an event that froze a module or a part of it, unless it was taken back."""
        found: Change | None = None
        for change in self.changes:
            if change.event.order < order and any(overlap(each, module) for each in change.modules):
                found = change if change.is_frozen else None
        return found


def _is_conditional(event: Event) -> bool:
    """Whether there is a condition inside of the loop over the parameters."""
    if not event.loops or not isinstance(event.loops[-1].node, ast.For):
        return False
    inside = set(ast.walk(event.loops[-1].node))
    return any(guard.node in inside for guard in event.guards)


def site(event: Event, function: str, file: str) -> Location:
    """The line of a function that leads to an event: the event itself, or the call of what does it."""
    for location in (*event.frames, event.location):
        if location.function == function and location.file == file:
            return location
    return event.location


def derived_from(value: Value | None) -> Iterator[Value]:
    """A value and all that it is computed from, also through lists, each once."""
    waiting, seen = list(options_of(value)), set[int]()
    while waiting and len(seen) < _MAX_PARTS:
        found = waiting.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        inner = found.parts if isinstance(found, TensorValue) else ()
        if isinstance(found, ContainerValue):
            inner = tuple(found.values())
        waiting += [option for each in inner for option in options_of(each)]


# -- what ranks exchange


def exchanges(analysis: Analysis, *contents: str) -> list[Event]:
    """Collectives on gradients, parameters, buffers or states of models."""
    return [event for event in analysis.of("collective") if any(each.content in contents for each in _tensors(event))]


def _tensors(event: Event) -> Iterator[TensorValue]:
    for option in (option for value in event.tensors for option in options_of(value)):
        tensors = (each for each in derived_from(option) if isinstance(each, TensorValue))
        first = next(tensors, None)
        if first is not None:
            yield first


def exchanged_models(event: Event) -> list[Value]:
    """The models whose tensors a collective exchanges."""
    return [option for each in _tensors(event) for model in each.models for option in options_of(model)]


def is_exchanged(analysis: Analysis, module: Value, *contents: str, after: int = -1) -> bool:
    """Whether the script itself exchanges something of a module, or of a model that is not known."""
    for event in exchanges(analysis, *contents):
        models = exchanged_models(event)
        if event.order > after and (not models or any(overlap(model, module) for model in models)):
            return True
    return False


def has_unknown_exchange(analysis: Analysis, after: int = -1) -> bool:
    """Whether there is a collective on something of which lint does not know what it is."""
    names = (
        "all_reduce",
        "broadcast",
        "broadcast_object_list",
        "reduce",
        "all_gather",
        "scatter",
        "all_reduce_coalesced",
    )
    for event in analysis.of("collective"):
        if event.name in names and event.order > after and event.service is None:
            known = [each for value in event.tensors[:1] for each in options_of(value)]
            if not known or not all(isinstance(each, TensorValue | ContainerValue) for each in known):
                return True
    return False


def is_passed_on(analysis: Analysis, module: Value) -> bool:
    """Whether a function of a package gets a module, which may wrap it or exchange its gradients."""
    key = key_of(module)
    for event in analysis.of("call"):
        if event.owner is None and event.name not in _HARMLESS:
            values = [option for each in (*event.arguments, *event.keywords.values()) for option in options_of(each)]
            if any(is_module(each) and key_of(each) == key for each in values):
                return True
    return False


def is_trained(analysis: Analysis, module: Value, after: int = -1) -> bool:
    """Whether a module or a part of it is called with gradients."""
    return any(
        event.is_grad and event.order > after and any(overlap(each, module) for each in options_of(event.model))
        for event in analysis.of("model_call")
    )


# -- seeds and layers


def seed_before(analysis: Analysis, event: Event) -> Event | None:
    """The seed of torch that is in force at an event, if it depends on the rank."""
    seeds = [
        seed for seed in analysis.of("seed")
        if seed.order < event.order and not seed.which.startswith(("random", "numpy"))
    ]  # fmt: skip
    return seeds[-1] if seeds and seeds[-1].value.depends_on_rank else None


def batch_norm_in(model: Value | None) -> Value | None:
    """The first BatchNorm layer of a model."""
    trees = (part for option in options_of(model) for part in parts_of(option))
    return next(
        (part for part in trees if isinstance(part, InstanceValue) and part.class_name.startswith("BatchNorm")), None
    )


def wrapper_before(analysis: Analysis, module: Value, order: int, *, with_parents: bool = False) -> Event | None:
    """The DDP, `prepare` or `setup` that got a model with the module before an event, unless another one did later.

    With `with_parents` also one that got a part of the module.
    """
    found: Event | None = None
    for event in analysis.of("wrap", "prepare"):
        values = [event.inner] if event.kind == "wrap" else event.arguments
        trees = [option for each in values for option in options_of(each) if is_module(option)]
        is_ddp = event.kind == "prepare" or event.wrapper == "ddp"
        if is_ddp and any(contains(tree, module) or (with_parents and contains(module, tree)) for tree in trees):
            found = event if event.order < order else None
    return found
