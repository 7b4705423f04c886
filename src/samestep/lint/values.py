"""What lint knows of a value: what it is, where it comes from, and whether it differs between ranks."""

import ast
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from samestep.findings import Location
from samestep.lint.source_files import SourceFile

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
MAX_OPTIONS: Final = 8
"""Values of a choice; what is more is left out."""
_MAX_TAINTS: Final = 8

TensorContent = Literal["", "parameter", "gradient", "buffer", "state"]
"""What a tensor is to its model; "state" is a parameter or a buffer of a state dict."""
TaintKind = Literal["rank", "data"]
"""Why a value differs between ranks: it derives from the rank, or from data that each rank reads for itself."""
OWN_BATCH: Final = "each rank has its own batch"
"""The text of the taint of what Lightning passes to a step."""


@dataclass(frozen=True)
class Taint:
    """A reason why a value differs between ranks."""

    kind: TaintKind
    location: Location
    text: str
    """Such as "`rank` comes from RANK"."""
    is_local: bool = False
    """Whether it is the rank on a node, not among all ranks."""
    is_node: bool = False
    """Whether it is the number of the node, which its ranks share."""
    loop: Location | None = None
    """Of samples of a loader: the loop that reads them."""


@dataclass(frozen=True, eq=False)
class SampleCount:
    """What a number is computed from: the number of samples of a dataset, and what that is divided by."""

    dataset: "Value"
    divisors: tuple["Value", ...] = ()


class Unset:
    """The value of what is not a constant."""


UNSET = Unset()


@dataclass(eq=False)
class Value:
    """Anything; the subclasses say more."""

    location: Location | None = None
    taints: tuple[Taint, ...] = ()
    constant: Any = UNSET
    is_world: bool = False
    """Whether it derives from the number of ranks, or from whether there is a process group."""
    name: str = ""
    """What is called for it, such as "torch.randn"; empty if that is not known."""
    assumed: bool | Unset | None = UNSET
    """Of a condition: whether it holds on several ranks; None if that depends on more."""
    clock: Location | None = None
    """Where a clock was read for it: each process reads its own."""
    is_floored: bool = False
    """Whether it is a number divided by the number of ranks and rounded down."""
    sample_count: SampleCount | None = None
    """Of a number that derives from `len(dataset)`."""
    size_of: "Value | None" = None
    """Of `x.shape` and its numbers: the tensor."""
    sent: "Value | None" = None
    """Of an object that a rank has received: the one that it has sent itself."""

    @property
    def truth(self) -> bool | None:
        """Whether it is true on several ranks; None if that is not known."""
        if isinstance(self.assumed, bool):
            return self.assumed
        if self.assumed is None or self.taints:
            return None
        if self.constant is not UNSET:
            return bool(self.constant)
        return True if self.is_world else None

    @property
    def differs(self) -> bool:
        """Whether it differs between ranks."""
        return bool(self.taints)

    @property
    def depends_on_rank(self) -> bool:
        """Whether it derives from the rank."""
        return any(taint.kind == "rank" for taint in self.taints)

    @property
    def is_known(self) -> bool:
        """Whether it is a constant."""
        return self.constant is not UNSET


@dataclass(eq=False)
class ExternalValue(Value):
    """A function, class or module of an installed package, by its full name."""

    qualname: str = ""


class Scope:
    """The names of a function, a class or a module."""

    def __init__(self, parent: "Scope | None" = None) -> None:
        self.names: dict[str, Value] = {}
        self.parent = parent
        self.outer: dict[str, Scope] = {}
        """Names that `global` and `nonlocal` bind elsewhere."""

    def get(self, name: str) -> "Value | None":
        """The value of a name, here or around."""
        scope: Scope | None = self
        while scope is not None:
            found = scope.names.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None

    def set(self, name: str, value: "Value") -> None:
        """Bind a name."""
        self.outer.get(name, self).names[name] = value


@dataclass(eq=False)
class ModuleState:
    """A file that is interpreted."""

    file: SourceFile
    is_main: bool = False
    """Whether it is the script itself, not one of the files that it imports."""
    scope: Scope = field(default_factory=Scope)


@dataclass(eq=False)
class ModuleValue(Value):
    """A module of the project."""

    state: ModuleState | None = None


@dataclass(eq=False)
class ImportedValue(Value):
    """A name that is imported from a file of the project, which is not read before the name is used."""

    base: str = ""
    attribute: str = ""
    """Empty for the module itself."""


@dataclass(eq=False)
class FunctionValue(Value):
    """A function or method of the project."""

    node: Function | None = None
    module: ModuleState | None = None
    """That it is defined in."""
    scope: Scope | None = None
    """The names around it."""
    owner: "InstanceValue | None" = None
    """Of a bound method."""
    class_value: "ClassValue | None" = None


@dataclass(eq=False)
class ClassValue(Value):
    """A class of the project."""

    node: ast.ClassDef | None = None
    module: ModuleState | None = None
    scope: Scope | None = None
    bases: tuple[Value, ...] = ()
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])
    """What its body defines: methods and attributes."""

    def ancestors(self) -> Iterator[Value]:
        """This class and those that it derives from, of the project and of packages."""
        yield self
        for base in self.bases:
            if isinstance(base, ClassValue):
                yield from base.ancestors()
            else:
                yield base

    def derives_from(self, *names: str) -> bool:
        """Whether it derives from a class of a package, by the end of its name."""
        return any(isinstance(each, ExternalValue) and each.qualname.endswith(names) for each in self.ancestors())

    def attribute(self, name: str) -> Value | None:
        """A method or attribute, of this class or the nearest one that it derives from."""
        found = (each.attributes.get(name) for each in self.ancestors() if isinstance(each, ClassValue))
        return next((each for each in found if each is not None), None)

    def method(self, name: str, owner: "InstanceValue | None" = None) -> FunctionValue | None:
        """A method, bound to an object if there is one."""
        found = self.attribute(name)
        if not isinstance(found, FunctionValue):
            return None
        bound = copy.copy(found)
        bound.owner = owner
        return bound


@dataclass(eq=False)
class InstanceValue(Value):
    """An object of a class of the project, or of a class of a package by its name."""

    class_value: ClassValue | None = None
    qualname: str = ""
    attributes: dict[str, Value] = field(default_factory=dict[str, Value])
    arguments: dict[str, Value] = field(default_factory=dict[str, Value])
    """Of its constructor, by name or position."""

    @property
    def is_module(self) -> bool:
        """Whether it is an nn.Module."""
        if self.class_value is not None:
            return self.class_value.derives_from("nn.Module", "LightningModule", "PreTrainedModel", "Sequential")
        return self.qualname.startswith(("torch.nn.", "torchvision.models.", "transformers.", "timm."))

    @property
    def children(self) -> list["Value"]:
        """Modules that are its attributes; of a ModuleList its items."""
        values = self.attributes.values()
        return [each for each in values if isinstance(each, ModelValue | InstanceValue) and _is_model(each)]

    @property
    def class_name(self) -> str:
        """The name of its class."""
        if self.class_value is not None and self.class_value.node is not None:
            return self.class_value.node.name
        return self.qualname.rpartition(".")[2]


@dataclass(eq=False)
class SuperValue(Value):
    """`super()` in a method of a class of the project."""

    owner: InstanceValue | None = None
    bases: tuple[Value, ...] = ()


@dataclass(eq=False)
class ModelValue(Value):
    """A module that is wrapped, or that is known to be a model."""

    wrapper: str = ""  # "ddp", "fsdp", "prepared", "lightning" or ""
    inner: Value | None = None
    options: dict[str, Value] = field(default_factory=dict[str, Value])

    @property
    def raw(self) -> Value:
        """The module inside of all wrappers."""
        return self.inner.raw if isinstance(self.inner, ModelValue) else self.inner or self


def _is_model(value: Value) -> bool:
    return isinstance(value, ModelValue) or (isinstance(value, InstanceValue) and value.is_module)


@dataclass(eq=False)
class ParametersValue(Value):
    """Parameters, buffers or a state dict of one or several models."""

    models: tuple[Value, ...] = ()
    origins: tuple[Location | None, ...] = ()
    """Where the parameters of each model were asked for."""
    content: TensorContent = "parameter"
    is_named: bool = False
    """Whether a loop gets pairs of a name and a tensor."""


@dataclass(eq=False)
class OptimizerValue(Value):
    """An optimizer."""

    parameters: Value | None = None
    is_prepared: bool = False
    options: dict[str, Value] = field(default_factory=dict[str, Value])


@dataclass(eq=False)
class SamplerValue(Value):
    """A sampler; `kind` is the name of its class."""

    kind: str = ""
    dataset: Value | None = None
    options: dict[str, Value] = field(default_factory=dict[str, Value])

    @property
    def is_distributed(self) -> bool:
        """Whether it gives each rank its own part."""
        return "Distributed" in self.kind and "instance" not in self.options


@dataclass(eq=False)
class LoaderValue(Value):
    """A DataLoader."""

    dataset: Value | None = None
    sampler: Value | None = None
    options: dict[str, Value] = field(default_factory=dict[str, Value])
    is_prepared: bool = False  # by Accelerate or Fabric
    uses: set[str] = field(default_factory=set[str])  # "train", "eval"

    @property
    def is_sharded(self) -> bool:
        """Whether each rank reads its own part."""
        sampler = self.sampler
        if self.is_prepared or (isinstance(sampler, SamplerValue) and sampler.is_distributed):
            return True
        parts = [sampler, self.dataset, self.options.get("batch_sampler")]
        return any(part is not None and part.depends_on_rank for part in parts)


@dataclass(eq=False)
class TensorValue(Value):
    """A tensor or a number that is computed."""

    needs_grad: bool = False
    is_mean: bool = False  # a mean over the samples of this rank
    is_ratio: bool = False  # a quotient of sums of this rank
    is_count: bool = False
    is_divided: bool = False
    is_reduced: bool = False  # over all ranks
    is_noise: bool = False
    length: int | None = None  # of its first dimension
    selected: Location | None = None  # where its rows were chosen by what the rank's own samples are
    parts: tuple[Value, ...] = ()  # what it is computed from
    operation: str = ""  # "/", "*", "+", "-" or "@" of its two parts
    content: TensorContent = ""
    models: tuple[Value, ...] = ()  # whose parameter, gradient or buffer it is


@dataclass(eq=False)
class ContainerValue(Value):
    """A list, tuple, set or dictionary."""

    items: dict[Any, Value] = field(default_factory=dict[Any, Value])
    is_unordered: bool = False  # the order depends on hashes or on the file system
    order_from: Location | None = None  # of an unordered one: the call that gives the order
    length: int | None = None
    size_taints: tuple[Taint, ...] = ()
    """Why ranks may have different numbers of items: `[x for x in y if own(x)]`."""

    def values(self) -> Iterable[Value]:
        """What it contains."""
        return self.items.values()


@dataclass(eq=False)
class ServiceValue(Value):
    """An Accelerator, a Trainer, a Fabric, a metric or another object whose methods matter."""

    kind: str = ""
    options: dict[str, Value] = field(default_factory=dict[str, Value])


@dataclass(eq=False)
class MethodValue(Value):
    """A method or attribute of an object, of which only its name is known."""

    owner: Value | None = None
    attribute: str = ""


@dataclass(eq=False)
class IteratorValue(Value):
    """enumerate, zip, tqdm and others around something that a loop reads."""

    kind: str = ""
    sources: tuple[Value, ...] = ()


@dataclass(eq=False)
class ChoiceValue(Value):
    """One of several values, by a condition that is not known."""

    options: tuple[Value, ...] = ()
    condition_taints: tuple[Taint, ...] = ()
    """Why ranks may have different ones of them."""

    @property
    def truth(self) -> bool | None:
        """Whether all of them are true on several ranks, or all false; None if that is not known."""
        truths = {each.truth for each in self.options}
        return truths.pop() if len(truths) == 1 else super().truth


def merge_taints(values: Iterable[Value | None]) -> tuple[Taint, ...]:
    """The reasons of all values, each once."""
    tainted = [value.taints for value in values if value is not None and value.taints]
    if not tainted:
        return ()
    if len(tainted) == 1:
        return tainted[0]
    found = dict[tuple[str, str, Location | None], Taint]()
    for taints in tainted:
        for taint in taints:
            found.setdefault((taint.kind, taint.text, taint.loop), taint)
    return tuple(found.values())[:_MAX_TAINTS]


def any_world(values: Iterable[Value]) -> bool:
    """Whether one of them derives from the number of ranks."""
    return any(value.is_world for value in values)


def choose(options: Iterable[Value], taints: tuple[Taint, ...] = ()) -> Value:
    """One of several values; it differs between ranks if the condition does, whose taints are given."""
    options = list(options)
    if len(options) == 1 and (type(options[0]) is not ChoiceValue or not taints):
        return options[0]
    unique = {id(option): option for each in options for option in options_of(each)}
    flat = list(unique.values())[:MAX_OPTIONS]
    if len(flat) == 1:
        return flat[0]
    if not flat:
        return Value(taints=taints)
    inner = [Value(taints=each.condition_taints) for each in options if isinstance(each, ChoiceValue)]
    why = merge_taints([Value(taints=taints), *inner])
    merged = merge_taints([*flat, Value(taints=why)])
    return ChoiceValue(flat[0].location, merged, options=tuple(flat), is_world=any_world(flat), condition_taints=why)


def choice_taints(value: Value) -> tuple[Taint, ...]:
    """Why ranks may have different objects, not just different contents: one has a logger, the others have None."""
    if not isinstance(value, ChoiceValue):
        return ()
    absent = [each for each in value.options if each.constant is None]  # `return None` under a condition
    return merge_taints([Value(taints=value.condition_taints), *absent])


def part_of(value: Value) -> Value:
    """A part of a value of which nothing else is known."""
    if isinstance(value, TensorValue):
        return TensorValue(
            value.location, value.taints, needs_grad=value.needs_grad, is_noise=value.is_noise,
            is_reduced=value.is_reduced, parts=(value,),
        )  # fmt: skip
    return Value(value.location, value.taints, is_world=value.is_world, size_of=value.size_of)


def sources_of(value: Value | None) -> Iterator[Value]:
    """What a loop over a value reads, through enumerate, zip and tqdm."""
    for option in options_of(value):
        if isinstance(option, IteratorValue):
            for source in option.sources:
                yield from sources_of(source)
        else:
            yield option


def options_of(value: Value | None) -> list[Value]:
    """What a value may be; a choice never contains another choice."""
    if isinstance(value, ChoiceValue):
        return list(value.options)
    return [] if value is None else [value]


def without_number(value: Value) -> Value:
    """A value of which the number is not known any more, if it was a constant."""
    is_number = type(value) is Value and value.is_known and isinstance(value.constant, int | float)
    return replace(value, constant=UNSET) if is_number else value


def is_same_value(one: Value | None, other: Value | None) -> bool:
    """Whether two values are one object, equal constants, or the same attribute of one object, such as an option."""
    if one is None or other is None:
        return False
    pairs = list(zip(options_of(one), options_of(other), strict=False))
    return one is other or (bool(pairs) and all(_is_same_option(*pair) for pair in pairs))


def _is_same_option(one: Value, other: Value) -> bool:
    if one is other or (one.is_known and other.is_known):
        return one is other or one.constant == other.constant
    if not isinstance(one, MethodValue) or not isinstance(other, MethodValue):
        return False
    return one.attribute == other.attribute and one.owner is other.owner


def computed_from(value: Value | None, limit: int = 200) -> Iterator[Value]:
    """A value and what it is computed from, nearest first, each once."""
    waiting, seen = options_of(value), set[int]()
    while waiting and len(seen) < limit:
        found = waiting.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, TensorValue):
            waiting += [option for each in found.parts for option in options_of(each)]
