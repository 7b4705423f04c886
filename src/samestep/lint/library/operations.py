"""What operators, attributes, loops, subscripts and `with` give for the values that lint knows."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from samestep.findings import Location
from samestep.lint.abstract_interpreter import Interpreter
from samestep.lint.library.call import find_attribute
from samestep.lint.library.partitions import first_clock, is_floored, join_taints, slice_part, split_part
from samestep.lint.rank_names import COUNTER, GUESSED_NAMES, environment_value
from samestep.lint.values import (
    UNSET,
    ContainerValue,
    ExternalValue,
    InstanceValue,
    IteratorValue,
    LoaderValue,
    MethodValue,
    ModelValue,
    OptimizerValue,
    ParametersValue,
    SampleCount,
    SamplerValue,
    SuperValue,
    Taint,
    TensorValue,
    Value,
    any_world,
    choose,
    computed_from,
    merge_taints,
    options_of,
    part_of,
)

CONTEXTS: Final = frozenset({
    "no_grad", "inference_mode", "no_sync", "no_backward_sync", "join", "accumulate", "autocast", "enable_grad",
})  # fmt: skip
LOCK: Final = "lock"
"""The name of contexts that one rank enters after the other."""
COMPARISON: Final = "comparison"
"""The name of a tensor of truth values, which a comparison of tensors gives."""
ARITHMETIC: Final = "arithmetic"
"""The name of a number that an operator computes."""
_MAX_CONSTANT: Final = 10**15  # larger results are not computed
_ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b if b else UNSET, ast.Div: lambda a, b: a / b if b else UNSET,
    ast.Mod: lambda a, b: a % b if b else UNSET,
}  # fmt: skip
_OPERATIONS: Final[dict[type[ast.operator], str]] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "/", ast.MatMult: "@",
}  # fmt: skip
_KINDS: Final = frozenset({
    "dtype", "layout", "ndim", "is_nested", "is_sparse", "is_quantized", "is_complex", "is_floating_point",
})  # fmt: skip
"""Attributes of tensors that say what kind of tensor it is: the same on all ranks, whatever the numbers are."""
_MAX_SINGLE_ITEMS: Final = 4
_MAX_DIVIDED: Final = 30  # values that a dividend is computed from
_SINGLE: Final = (TensorValue, SamplerValue, LoaderValue, ModelValue, InstanceValue, OptimizerValue)
_SET_OPERATORS: Final = (ast.BitOr, ast.BitAnd, ast.BitXor, ast.Sub)
_IN_PLACE: Final[dict[type[ast.operator], str]] = {
    ast.Add: "add_", ast.Sub: "sub_", ast.Mult: "mul_", ast.Div: "div_",
}  # fmt: skip

# -- attributes


def attribute_of(run: Interpreter, owner: Value, name: str, location: Location) -> Value | None:
    """An attribute of an object that is not of the project; None if its name alone says what it is."""
    handler = find_attribute(owner, name)
    found = handler(owner, name, location) if handler is not None else None
    if found is not None:
        return found
    if isinstance(owner, ModelValue):
        return _model_attribute(owner, name, location)
    if name in _KINDS:
        return MethodValue(location, owner=owner, attribute=name)
    if isinstance(owner, InstanceValue) and name in GUESSED_NAMES and not owner.differs:
        return None
    if isinstance(owner, InstanceValue) and owner.class_value is not None:  # which of its attributes differ is known
        return MethodValue(location, owner=owner, attribute=name)
    if type(owner) is not Value:
        return MethodValue(location, owner.taints, owner=owner, attribute=name)
    if not owner.is_known and name in GUESSED_NAMES:
        return None
    return MethodValue(location, owner.taints, owner=owner, attribute=name, is_world=owner.is_world)


def _model_attribute(owner: ModelValue, name: str, location: Location) -> Value:
    if name == "module" and owner.inner is not None:
        return owner.inner
    raw = owner.raw
    if owner.inner is not None and isinstance(raw, InstanceValue) and name in raw.attributes:
        return raw.attributes[name]
    return MethodValue(location, owner.taints, owner=owner, attribute=name)


# -- operators


def combine(run: Interpreter, node: ast.AST, left: Value, right: Value, operator: ast.operator) -> Value:
    """The result of an operator: whether it is a mean, a quotient, a multiple."""
    location = run.locate(node)
    if isinstance(left, ParametersValue | ContainerValue) and isinstance(operator, ast.Add):
        return _concatenate(location, left, right)
    if isinstance(left, ContainerValue) and isinstance(right, ContainerValue) and isinstance(operator, _SET_OPERATORS):
        sources = (left,) if isinstance(operator, ast.Sub) else (left, right)  # `a - b` has items of a only
        unordered = next((each for each in sources if each.is_unordered), None)
        return replace(unordered or left, location=location, taints=merge_taints([left, right]))
    one = _tensor_of(left)
    if one is not None or _tensor_of(right) is not None:
        if isinstance(node, ast.AugAssign) and one is not None and one.content:
            run.emit("in_place", node, owner=one, name=_IN_PLACE.get(type(operator), ""), value=right)
        if isinstance(operator, ast.Sub) and left.depends_on_rank and _is_mean_of(left, right):
            run.emit("own_mean", node, source=left, mean=right)
        before = _divided_by_ranks(run, left) if isinstance(operator, ast.Div) and _is_number_of_ranks(right) else None
        if before is not None:
            run.emit("averaged_again", node, before=before)
        return _combine_tensors(location, left, right, operator)
    constant = _compute(operator, left.constant, right.constant) if left.is_known and right.is_known else UNSET
    return Value(
        location, merge_taints([left, right]), constant, any_world([left, right]), clock=first_clock(left, right).clock,
        is_floored=is_floored(node, left, right, operator), name=ARITHMETIC,
        sample_count=_sample_count(left, right, operator),
    )  # fmt: skip


def _is_mean_of(value: Value, mean: Value) -> bool:
    """Whether it is the mean of the rows of another tensor."""
    return isinstance(mean, TensorValue) and mean.name == "Tensor.mean(0)" and any(p is value for p in mean.parts)


def _is_number_of_ranks(value: Value) -> bool:
    """Whether it is the number itself, not one that is computed from it."""
    return value.is_world and not isinstance(value, TensorValue) and value.name != ARITHMETIC


def _divided_by_ranks(run: Interpreter, value: Value) -> TensorValue | None:
    """The division by the number of ranks that made a mean over the ranks; None if none did, or it was summed since."""
    exchanges = (event.tensors for event in run.events if event.kind == "collective")
    summed = {id(each) for tensors in exchanges for tensor in tensors for each in options_of(tensor)}
    for each in computed_from(value, _MAX_DIVIDED):
        if id(each) in summed or (isinstance(each, TensorValue) and each.operation not in ("", "/")):
            return None
        if isinstance(each, TensorValue) and each.operation and _is_number_of_ranks(each.parts[1]):
            return each if each.is_reduced else None
    return None


def _sample_count(left: Value, right: Value, operator: ast.operator) -> SampleCount | None:
    if left.sample_count is not None and isinstance(operator, ast.Div | ast.FloorDiv):
        return replace(left.sample_count, divisors=(*left.sample_count.divisors, right))
    return left.sample_count or right.sample_count


def _tensor_of(value: Value) -> TensorValue | None:
    return next((each for each in options_of(value) if isinstance(each, TensorValue)), None)


def _combine_tensors(location: Location, left: Value, right: Value, operator: ast.operator) -> Value:
    one, other = _tensor_of(left), _tensor_of(right)
    tensors = [each for each in (one, other) if each is not None]
    is_division = isinstance(operator, ast.Div)
    is_own = other is not None and not other.is_reduced and (other.is_count or bool(other.taints))
    is_ratio = is_division and one is not None and is_own
    keeps_ratio = tensors[0].is_ratio and isinstance(operator, ast.Mult | ast.Div)
    return TensorValue(
        location, merge_taints([left, right]), is_world=any_world([left, right]),
        needs_grad=any(each.needs_grad for each in tensors), is_mean=any(each.is_mean for each in tensors),
        is_ratio=is_ratio or keeps_ratio,
        is_divided=tensors[0].is_divided or is_division or (isinstance(operator, ast.Mult) and other is None),
        is_reduced=all(each.is_reduced for each in tensors), is_noise=any(each.is_noise for each in tensors),
        parts=(left, right), operation=_OPERATIONS.get(type(operator), ""),
        content=one.content if one is not None and other is None else "",
        models=one.models if one is not None and other is None else (),
    )  # fmt: skip


def _compute(operator: ast.operator, left: Any, right: Any) -> Any:
    compute = _ARITHMETIC.get(type(operator))
    if compute is None or not isinstance(left, int | float) or not isinstance(right, int | float):
        return UNSET
    if abs(left) > _MAX_CONSTANT or abs(right) > _MAX_CONSTANT:
        return UNSET
    return compute(left, right)


def _concatenate(location: Location, left: Value, right: Value) -> Value:
    taints = merge_taints([left, right])
    if isinstance(left, ParametersValue) or isinstance(right, ParametersValue):
        sources = [source for value in (left, right) for source in _parameters_of(value)]
        return join_parameters(location, sources)
    items = [
        item for value in (left, right) for item in (value.values() if isinstance(value, ContainerValue) else [value])
    ]
    return ContainerValue(location, taints, items=dict(enumerate(items)))


def _parameters_of(value: Value) -> list[Value]:
    return list(value.values()) if isinstance(value, ContainerValue) else [value]


def join_parameters(location: Location, sources: Sequence[Value]) -> Value:
    """The parameters of several models as one; single parameters are kept in `models` too."""
    models, origins = list[Value](), list[Location | None]()
    for source in sources:
        own = source.models if isinstance(source, ParametersValue) else (source,)
        models += own
        origins += source.origins if isinstance(source, ParametersValue) else [source.location]
    return ParametersValue(location, merge_taints(sources), models=tuple(models), origins=tuple(origins))


# -- loops, subscripts and contexts


def element(run: Interpreter, iterable: Value, node: ast.AST) -> Value:
    """What a loop over something gets."""
    return choose([_element(run, option, node) for option in options_of(iterable)])


def _element(run: Interpreter, iterable: Value, node: ast.AST) -> Value:
    location = run.locate(node)
    if isinstance(iterable, IteratorValue):
        return _iterator_element(run, iterable, node)
    if isinstance(iterable, LoaderValue):
        taints = iterable.taints
        if iterable.is_sharded:
            text = "each rank reads its own samples from the loader"
            taints = (*taints, Taint("data", iterable.location or location, text, loop=location))
        return TensorValue(location, taints)
    if isinstance(iterable, ContainerValue):
        if iterable.is_unordered:
            run.emit("unordered", node, container=iterable)
        items = list(iterable.values())
        if items and all(isinstance(item, InstanceValue | ModelValue | OptimizerValue) for item in items):
            return choose(items)
        return _pair_of_modules(items) or (items[0] if items else Value(taints=iterable.taints))
    if isinstance(iterable, ParametersValue):
        return _parameter(iterable, location)
    if isinstance(iterable, InstanceValue) and iterable.is_module and iterable.children:
        return choose(iterable.children)
    if isinstance(iterable, TensorValue):
        return part_of(iterable)
    return Value(location, iterable.taints)


def _pair_of_modules(items: Sequence[Value]) -> Value | None:
    """An item of a list of tuples of modules, such as students with their teachers."""
    tuples = [each for each in items if isinstance(each, ContainerValue)]
    lengths = {len(each.items) for each in tuples}
    if len(tuples) < 2 or len(tuples) != len(items) or len(lengths) != 1:
        return None
    if not any(isinstance(each, InstanceValue | ModelValue) for row in tuples for each in row.values()):
        return None
    columns = zip(*(row.values() for row in tuples), strict=True)
    return ContainerValue(tuples[0].location, items=dict(enumerate(map(choose, columns))), length=lengths.pop())


def _parameter(source: ParametersValue, location: Location) -> Value:
    """One of the parameters of models."""
    needs_grad = source.content == "parameter"
    tensor = TensorValue(
        source.location or location, content=source.content, models=source.models, needs_grad=needs_grad
    )
    if not source.is_named:
        return tensor
    return ContainerValue(location, items={0: Value(location), 1: tensor}, length=2)


def single_items(iterable: Value) -> list[Value]:
    """What a loop gets from a few names or objects, such as `("train", "val")`, or rows of them; else nothing."""
    if isinstance(iterable, IteratorValue):
        columns = [_listed(each) for each in iterable.sources]
        if not any(single_items(each) for each in iterable.sources) or len({len(each) for each in columns}) != 1:
            return []
        if iterable.kind == "enumerate":
            columns.insert(0, [Value(constant=number) for number in range(len(columns[0]))])
        elif iterable.kind != "zip":
            return columns[0]
        return [ContainerValue(items=dict(enumerate(row)), length=len(row)) for row in zip(*columns, strict=True)]
    items = _listed(iterable)
    return items if all(_is_single(each) for each in items) and len(items) <= _MAX_SINGLE_ITEMS else []


def _listed(value: Value) -> list[Value]:
    """The items of a list of known length, or the keys of a dictionary."""
    if not isinstance(value, ContainerValue) or value.is_unordered:
        return []
    if all(isinstance(key, str) for key in value.items):
        return [Value(value.location, constant=key) for key in value.items]
    return list(value.values()) if value.length == len(value.items) else []


def _is_single(value: Value | None) -> bool:
    """Whether it is a name or an object, or a row that begins with one."""
    if isinstance(value, ContainerValue):
        return bool(value.items) and _is_single(value.items.get(0))
    return isinstance(value, _SINGLE) or (value is not None and isinstance(value.constant, str))


def _iterator_element(run: Interpreter, iterable: IteratorValue, node: ast.AST) -> Value:
    inner = [element(run, each, node) for each in iterable.sources]
    if iterable.kind == "enumerate":
        index = Value(iterable.location, name=COUNTER)
        return ContainerValue(items={0: index, 1: inner[0] if inner else Value()}, length=2)
    if iterable.kind == "zip":
        return ContainerValue(items=dict(enumerate(inner)), length=len(inner))
    return inner[0] if inner else Value()


def subscript(run: Interpreter, owner: Value, index: Value, node: ast.Subscript) -> Value:
    """A part of something: an environment variable, a slice of a tensor."""
    location = run.locate(node)
    if isinstance(owner, ExternalValue) and owner.qualname == "os.environ" and index.is_known:
        return environment_value(str(index.constant), location)
    if index.name == "torch.device":
        index = replace(index, taints=())  # what is kept for the device of this rank need not differ
    taints = join_taints([owner, index], slice_part(run, owner, node) or split_part(run, owner, index, node))
    if isinstance(owner, TensorValue):
        is_mask = isinstance(index, TensorValue) and index.name == COMPARISON and index.differs
        return replace(owner, location=location, taints=taints, selected=location if is_mask else owner.selected)
    if isinstance(owner, ContainerValue):
        if owner.is_unordered and not index.is_known:
            run.emit("by_position", node, container=owner)
        if owner.items and not isinstance(node.slice, ast.Slice):
            item = next(iter(owner.items.values()))
            return replace(item, taints=merge_taints([item, index])) if index.differs else item
        return replace(owner, location=location, taints=taints, length=None)
    if isinstance(owner, InstanceValue) and owner.is_module and owner.children:
        found = owner.attributes.get(str(index.constant)) if index.is_known else None
        return found if found is not None else choose(owner.children)
    if isinstance(owner, ParametersValue):
        return TensorValue(location, taints, content=owner.content, models=owner.models)
    if isinstance(owner, InstanceValue | ModelValue) and not index.differs:
        return MethodValue(location, owner.taints, owner=owner, attribute="[]")
    name = owner.name if owner.name == "torch.load" else ""
    origin = owner.location if name else location  # of what is in a checkpoint
    return Value(origin, taints, is_world=owner.is_world, name=name, clock=owner.clock, size_of=owner.size_of)


def context_name(value: Value) -> str:
    """The name of a context manager that a `with` statement enters; empty if it does not matter."""
    name = value.qualname if isinstance(value, ExternalValue | InstanceValue) else value.name
    last = value.class_name if isinstance(value, InstanceValue) else name.rpartition(".")[2]
    if ("lock" in last.lower() and "block" not in last.lower()) or last.endswith(("_zero_first", "_process_first")):
        return LOCK
    return last if last in CONTEXTS else ""


def entered_value(value: Value) -> Value:
    """What `with ... as` binds."""
    if type(value) is Value or isinstance(value, ExternalValue | MethodValue | SuperValue):
        return Value(value.location, value.taints, name=value.name)
    return value
