"""What each type of statement does: a function per type, in `STATEMENTS`."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from samestep.lint.abstract_interpreter import Frame, Interpreter, Leaves, Outcome, StatementTable, last_name
from samestep.lint.events import Guard, Loop
from samestep.lint.expressions import assign, call, imported_value
from samestep.lint.library.operations import LOCK, combine, context_name, element, entered_value, single_items
from samestep.lint.project_calls import decorators
from samestep.lint.rank_names import NAMESPACE
from samestep.lint.values import (
    ClassValue,
    ContainerValue,
    ExternalValue,
    FunctionValue,
    ImportedValue,
    InstanceValue,
    ModuleState,
    Scope,
    Value,
    choose,
    is_same_value,
    merge_taints,
    options_of,
    part_of,
    without_number,
)

_EXITS: Final = {"sys.exit", "exit", "quit", "os._exit"}
_Attributes = dict[tuple[int, str], tuple[InstanceValue, str, Value | None, Value | None]]


def _run_expression(run: Interpreter, node: ast.Expr) -> Outcome | None:
    run.evaluate(node.value)
    if isinstance(node.value, ast.Call) and last_name(node.value) in ("exit", "_exit", "quit"):
        function = run.evaluate(node.value.func)
        if isinstance(function, ExternalValue) and function.qualname in _EXITS:
            return Outcome("program" if _is_failure(run, node.value) else "function")
    return None


def _is_failure(run: Interpreter, node: ast.Call) -> bool:
    """Whether the launcher ends all ranks if one exits so: with a status that is not 0."""
    status = run.evaluate(node.args[0]) if node.args else None
    return status is not None and (not status.is_known or status.constant not in (0, None))


def _run_assign(run: Interpreter, node: ast.Assign) -> None:
    value = run.evaluate(node.value)
    for target in node.targets:
        assign(run, target, value, node)


def _run_annotated(run: Interpreter, node: ast.AnnAssign) -> None:
    if node.value is not None:
        assign(run, node.target, run.evaluate(node.value), node)


def _run_augmented(run: Interpreter, node: ast.AugAssign) -> None:
    before, value = run.evaluate(node.target), run.evaluate(node.value)
    if isinstance(before, ContainerValue) and isinstance(node.op, ast.Add):
        items = list(value.values()) if isinstance(value, ContainerValue) else [value]
        for item in items:
            before.items[len(before.items)] = item
        before.taints = merge_taints([before, value])
        return
    made = combine(run, node, before, value, node.op)
    is_outer = isinstance(node.target, ast.Name) and node.target.id in run.frame.scope.outer
    assign(run, node.target, without_number(made) if is_outer and run.is_repeated else made, node)


# -- conditions


def _run_if(run: Interpreter, node: ast.If) -> Outcome | None:
    test = run.evaluate(node.test)
    if test.truth is not None:
        return run.block(node.body if test.truth else node.orelse)
    guard = Guard(run.locate(node), test.taints, node, node.test, clock=test.clock)
    opposite = replace(guard, is_negated=True)
    scope, before, mark = run.frame.scope, dict(run.frame.scope.names), len(run.attribute_writes)
    first = _guarded(run, guard, node.body)
    first_names, first_attributes = scope.names, _take_back(run, mark)
    scope.names = dict(before)
    second = _guarded(run, opposite, node.orelse)
    second_names, second_attributes = scope.names, _take_back(run, mark)
    if first.leaves and second.leaves:
        _leave(run, first, first_attributes)
        _leave(run, second, second_attributes)
        return Outcome(_leave_both(first, second))
    if first.leaves:
        _keep(run, second_attributes)
        _leave(run, first, first_attributes)
        return _followed_by(opposite, first, second)
    if second.leaves:
        scope.names = first_names
        _keep(run, first_attributes)
        _leave(run, second, second_attributes)
        return _followed_by(guard, second, first)
    scope.names = _join(first_names, second_names, test)
    _join_attributes(run, first_attributes, second_attributes, test)
    return Outcome("", _differing(first.guards, second.guards), _differing(first.loop_guards, second.loop_guards))


def _leave_both(first: Outcome, second: Outcome) -> Leaves:
    leaves = {first.leaves, second.leaves} - {"program"}
    return "loop" if "loop" in leaves else "function" if leaves else "program"


def _guarded(run: Interpreter, guard: Guard, statements: Sequence[ast.stmt]) -> Outcome:
    with run.inside(guard):
        return run.block(statements)


def _followed_by(guard: Guard, left: Outcome, stayed: Outcome) -> Outcome:
    """What follows a condition of which one branch leaves, runs only if the other was taken."""
    guards, loop_guards = _differing(stayed.guards), _differing(stayed.loop_guards)
    if left.leaves == "program":  # an error of one rank ends the others too
        return Outcome("", guards, loop_guards)
    if left.leaves == "function":
        return Outcome("", (guard, *guards), loop_guards)
    return Outcome("", guards, (guard, *loop_guards))


def _differing(*guards: tuple[Guard, ...]) -> tuple[Guard, ...]:
    return tuple(guard for each in guards for guard in each if guard.differs)


def _join(first: dict[str, Value], second: dict[str, Value], test: Value) -> dict[str, Value]:
    joined = dict(first)
    for name, other in second.items():
        one = joined.get(name)
        if one is None:
            joined[name] = other
        elif not is_same_value(one, other):
            joined[name] = _sent(one, other) or _sent(other, one) or choose([one, other], test.taints)
    return joined


def _sent(value: Value, received: Value) -> Value | None:
    """`if rank != 0: stop = objects[0]` after a broadcast of `[stop]`: all ranks have the same one."""
    known = [id(item) for each in options_of(received) for item in (each, each.sent)]
    is_inside = value.differs and not received.differs and all(id(each) in known for each in options_of(value))
    return received if is_inside else None


def _take_back(run: Interpreter, mark: int) -> _Attributes:
    """Undo the attributes that a branch assigned; returns what they were and what they became."""
    found: _Attributes = {}
    for owner, name, before in run.attribute_writes[mark:]:
        found.setdefault((id(owner), name), (owner, name, before, owner.attributes.get(name)))
    for owner, name, before, _ in found.values():
        if before is None:
            owner.attributes.pop(name, None)
        else:
            owner.attributes[name] = before
    del run.attribute_writes[mark:]
    return found


def _keep(run: Interpreter, attributes: _Attributes) -> None:
    for owner, name, _, after in attributes.values():
        if after is not None:
            run.set_attribute(owner, name, after)


def _leave(run: Interpreter, outcome: Outcome, attributes: _Attributes) -> None:
    """Remember what a branch assigned that returns from its function: the caller may find it or what follows it."""
    if outcome.leaves == "function":
        run.frame.left_attributes += [
            (owner, name, after) for owner, name, _, after in attributes.values() if after is not None
        ]


def _join_attributes(run: Interpreter, first: _Attributes, second: _Attributes, test: Value) -> None:
    for key in dict.fromkeys([*first, *second]):
        owner, name, before, _ = first.get(key) or second[key]
        options = [branch[key][3] if key in branch else before for branch in (first, second)]
        known = [each for each in options if each is not None]
        if known:
            run.set_attribute(owner, name, choose(known, test.taints))


def _run_match(run: Interpreter, node: ast.Match) -> Outcome | None:
    subject = run.evaluate(node.subject)
    scope, before = run.frame.scope, dict(run.frame.scope.names)
    joined = dict(before)
    for case in node.cases:
        scope.names = dict(before)
        for pattern in ast.walk(case.pattern):
            name = getattr(pattern, "name", None) or getattr(pattern, "rest", None)
            if isinstance(name, str):
                scope.set(name, part_of(subject))
        if case.guard is not None:
            run.evaluate(case.guard)
        guard = Guard(run.locate(case.pattern), subject.taints, case, node.subject, kind="case")
        outcome = _guarded(run, guard, case.body)
        if not outcome.leaves:
            joined = _join(joined, scope.names, subject)
    scope.names = joined


# -- loops


def _run_for(run: Interpreter, node: ast.For | ast.AsyncFor) -> Outcome | None:
    iterable = run.evaluate(node.iter)
    first, *others = single_items(iterable) or [element(run, iterable, node)]
    assign(run, node.target, first, node)
    loop = Loop(run.locate(node), node, iterable, scope=run.frame.scope)
    return _loop(run, loop, node, node.iter, iterable, others)


def _run_while(run: Interpreter, node: ast.While) -> Outcome | None:
    test = run.evaluate(node.test)
    return _loop(run, Loop(run.locate(node), node, test=test, scope=run.frame.scope), node, node.test, test)


def _loop(
    run: Interpreter, loop: Loop, node: ast.For | ast.AsyncFor | ast.While, condition: ast.expr, controlling: Value,
    others: Sequence[Value] = (),
) -> Outcome | None:  # fmt: skip
    """Follow the body of a loop once, and again for other items that are known."""
    guards = list[Guard]()
    if controlling.depends_on_rank:
        guards.append(Guard(loop.location, controlling.taints, node, condition, kind="loop"))
    _forget_changed(run, node)
    loops, run.loops = run.loops, (*run.loops, loop)
    with run.inside(*guards):
        run.emit("loop", node, loop=loop)
        outcome = run.block(node.body)
        guards = [*outcome.guards]
        for item in others if outcome.leaves in ("", "loop") else ():
            if not isinstance(node, ast.While):
                assign(run, node.target, item, node)
            guards += run.block(node.body).guards
    run.loops = loops
    run.block(node.orelse)
    left = _differing(tuple(guards))
    return Outcome("", left) if left else None


def _forget_changed(run: Interpreter, node: ast.For | ast.AsyncFor | ast.While) -> None:
    """Numbers that the body of a loop changes are not those from before the loop in later iterations."""
    names, known = run.frame.scope.names, run.frame.module.file.changed_names
    changed = known.get(node)
    if changed is None:
        changed = {target.id for each in ast.walk(node) if (target := _changed_name(each)) is not None}
        known[node] = changed
    for name in changed & names.keys():
        names[name] = without_number(names[name])


def _changed_name(node: ast.AST) -> ast.Name | None:
    """The name that a statement such as `step += 1` or `step = step + 1` changes."""
    match node:
        case ast.AugAssign(target=ast.Name() as target):
            return target
        case ast.Assign(targets=[ast.Name() as target], value=ast.BinOp()):
            return target
        case _:
            return None


# -- contexts and exceptions


def _run_with(run: Interpreter, node: ast.With | ast.AsyncWith) -> Outcome:
    names = list[str]()
    for item in node.items:
        value = run.evaluate(item.context_expr)
        own = context_name(Value(name=last_name(item.context_expr)))  # of a function of the project
        names += sorted({own if own == LOCK else "", *(context_name(each) for each in options_of(value))} - {""})
        if item.optional_vars is not None:
            assign(run, item.optional_vars, entered_value(value), node)
    contexts, run.contexts = run.contexts, (*run.contexts, *names)
    with run.inside(no_grad="no_grad" in names or "inference_mode" in names):
        outcome = run.block(node.body)
    run.contexts = contexts
    return outcome


def _run_try(run: Interpreter, node: ast.Try | ast.TryStar) -> Outcome | None:
    guards = [Guard(run.locate(node), node=node, label="try", kind="try")] if node.handlers else []
    with run.inside(*guards):
        outcome = run.block(node.body)
    for handler in node.handlers:
        if handler.name is not None:
            run.frame.scope.set(handler.name, Value(run.locate(handler)))
        if handler.type is not None:
            run.evaluate(handler.type)
        _guarded(run, Guard(run.locate(handler), node=handler, label="except", kind="except"), handler.body)
    if not outcome.leaves:
        run.block(node.orelse)
    run.block(node.finalbody)
    return None if node.handlers else outcome


def _run_return(run: Interpreter, node: ast.Return) -> Outcome:
    value = run.evaluate(node.value) if node.value is not None else Value(constant=None)
    guards = [guard for guard in run.guards[run.frame.first_guard :] if guard.differs]
    if guards and node.value is not None:
        value = replace(value, taints=merge_taints([value, Value(taints=guards[-1].taints)]))
    run.emit("return", node, value=value)
    run.frame.returns.append(value)
    return Outcome("function")


def _run_raise(run: Interpreter, node: ast.Raise) -> Outcome:
    if node.exc is not None:
        run.evaluate(node.exc)
    run.emit("raise", node)
    return Outcome("program")


def _run_break(run: Interpreter, node: ast.Break) -> Outcome:
    run.emit("break", node)
    return Outcome("loop")


def _run_continue(run: Interpreter, node: ast.Continue) -> Outcome:
    run.emit("continue", node)
    return Outcome("loop")


def _run_assert(run: Interpreter, node: ast.Assert) -> None:
    """`assert not args.evolve` and `assert len(files) == 1` say what something is from here on."""
    run.evaluate(node.test)
    match node.test:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Attribute(value=owner, attr=name)):
            for option in options_of(run.evaluate(owner)):
                if isinstance(option, InstanceValue) and option.qualname == NAMESPACE:
                    run.set_attribute(option, name, Value(run.locate(node), constant=False))
        case ast.Compare(left=ast.Call(func=ast.Name(id="len"), args=[items]), ops=[ast.Eq()]):
            for option in options_of(run.evaluate(items)):
                if isinstance(option, ContainerValue) and _is_one(node.test):
                    option.is_unordered, option.order_from = False, None  # one item has no order
        case _:
            return


def _is_one(test: ast.Compare) -> bool:
    return isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value == 1


def _run_delete(run: Interpreter, node: ast.Delete) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            run.frame.scope.names.pop(target.id, None)


def _run_global(run: Interpreter, node: ast.Global) -> None:
    for name in node.names:
        run.frame.scope.outer[name] = run.frame.module.scope


def _run_nonlocal(run: Interpreter, node: ast.Nonlocal) -> None:
    for name in node.names:
        scope = run.frame.scope.parent
        while scope is not None and name not in scope.names:
            scope = scope.parent
        if scope is not None:
            run.frame.scope.outer[name] = scope


# -- modules, functions and classes


def _run_import(run: Interpreter, node: ast.Import) -> None:
    for alias in node.names:
        first = alias.name.split(".")[0]
        name = alias.name if alias.asname else first
        is_own = name in run.files
        value = _when_used(run, ImportedValue(base=name)) if is_own else ExternalValue(qualname=name)
        run.frame.scope.set(alias.asname or first, value)


def _run_import_from(run: Interpreter, node: ast.ImportFrom) -> None:
    base = _absolute(run.frame.module, node)
    for alias in node.names:
        name = alias.asname or alias.name
        if alias.name != "*":
            is_own = base in run.files or f"{base}.{alias.name}" in run.files
            imported = ImportedValue(base=base, attribute=alias.name)
            external = ExternalValue(qualname=f"{base}.{alias.name}")
            run.frame.scope.set(name, _when_used(run, imported) if is_own else external)
        elif base in run.files:
            names = run.load(run.files[base]).scope.names
            run.frame.scope.names |= {each: value for each, value in names.items() if not each.startswith("_")}


def _when_used(run: Interpreter, imported: ImportedValue) -> Value:
    """A script imports files at once, as they may start processes; other files import when a name is used."""
    module = run.frame.module
    return imported_value(run, imported) if module.is_main and module.file.runs else imported


def _absolute(module: ModuleState, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.file.name.split(".")
    is_package = module.file.path.stem == "__init__"
    kept = parts[: max(0, len(parts) - node.level + is_package)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _run_function(run: Interpreter, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    frame = run.frame
    around = frame.scope.parent if frame.is_class_body else frame.scope
    owner_class = frame.class_value if frame.is_class_body else None
    own = FunctionValue(run.locate(node), node=node, module=frame.module, scope=around, class_value=owner_class)
    value: Value = own
    for decorator in reversed(decorators(node)):
        function = run.evaluate(decorator)
        if isinstance(function, FunctionValue | ClassValue):
            value = call(run, function, [value], {}, _call_of(decorator))
    is_usable = isinstance(value, FunctionValue) or (isinstance(value, InstanceValue) and not frame.is_class_body)
    frame.scope.set(node.name, value if is_usable else own)


def _call_of(decorator: ast.expr) -> ast.Call:
    return ast.copy_location(ast.Call(decorator, [], []), decorator)


def _run_class(run: Interpreter, node: ast.ClassDef) -> None:
    frame = run.frame
    bases = tuple(option for base in node.bases for option in options_of(run.evaluate(base))[:1])
    around = frame.scope.parent if frame.is_class_body else frame.scope
    value = ClassValue(run.locate(node), node=node, module=frame.module, scope=around, bases=bases)
    scope = Scope(around)
    body = Frame(frame.module, scope, frame.function, class_value=value, is_class_body=True)
    with run.inside_frame(body):
        run.block(node.body)
    value.attributes = scope.names
    frame.scope.set(node.name, value)


STATEMENTS: Final[StatementTable] = {
    ast.AnnAssign: _run_annotated, ast.Assert: _run_assert, ast.Assign: _run_assign, ast.AsyncFor: _run_for,
    ast.AsyncFunctionDef: _run_function, ast.AsyncWith: _run_with, ast.AugAssign: _run_augmented, ast.Break: _run_break,
    ast.ClassDef: _run_class, ast.Continue: _run_continue, ast.Delete: _run_delete, ast.Expr: _run_expression,
    ast.For: _run_for, ast.FunctionDef: _run_function, ast.Global: _run_global, ast.If: _run_if,
    ast.Import: _run_import, ast.ImportFrom: _run_import_from, ast.Match: _run_match, ast.Nonlocal: _run_nonlocal,
    ast.Raise: _run_raise, ast.Return: _run_return, ast.Try: _run_try, ast.TryStar: _run_try,
    ast.While: _run_while, ast.With: _run_with,
}  # fmt: skip
