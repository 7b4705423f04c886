"""Follow a script from its first line, then what frameworks call, then functions and classes that nothing calls."""

import ast
from collections.abc import Mapping, Sequence
from typing import Final

from samestep.lint.abstract_interpreter import MAX_STEPS, Frame, Interpreter
from samestep.lint.events import Guard
from samestep.lint.expressions import EXPRESSIONS
from samestep.lint.library.framework_library import HOOKS, LIGHTNING_CLASSES
from samestep.lint.project_calls import call_function, unknown_arguments
from samestep.lint.source_files import SourceFile
from samestep.lint.statements import STATEMENTS
from samestep.lint.values import (
    OWN_BATCH,
    ClassValue,
    FunctionValue,
    InstanceValue,
    ModuleState,
    ServiceValue,
    Taint,
    TensorValue,
    Value,
)

_LIBRARY_STEPS: Final = 20_000  # of a file that only defines something: the scripts that import it follow it too
_UNCALLED_STEPS: Final = 3_000  # of each function that nothing calls: it belongs to a library
_HOOK_STEPS: Final = 20_000


def follow(file: SourceFile, files: Mapping[str, SourceFile]) -> Interpreter:
    """Follow a file as a script; `files` are those that it may import, by their names."""
    run = Interpreter(files, STATEMENTS, EXPRESSIONS, MAX_STEPS if file.runs else _LIBRARY_STEPS)
    state = run.load(file, is_main=True)
    values = list(state.scope.names.values())
    with run.inside_frame(Frame(state, state.scope)):
        module: InstanceValue | None = None
        for value in sorted(_classes(run, state, values), key=lambda each: not each.derives_from("LightningModule")):
            instance = _follow_class(run, value, module)
            module = instance if value.derives_from("LightningModule") else module
        for value in values:
            if isinstance(value, FunctionValue) and value.module is state and value.node not in run.entered:
                with run.inside(context="uncalled"), run.at_most(_UNCALLED_STEPS):
                    call_function(run, value, unknown_arguments(value), {}, value.node or ast.Pass())
    return run


def _classes(run: Interpreter, state: ModuleState, values: Sequence[Value]) -> list[ClassValue]:
    """The classes of the script, and those of Lightning that it creates objects of."""
    own = [value for value in values if isinstance(value, ClassValue) and value.module is state]
    kinds = {event.kind for event in run.events}
    created = [event.instance.class_value for event in run.events if event.kind == "create" and "trainer" in kinds]
    hooked = [each for each in created if each is not None and each.derives_from(*LIGHTNING_CLASSES)]
    return list({id(each): each for each in [*own, *hooked]}.values())


def _hook_order(name: str) -> int:
    """Steps store what the ends of epochs use."""
    return 0 if name in ("setup", "prepare_data") else 1 if name.endswith("_step") else 2


def _follow_class(run: Interpreter, value: ClassValue, module: InstanceValue | None) -> InstanceValue:
    """Call the methods of a class that Lightning calls, or that nothing calls; callbacks get the LightningModule."""
    is_lightning = value.derives_from(*LIGHTNING_CLASSES)
    instance = InstanceValue(value.location, class_value=value)
    constructor = value.method("__init__", instance)
    if constructor is not None and value.node is not None:
        with run.inside(context="uncalled"):
            call_function(run, constructor, unknown_arguments(constructor), {}, value.node)
    for name, found in sorted(value.attributes.items(), key=lambda item: _hook_order(item[0])):
        method = value.method(name, instance) if isinstance(found, FunctionValue) else None
        if method is None or method.node is None or method.module is None or name == "__init__":
            continue
        is_hook = is_lightning and name in HOOKS
        if is_hook or method.node not in run.entered:
            passed = module if is_hook and value.derives_from("Callback") else None
            _follow_method(run, method, method.node, method.module, name if is_hook else "", passed)
    return instance


def _follow_method(
    run: Interpreter, method: FunctionValue, node: ast.AST, module: ModuleState, hook: str, passed: InstanceValue | None
) -> None:
    location = module.file.locate(node, hook)
    guards = list[Guard]()
    if hook == "prepare_data":
        taint = Taint("rank", location, "Lightning calls prepare_data on one rank only")
        guards.append(Guard(location, (taint,), node, label="prepare_data", kind="decorator"))
    arguments = unknown_arguments(method)
    if hook:
        names = [each.arg for each in method.node.args.args[1:]] if method.node is not None else []
        arguments = [_hook_argument(name, value) for name, value in zip(names, arguments, strict=False)]
        if passed is not None and len(arguments) > 1:
            arguments[1] = passed
        if hook.endswith("_step") and arguments and hook != "optimizer_step":
            arguments[0] = TensorValue(location, (Taint("data", location, OWN_BATCH),))
    no_grad, context = HOOKS.get(hook) == "eval", f"hook:{hook}" if hook else "uncalled"
    with run.inside(*guards, context=context, no_grad=no_grad), run.at_most(_HOOK_STEPS if hook else _UNCALLED_STEPS):
        call_function(run, method, arguments, {}, node)


def _hook_argument(name: str, value: Value) -> Value:
    return ServiceValue(value.location, kind="trainer") if name == "trainer" else value
