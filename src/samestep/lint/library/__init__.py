"""What lint knows of torch, Lightning, Fabric, Accelerate and samestep: what their calls create and do.

`tensor_library` has the most general patterns, so its name must remain the last of those that register patterns.
"""

import ast
from typing import Final

from samestep.lint.abstract_interpreter import Interpreter
from samestep.lint.library import (
    collective_library,
    data_library,
    file_library,
    framework_library,
    model_library,
    python_library,
    tensor_library,
)
from samestep.lint.library.call import Call, canonical, find_function, find_method
from samestep.lint.library.model_library import call_model
from samestep.lint.library.tensor_library import tensor_method
from samestep.lint.rank_names import named_result
from samestep.lint.values import InstanceValue, MethodValue, ModelValue, TensorValue, Value, choose, options_of

SUBJECTS: Final = (
    python_library, collective_library, data_library, file_library, framework_library, model_library, tensor_library,
)  # fmt: skip


def call_external(
    run: Interpreter, name: str, arguments: list[Value], keywords: dict[str, Value], node: ast.Call
) -> Value:
    """Call a function or class of a package, by its full name."""
    call = Call(run, canonical(name), arguments, keywords, node)
    handler = find_function(call.name)
    if handler is not None:
        return handler(call)
    call.emit("call", name=call.name, arguments=arguments, keywords=keywords)
    return named_result(call.last, call.unknown_result(), call.location)


def call_object(
    run: Interpreter, function: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.Call
) -> Value | None:
    """Call a model, or a method of an object; None if it is neither."""
    if isinstance(function, MethodValue):
        call = Call(run, function.attribute, arguments, keywords, node)
        return choose([_call_method(call, owner, function) for owner in options_of(function.owner)])
    if isinstance(function, ModelValue) or (isinstance(function, InstanceValue) and function.is_module):
        return call_model(run, function, arguments, keywords, node)
    return None


def _call_method(call: Call, owner: Value, function: MethodValue) -> Value:
    handler = find_method(owner, call.name)
    if handler is not None:
        return handler(call, owner)
    call.emit("call", name=call.name, arguments=call.arguments, keywords=call.keywords, owner=owner)
    if isinstance(owner, TensorValue):
        return tensor_method(call, owner)
    return named_result(call.name, call.unknown_result(function), call.location)
