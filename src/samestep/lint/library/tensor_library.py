"""Tensors: functions and methods of torch, backward passes, and gradients."""

from dataclasses import replace
from typing import Final

from samestep.findings import Location
from samestep.lint.library.call import Call, known_attribute, known_function, known_functions, known_method
from samestep.lint.library.data_library import first_length
from samestep.lint.values import (
    ContainerValue,
    ModelValue,
    Taint,
    TensorContent,
    TensorValue,
    Value,
    merge_taints,
    options_of,
)

IS_SHARD: Final = "is the shard of this rank"
"""The end of the text of a taint."""
NONLINEAR: Final = frozenset({"exp", "exp2", "expm1", "sqrt", "rsqrt", "log", "log2", "log10", "square"})
"""Functions of a number, of which the mean is not that of the number."""
_SELECTING: Final = ("nonzero", "argwhere", "masked_select", "flatnonzero")
"""Functions whose results have as many rows as samples satisfy a condition."""
_LISTING: Final = ("tensor", "as_tensor", "cat", "concat", "stack", "hstack", "vstack", "clone")
_JOINS: Final = ("cat", "concat", "stack", "_flatten_dense_tensors", "parameters_to_vector", "clone")
_OUTPUTS: Final = ("loss", "logits", "last_hidden_state", "pooler_output", "T", "mT")

# -- functions


@known_function("torch.no_grad", "torch.inference_mode")
def _context(call: Call) -> Value:
    return Value(call.location, name=call.last)


@known_functions(lambda package, name: package.split(".")[0] == "torch" and name.lstrip("_")[:1].islower())
def _tensor(call: Call) -> Value:
    call.emit("call", name=call.name, arguments=call.arguments, keywords=call.keywords)
    inputs = call.inputs
    tensors = [item for each in inputs for item in (each.values() if isinstance(each, ContainerValue) else [each])]
    needs_grad = any(isinstance(each, TensorValue) and each.needs_grad for each in tensors)
    first = next((each for each in tensors if isinstance(each, TensorValue)), None)
    is_join = call.last in _JOINS and first is not None
    content: TensorContent = first.content if first is not None and is_join else ""
    return TensorValue(
        call.location, call.taints, needs_grad=needs_grad and call.run.no_grad == 0,
        is_mean=call.last == "mean" or (first is not None and first.is_mean),
        is_ratio=first is not None and first.is_ratio, is_count=call.last in ("sum", "count_nonzero", "numel"),
        parts=tuple(inputs), length=first_length(call), name=call.name, content=content,
        models=first.models if first is not None and is_join else (), selected=_selected(call, tensors),
    )  # fmt: skip


def _selected(call: Call, tensors: list[Value]) -> Location | None:
    """Where the rows of a result were chosen by a condition on samples, if they were."""
    if call.last in _SELECTING and any(each.differs for each in call.arguments[:2]):
        return call.location
    if call.last == "bincount" and call.get("minlength", 2) is None and call.taints:
        return call.location
    if call.last not in _LISTING:
        return None
    return next((each.selected for each in tensors if isinstance(each, TensorValue) and each.selected), None)


@known_function(
    "math.exp", "math.exp2", "math.expm1", "math.sqrt", "math.log", "math.log2", "math.log10", "numpy.exp",
    "numpy.sqrt", "numpy.log",
)  # fmt: skip
def _of_number(call: Call) -> Value:
    """A number that derives from another one."""
    number = next((each for value in call.arguments[:1] for each in options_of(value)), None)
    return tensor_method(call, number) if isinstance(number, TensorValue) else call.unknown_result()


# -- attributes and methods


@known_attribute("value", "dtype", "device", "ndim", "shape", "is_nested")
@known_attribute("tensor", "dtype", "device", "is_cuda", "requires_grad", "ndim", "is_leaf", "shape", "layout")
@known_attribute("tensor", "is_nested", "is_sparse", "is_meta", "is_quantized")
def _same_on_all_ranks(owner: Value, name: str, location: Location) -> Value:
    """What the samples in a tensor do not change."""
    return Value(location, size_of=owner if name == "shape" else None)


@known_attribute("tensor", "data", "grad", *_OUTPUTS)
def _tensor_attribute(owner: Value, name: str, location: Location) -> Value | None:
    if not isinstance(owner, TensorValue):
        return None
    if name == "data":
        return owner
    if name == "grad":
        content: TensorContent = "gradient" if owner.content in ("parameter", "state") else ""
        taints = (Taint("data", location, f"`grad` {IS_SHARD}"),) if content and _is_flat(owner) else ()
        return TensorValue(location, taints, content=content, models=owner.models)
    is_mean = owner.is_mean or name == "loss"
    return replace(owner, location=location, is_mean=is_mean, operation="", parts=(owner,), content="", models=())


def _is_flat(owner: TensorValue) -> bool:
    """Whether FullyShardedDataParallel owns a parameter: its gradient is a part, which knows nothing of the rest."""
    return any(
        isinstance(each, ModelValue) and each.name == "FullyShardedDataParallel"
        for model in owner.models
        for each in options_of(model)
    )


@known_attribute("tensor", "_local_tensor")
def _local_tensor(owner: Value, name: str, location: Location) -> Value | None:
    return _shard_of(owner, name, location)


@known_method("tensor", "to_local")
def _to_local(call: Call, owner: Value) -> Value:
    """The part of a DTensor that this rank has."""
    return _shard_of(owner, "to_local()", call.location) or call.unknown_result(owner)


def _shard_of(owner: Value, name: str, location: Location) -> Value | None:
    if not isinstance(owner, TensorValue):
        return None
    own = Value(taints=(Taint("data", location, f"`{name}` {IS_SHARD}"),))
    return replace(owner, location=location, taints=merge_taints([owner, own]))


@known_method(
    "tensor", "to", "cuda", "float", "cpu", "double", "squeeze", "unsqueeze", "flatten", "view", "reshape", "half",
    "bfloat16", "contiguous", "view_as", "type_as", "long", "int", "clamp", "clamp_min", "expand", "bool",
)  # fmt: skip
def _same(call: Call, owner: Value) -> Value:
    if call.last in ("cuda", "to"):
        call.emit("to_device", owner=owner, device=call.get("device", 0))
    return owner


@known_method("tensor", "detach", "clone", "item", "tolist", "numpy")
def _copy(call: Call, owner: Value) -> Value:
    """What is known of the tensor stays known, but a collective on the copy does not change the original."""
    if not isinstance(owner, TensorValue):
        return call.unknown_result(owner)
    keeps_grad = call.last == "clone" and owner.needs_grad
    parts = (owner,) if keeps_grad else owner.parts
    return replace(owner, location=call.location, needs_grad=keeps_grad, parts=parts, operation=owner.operation)


@known_method("tensor", "backward")
@known_method("value", "backward")
def _backward(call: Call, owner: Value) -> Value:
    call.emit("backward", loss=owner, via="tensor")
    return Value(call.location)


@known_method("tensor", "mean", "sum", "numel", "size")
def _reduce(call: Call, owner: Value) -> Value:
    if not isinstance(owner, TensorValue):
        return call.unknown_result(owner)
    is_whole = not call.arguments and "dim" not in call.keywords
    is_mean = call.last == "mean" and is_whole
    dimension = call.get("dim", 0)
    over = "" if is_whole else f"({0 if dimension is not None and dimension.constant == 0 else 'dim'})"
    return replace(
        owner, location=call.location, is_mean=owner.is_mean or is_mean, is_ratio=owner.is_ratio or is_mean,
        is_count=call.last in ("sum", "numel", "size") and not owner.needs_grad, parts=(owner,), operation="",
        content="", name=f"Tensor.{call.last}{over}", selected=owner.selected if over == "(dim)" else None,
    )  # fmt: skip


@known_method("tensor", "median", "nanmedian", "quantile", "nanquantile", "std", "var")
def _statistic(call: Call, owner: Value) -> Value:
    """A number about all samples, which cannot be averaged over parts of them."""
    result = tensor_method(call, owner) if isinstance(owner, TensorValue) else call.unknown_result(owner)
    is_whole = "dim" not in call.keywords and not (call.arguments and call.last in ("median", "std", "var"))
    return replace(result, is_ratio=True) if is_whole and isinstance(result, TensorValue) else result


@known_method("tensor", "div", "mul", "true_divide")
def _scale(call: Call, owner: Value) -> Value:
    if not isinstance(owner, TensorValue):
        return call.unknown_result(owner)
    operation = "*" if call.last == "mul" else "/"
    return replace(owner, location=call.location, is_divided=True, parts=(owner, *call.arguments), operation=operation)


@known_method(
    "tensor", "add_", "mul_", "div_", "copy_", "lerp_", "sub_", "addcmul_", "addcdiv_", "true_divide_", "index_add_",
    "scatter_add_", "scatter_", "index_copy_", "clamp_", "clamp_min_", "clamp_max_",
)  # fmt: skip
def _in_place(call: Call, owner: Value) -> Value:
    owner.taints = merge_taints([owner, *call.inputs])
    call.emit("in_place", owner=owner, name=call.last, value=call.arguments[-1] if call.arguments else None)
    return owner


def tensor_method(call: Call, owner: TensorValue) -> Value:
    """A method of a tensor that is not known: its result derives from the tensor and the arguments."""
    parts = [owner, *(each for each in call.inputs if each is not owner)]
    needs_grad = any(isinstance(each, TensorValue) and each.needs_grad for each in parts) and call.run.no_grad == 0
    return TensorValue(
        call.location, merge_taints(parts), needs_grad=needs_grad, is_mean=owner.is_mean, is_reduced=owner.is_reduced,
        is_noise=owner.is_noise, is_ratio=owner.is_ratio and call.last in NONLINEAR, parts=tuple(parts), name=call.last,
        selected=call.location if call.last in _SELECTING and owner.differs else None,
    )  # fmt: skip
