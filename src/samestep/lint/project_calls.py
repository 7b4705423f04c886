"""Calls of functions and classes of the project: arguments, decorators, and following their bodies."""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from samestep.lint.abstract_interpreter import Frame, Interpreter, function_location, last_name
from samestep.lint.events import Guard
from samestep.lint.rank_names import RANK_DECORATORS, RANK_NAMES, guess, named
from samestep.lint.values import (
    OWN_BATCH,
    ChoiceValue,
    ClassValue,
    ContainerValue,
    Function,
    FunctionValue,
    InstanceValue,
    SamplerValue,
    Scope,
    Taint,
    TensorValue,
    Value,
    choose,
    merge_taints,
    options_of,
)

_MAX_FRAMES: Final = 14
_MAX_CALLS: Final = 16  # of one function; the same events from more lines add nothing


def call_function(
    run: Interpreter, function: FunctionValue, arguments: Sequence[Value], keywords: Mapping[str, Value], node: ast.AST
) -> Value:
    """Follow a function of the project; a call that is not followed returns what its arguments taint."""
    definition, module = function.node, function.module
    if definition is None or module is None:
        return Value(taints=merge_taints([*arguments, *keywords.values()]))
    key = None if arguments or keywords else (definition, function.owner)
    if not _is_followed(run, definition):
        known = run.results.get(key) if key is not None else None
        return known or Value(taints=merge_taints([*arguments, *keywords.values()]))
    scope = Scope(function.scope)
    _bind(run, definition, function, arguments, keywords, scope)
    guards = _decorator_guards(definition, function)
    no_grad = any(last_name(each) in ("no_grad", "inference_mode") for each in decorators(definition))
    run.entered[definition] += 1
    run.active.add(definition)
    calls, run.calls = run.calls, (*run.calls, run.locate(node))
    frame = Frame(module, scope, definition, function.owner, function.class_value)
    frame.first_guard = len(run.guards) + len(guards)
    with run.inside(*guards, no_grad=no_grad), run.inside_frame(frame):
        if isinstance(definition, ast.Lambda):
            frame.returns.append(run.evaluate(definition.body))
        else:
            run.block(definition.body)
    for owner, name, value in frame.left_attributes:
        known = owner.attributes.get(name)
        run.set_attribute(owner, name, value if known is None else choose([known, value]))
    run.calls = calls
    run.active.discard(definition)
    result = _synchronized(_result(frame)) if _is_synchronized(definition, function) else _result(frame)
    if key is not None:
        run.results[key] = result
    return result


def _is_followed(run: Interpreter, definition: Function) -> bool:
    return (
        definition not in run.active and len(run.frames) <= _MAX_FRAMES and run.entered[definition] < _MAX_CALLS
    ) and not run.is_exhausted


def _result(frame: Frame) -> Value:
    if frame.yields:
        is_context = any("contextmanager" in last_name(each) for each in decorators(frame.function))
        items = {0: choose(frame.yields)}
        return items[0] if is_context else ContainerValue(taints=merge_taints(items.values()), items=dict(items))
    return choose(frame.returns) if frame.returns else Value(constant=None)


def _is_synchronized(definition: Function, function: FunctionValue) -> bool:
    """Whether it is `compute` of a metric of torchmetrics, which reduces its states over all ranks before."""
    known = function.owner.class_value if isinstance(function.owner, InstanceValue) else None
    if getattr(definition, "name", "") != "compute" or known is None or known.node is None:
        return False
    return known.derives_from("torchmetrics.Metric") and "sync_on_compute" not in ast.unparse(known.node)


def _synchronized(value: Value) -> Value:
    """A value that is the same on all ranks."""
    if isinstance(value, ChoiceValue):
        return choose([_synchronized(each) for each in options_of(value)])
    if isinstance(value, ContainerValue):
        return replace(value, taints=(), items={key: _synchronized(each) for key, each in value.items.items()})
    return replace(value, taints=(), is_reduced=True) if isinstance(value, TensorValue) else replace(value, taints=())


def decorators(definition: ast.AST | None) -> list[ast.expr]:
    """The decorators of a function or class; none of a lambda."""
    return getattr(definition, "decorator_list", [])


def _decorator_guards(definition: Function, function: FunctionValue) -> list[Guard]:
    guards = list[Guard]()
    for decorator in decorators(definition):
        name, own = last_name(decorator), getattr(definition, "name", "it")
        if name in RANK_DECORATORS and function.module is not None:
            location = function.module.file.locate(decorator, own)
            taint = Taint("rank", location, f"`@{name}` runs {own} on one rank only")
            guards.append(Guard(location, (taint,), decorator, label=f"@{name}", kind="decorator"))
    return guards


def _bind(
    run: Interpreter, definition: Function, function: FunctionValue, arguments: Sequence[Value],
    keywords: Mapping[str, Value], scope: Scope,
) -> None:  # fmt: skip
    parameters = definition.args
    positional = [*parameters.posonlyargs, *parameters.args]
    values = _with_owner(definition, function, arguments)
    defaults = _defaults(parameters)
    location = function_location(function)
    for position, parameter in enumerate((*positional, *parameters.kwonlyargs)):
        name = parameter.arg
        if name in keywords:
            value = keywords[name]
        elif position < min(len(values), len(positional)):
            value = values[position]
        elif name in defaults:
            value = _default(run, defaults[name], function)
        else:
            value = Value(location)
        if name in RANK_NAMES and value.is_known and _is_spawned(function):
            value = Value(location)  # `worker(rank=0)` instead of `spawn(worker)`, if there is one GPU
        scope.names[name] = named(value, name, location) if location is not None else value
    if parameters.vararg is not None:
        rest = values[len(positional) :]
        scope.names[parameters.vararg.arg] = ContainerValue(
            taints=merge_taints(rest), items=dict(enumerate(rest)), length=len(rest)
        )
    if parameters.kwarg is not None:
        left = {name: value for name, value in keywords.items() if name not in scope.names}
        scope.names[parameters.kwarg.arg] = ContainerValue(taints=merge_taints(left.values()), items=dict(left))


def _is_spawned(function: FunctionValue) -> bool:
    """Whether the file of a function also passes it to `spawn`."""
    name = getattr(function.node, "name", "")
    text = function.module.file.text if function.module is not None else ""
    return bool(name) and re.search(rf"(?:spawn|start_processes)\(\s*(?:fn\s*=\s*)?{name}\b", text) is not None


def _with_owner(definition: Function, function: FunctionValue, arguments: Sequence[Value]) -> list[Value]:
    """The positional arguments with `self`."""
    is_static = any(last_name(each) == "staticmethod" for each in decorators(definition))
    if function.owner is not None and not is_static:
        return [function.owner, *arguments]
    takes_self = [each.arg for each in definition.args.args[:1]] in (["self"], ["cls"])
    if function.class_value is not None and takes_self and not arguments:
        return [InstanceValue(class_value=function.class_value)]
    return list(arguments)


def _defaults(parameters: ast.arguments) -> dict[str, ast.expr]:
    names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
    found = dict(zip(names[::-1], parameters.defaults[::-1], strict=False))
    keyword_only = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    return found | {each.arg: value for each, value in keyword_only if value is not None}


def _default(run: Interpreter, node: ast.expr, function: FunctionValue) -> Value:
    if isinstance(node, ast.Constant):
        return Value(constant=node.value)
    module = function.module
    if module is None:
        return Value()
    with run.inside_frame(Frame(module, function.scope or module.scope)):
        return run.evaluate(node)


def unknown_arguments(function: FunctionValue) -> list[Value]:
    """Arguments of a function that the project does not call, by their names: batches differ between ranks."""
    location = function_location(function)
    if function.node is None or location is None:
        return []
    names = [each.arg for each in (*function.node.args.posonlyargs, *function.node.args.args)]
    found = list[Value]()
    for name in names[1:] if function.owner is not None else names:
        if name in ("batch", "outputs", "output"):
            found.append(TensorValue(location, (Taint("data", location, OWN_BATCH),)))
        else:
            found.append(guess(name, location))
    return found


def create(
    run: Interpreter, class_value: ClassValue, arguments: Sequence[Value], keywords: Mapping[str, Value], node: ast.Call
) -> Value:
    """Create an object of a class of the project."""
    named_arguments = {str(position): value for position, value in enumerate(arguments)} | dict(keywords)
    taints = merge_taints(named_arguments.values())
    instance = InstanceValue(run.locate(node), taints, class_value=class_value, arguments=named_arguments)
    constructor = class_value.method("__init__", instance)
    if constructor is not None:
        call_function(run, constructor, arguments, keywords, node)
        attributes = [each for each in instance.attributes.values() if not isinstance(each, FunctionValue)]
        instance.taints = merge_taints(attributes)
    else:
        fields = _fields(class_value)
        instance.attributes |= dict(zip(fields, arguments, strict=False)) | dict(keywords) if fields else {}
    if class_value.derives_from("Sampler"):
        options: dict[str, Value] = {"instance": instance}
        return SamplerValue(instance.location, instance.taints, kind=instance.class_name, options=options)
    run.emit("create", node, instance=instance)
    return instance


def _fields(class_value: ClassValue) -> list[str]:
    """The fields of a dataclass, a NamedTuple or another class without a constructor, those of its bases first."""
    found = dict[str, None]()
    for each in reversed(list(class_value.ancestors())):
        if isinstance(each, ClassValue) and each.node is not None:
            for statement in each.node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    found[statement.target.id] = None
    return list(found)
