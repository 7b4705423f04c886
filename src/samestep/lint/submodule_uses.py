"""Whether the forward pass of a module uses one of its submodules with gradients, read from the text of its class."""

import ast
from collections.abc import Iterator
from typing import Final

from samestep.lint.rule import Analysis
from samestep.lint.source_files import SourceFile
from samestep.lint.values import ClassValue, InstanceValue

_NOT_A_USE: Final = frozenset({
    "parameters", "named_parameters", "state_dict", "load_state_dict", "eval", "train", "to", "cuda", "requires_grad_",
    "buffers", "named_buffers", "apply", "zero_grad", "named_modules", "half", "float", "bfloat16", "in_features",
    "out_features",
})  # fmt: skip
_DYNAMIC: Final = frozenset({
    "getattr", "children", "named_children", "modules", "named_modules", "_modules", "__dict__", "vars",
    "get_submodule",
})  # fmt: skip
_CONTAINERS: Final = ("Sequential", "ModuleList", "ModuleDict")


def is_used_with_gradient(analysis: Analysis, owner: InstanceValue, name: str) -> bool:
    """Whether gradients may reach a submodule; also true if the text does not tell."""
    classes = (
        [each for each in owner.class_value.ancestors() if isinstance(each, ClassValue)] if owner.class_value else []
    )
    if not classes or owner.class_value is None or owner.class_value.derives_from(*_CONTAINERS, "LightningModule"):
        return True
    if owner.class_value.method("forward") is None or len(classes) > 1:
        return True
    definition = classes[0].node
    if definition is None or _is_dynamic(definition):
        return True
    return any(_is_use(file, node, definition) for file in analysis.files for node in _mentions(file, name))


def _is_dynamic(definition: ast.ClassDef) -> bool:
    """Whether a class reaches its submodules without their names."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and node.attr in _DYNAMIC:
            return True
        if isinstance(node, ast.Name) and node.id in _DYNAMIC:
            return True
    return False


def _mentions(file: SourceFile, name: str) -> Iterator[ast.Attribute]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
            yield node


def _is_use(file: SourceFile, node: ast.Attribute, definition: ast.ClassDef) -> bool:
    parent = file.parents.get(node)
    if isinstance(parent, ast.Attribute) and parent.attr in _NOT_A_USE:
        return False
    if isinstance(parent, ast.Call) and node in parent.args and _is_copy(parent):
        return False
    current: ast.AST = node
    while current in file.parents:
        current = file.parents[current]
        if isinstance(current, ast.With) and any(_has_no_grad(item.context_expr) for item in current.items):
            return False
        if isinstance(current, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(_has_no_grad(each) for each in current.decorator_list):
                return False
            is_constructor = current.name == "__init__" and file.parents.get(current) is definition
            return not is_constructor or not _is_self(node)
    return True


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_copy(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("deepcopy", "copy")


def _has_no_grad(node: ast.expr) -> bool:
    return any(
        (isinstance(each, ast.Attribute) and each.attr in ("no_grad", "inference_mode"))
        or (isinstance(each, ast.Name) and each.id in ("no_grad", "inference_mode"))
        for each in ast.walk(node)
    )
