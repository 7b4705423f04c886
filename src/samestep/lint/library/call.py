"""A call of a package's function or of a method, and the registries of what lint knows of them.

Each module of this package registers functions with decorators:

- `@known_function("torch.load")`: a function or class, by its canonical full name.
- `@known_functions(lambda package, name: ...)`: many, by the package and the last part of their names. The patterns
  are tried in the order of the modules of this package by name, after all functions with a full name.
- `@known_method("optimizer", "step")`: methods, by the kind of their object (`kind_of`) and their names; the kind "any"
  is for objects of every kind.
- `@known_attribute("trainer", "is_global_zero")`: attributes that are not methods.
"""

import ast
from collections.abc import Callable
from typing import Any, Final

from samestep.findings import Location
from samestep.lint.abstract_interpreter import Interpreter
from samestep.lint.events import Event
from samestep.lint.values import (
    ContainerValue,
    InstanceValue,
    LoaderValue,
    MethodValue,
    ModelValue,
    OptimizerValue,
    ParametersValue,
    SamplerValue,
    ServiceValue,
    Taint,
    TensorValue,
    Value,
    any_world,
    merge_taints,
)


class Call:
    """A call of a package's function, or of a method of an object that is not of the project."""

    def __init__(
        self, run: Interpreter, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.Call
    ) -> None:
        self.run, self.name, self.node = run, name, node
        self.arguments, self.keywords = arguments, keywords
        self.location: Location = run.locate(node)

    @property
    def package(self) -> str:
        """The full name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def inputs(self) -> list[Value]:
        """All arguments."""
        return [*self.arguments, *self.keywords.values()]

    @property
    def named_arguments(self) -> dict[str, Value]:
        """All arguments by name, or by position as text."""
        return {str(position): value for position, value in enumerate(self.arguments)} | self.keywords

    @property
    def taints(self) -> tuple[Taint, ...]:
        """Why the arguments differ between ranks."""
        return merge_taints(self.inputs)

    def get(self, name: str, position: int | None = None) -> Value | None:
        """An argument by its name or position."""
        if name in self.keywords:
            return self.keywords[name]
        return self.arguments[position] if position is not None and position < len(self.arguments) else None

    def emit(self, kind: str, **data: Any) -> Event:
        """Record that the script does something here."""
        return self.run.emit(kind, self.node, call=self, **data)

    def unknown_result(self, *parts: Value) -> Value:
        """A result of which only is known what it may depend on."""
        inputs = [*parts, *self.inputs]
        owners = [each.owner for each in inputs if isinstance(each, MethodValue) and each.owner is not None]
        clock = next((each.clock for each in (*inputs, *owners) if each.clock is not None), None)
        count = next((each.sample_count for each in inputs if each.sample_count is not None), None)
        return Value(
            self.location, merge_taints(inputs), is_world=any_world(inputs), name=self.name, clock=clock,
            sample_count=count,
        )  # fmt: skip


def is_on(call: Call | None, name: str, position: int | None = None) -> bool:
    """Whether a call passes True for an option."""
    value = call.get(name, position) if call is not None else None
    return value is not None and value.constant is True


FunctionHandler = Callable[[Call], Value]
MethodHandler = Callable[[Call, Value], Value]
AttributeHandler = Callable[[Value, str, Location], Value | None]
_FUNCTIONS: Final[dict[str, FunctionHandler]] = {}
_PATTERNS: Final[list[tuple[Callable[[str, str], bool], FunctionHandler]]] = []
_METHODS: Final[dict[tuple[str, str], MethodHandler]] = {}
_ATTRIBUTES: Final[dict[tuple[str, str], AttributeHandler]] = {}
_canonical: Final[dict[str, str]] = {}
_resolved: Final[dict[str, FunctionHandler | None]] = {}


def known_function(*names: str) -> Callable[[FunctionHandler], FunctionHandler]:
    """Register what functions or classes do, by their canonical full names."""

    def register(handler: FunctionHandler) -> FunctionHandler:
        for name in names:
            if name in _FUNCTIONS:
                raise ValueError(f"{name} is known twice")
            _FUNCTIONS[name] = handler
        return handler

    return register


def known_functions(matches: Callable[[str, str], bool]) -> Callable[[FunctionHandler], FunctionHandler]:
    """Register what many functions do; `matches` gets the package and the last part of the name."""

    def register(handler: FunctionHandler) -> FunctionHandler:
        _PATTERNS.append((matches, handler))
        return handler

    return register


def known_method(kind: str, *names: str) -> Callable[[MethodHandler], MethodHandler]:
    """Register what methods of objects of a kind do."""

    def register(handler: MethodHandler) -> MethodHandler:
        for name in names:
            if (kind, name) in _METHODS:
                raise ValueError(f"{kind}.{name} is known twice")
            _METHODS[kind, name] = handler
        return handler

    return register


def known_attribute(kind: str, *names: str) -> Callable[[AttributeHandler], AttributeHandler]:
    """Register what attributes of objects of a kind are."""

    def register(handler: AttributeHandler) -> AttributeHandler:
        for name in names:
            if (kind, name) in _ATTRIBUTES:
                raise ValueError(f"{kind}.{name} is known twice")
            _ATTRIBUTES[kind, name] = handler
        return handler

    return register


def find_function(name: str) -> FunctionHandler | None:
    """What a function of a package does, by its canonical name; None if lint does not know it."""
    if name not in _resolved:
        package, _, last = name.rpartition(".")
        patterns = (handler for matches, handler in _PATTERNS if matches(package, last))
        _resolved[name] = _FUNCTIONS.get(name) or next(patterns, None)
    return _resolved[name]


def find_method(owner: Value, name: str) -> MethodHandler | None:
    """What a method of an object does; None if lint does not know it."""
    return _METHODS.get((kind_of(owner), name)) or _METHODS.get(("any", name))


def find_attribute(owner: Value, name: str) -> AttributeHandler | None:
    """What an attribute of an object is; None if lint does not know it."""
    return _ATTRIBUTES.get((kind_of(owner), name)) or _ATTRIBUTES.get(("any", name))


_KINDS: Final[dict[type[Value], str]] = {
    ModelValue: "model", OptimizerValue: "optimizer", LoaderValue: "loader", SamplerValue: "sampler",
    TensorValue: "tensor", ParametersValue: "parameters", ContainerValue: "container",
}  # fmt: skip


def kind_of(owner: Value) -> str:
    """The kind of an object: one of `_KINDS`, of a service ("trainer"), "lightning", "model", "instance" or "value"."""
    if isinstance(owner, ServiceValue):
        return owner.kind
    if isinstance(owner, InstanceValue):
        if owner.class_value is not None and owner.class_value.derives_from("LightningModule"):
            return "lightning"
        return "model" if owner.is_module else "instance"
    return _KINDS.get(type(owner), "value")


_ALIASES: Final = (
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
    ("torch.utils.data.distributed.", "torch.utils.data."),
    ("torch.utils.data.dataloader.", "torch.utils.data."),
    ("torch.utils.data.dataset.", "torch.utils.data."),
    ("torch.utils.data.sampler.", "torch.utils.data."),
    ("torch.distributed._composable.fsdp.", "torch.distributed.fsdp."),
    ("torch.distributed.fsdp.fully_sharded_data_parallel.", "torch.distributed.fsdp."),
    ("torch.distributed.device_mesh.", "torch.distributed."),
    ("pytorch_lightning.", "lightning."),
    ("lightning.pytorch.", "lightning."),
    ("lightning.fabric.", "lightning."),
    ("lightning_fabric.", "lightning."),
    ("lightning.trainer.", "lightning."),
    ("accelerate.accelerator.", "accelerate."),
    ("accelerate.state.", "accelerate."),
    ("samestep.training.run.", "samestep."),
)


def canonical(name: str) -> str:
    """One name for what has several: modules that only re-export, and old names of Lightning."""
    found = _canonical.get(name)
    if found is None:
        found = name
        for old, new in _ALIASES:
            if found.startswith(old):
                found = new + found[len(old) :]
        _canonical[name] = found
    return found
