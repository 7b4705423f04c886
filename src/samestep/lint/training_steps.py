"""How a script takes a step: which backward passes belong to it, by what their losses are scaled, and on which
micro-batches gradients are exchanged.
"""

import ast
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from samestep.findings import Location
from samestep.lint.events import Event, Guard, Loop
from samestep.lint.function_source import function_around
from samestep.lint.rule import Analysis, is_wrapped
from samestep.lint.source_files import SourceFile
from samestep.lint.values import IteratorValue, TensorValue, Value, options_of

GROUP: Final = 4
"""Micro-batches of a step, where lint counts through a loop to see what happens when."""
BATCHES: Final = 10
"""Batches of an epoch, where lint counts through a loop; the last group is shorter."""
_MAX_GROUP: Final = 64
_DELAYING: Final = ("no_sync", "no_backward_sync")
_Functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_MAX_RESOLVED: Final = 5  # names that are assigned other names


@dataclass(eq=False)
class Accumulation:
    """Several backward passes before a step of the optimizer."""

    backward: Event
    step: Event
    loop: Loop
    """Over the micro-batches."""
    is_inner: bool
    """Whether the step follows the loop; else it is inside, under a condition on the number of the batch."""
    guards: tuple[Guard, ...] = ()
    """Conditions of the step inside of the loop, that the backward pass does not have."""
    count: ast.expr | None = None
    """The number of micro-batches."""


def step_of(analysis: Analysis, backward: Event) -> Event | None:
    """The step that applies the gradients of a backward pass: the next one that shares a loop or a call with it."""
    later = (event for event in analysis.of("optimizer_step") if event.order > backward.order)
    for step in later:
        if not backward.loops or (step.loops and step.loops[0] is backward.loops[0]):
            return step
    return None


def accumulations(analysis: Analysis) -> list[Accumulation]:
    """Where a script accumulates gradients by itself."""
    found = list[Accumulation]()
    for backward in analysis.of("backward"):
        step = step_of(analysis, backward)
        if step is None or not backward.loops or "accumulate" in backward.contexts:
            continue
        made = _in_same_loop(analysis, backward, step) or _after_loop(analysis, backward, step)
        if made is not None:
            found.append(made)
    return found


def _in_same_loop(analysis: Analysis, backward: Event, step: Event) -> Accumulation | None:
    """`if (i + 1) % 4 == 0: optimizer.step()` in the loop over the batches."""
    loop = backward.loops[-1]
    if loop not in step.loops:
        return None
    own = tuple(guard for guard in step.guards if guard not in backward.guards)
    for guard in own:
        condition = resolve(analysis, guard.condition, guard.location)
        count = _group_size(condition, loop)
        if count is not None:
            return Accumulation(backward, step, loop, False, own, count)
    return None


def accumulated_in_hook(analysis: Analysis, backward: Event) -> tuple[Event, ast.expr] | None:
    """The step of a `training_step` that accumulates, `if (i + 1) % 4 == 0: optimizer.step()`, and the 4."""
    step = step_of(analysis, backward)
    if step is None or step.loops or backward.loops or "accumulate" in backward.contexts:
        return None
    if not all("hook:training_step" in each.contexts for each in (backward, step)):
        return None
    for guard in step.guards:
        count = _modulus(resolve(analysis, guard.condition, guard.location)) if guard not in backward.guards else None
        if count is not None:
            return step, count
    return None


def _modulus(condition: ast.AST | None) -> ast.expr | None:
    """The 4 of `(i + 1) % 4 == 0`."""
    nodes = ast.walk(condition) if condition is not None else ()
    return next((each.right for each in nodes if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod)), None)


def _group_size(condition: ast.AST | None, loop: Loop) -> ast.expr | None:
    found = _modulus(condition)
    if found is not None:
        return found
    counters = {
        node.target.id
        for node in ast.walk(loop.node)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and isinstance(node.op, ast.Add)
    }
    match condition:
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq() | ast.GtE()], comparators=[count]) if name in counters:
            resets = (node for node in ast.walk(loop.node) if isinstance(node, ast.Assign))
            if any(isinstance(each, ast.Name) and each.id == name for node in resets for each in node.targets):
                return count
            return None
        case _:
            return None


def _after_loop(analysis: Analysis, backward: Event, step: Event) -> Accumulation | None:
    """`for micro_batch in micro_batches: ... loss.backward()`, and then `optimizer.step()`."""
    outer = len(step.loops)
    if not outer or len(backward.loops) <= outer or backward.loops[:outer] != step.loops:
        return None
    inner = backward.loops[outer]
    has_forward = any(event.order < backward.order for event in analysis.inside(inner, "model_call"))
    is_cleared = any(event.order < backward.order for event in analysis.inside(inner, "zero_grad"))
    if not has_forward or is_cleared or inner.loader is not None or not isinstance(inner.node, ast.For):
        return None
    if _reads_several_loaders(step.loops[-1]):
        return None  # a loss per task, whose sum is meant
    return Accumulation(backward, step, inner, True, (), _range_size(inner.node.iter))


def _reads_several_loaders(loop: Loop) -> bool:
    """Whether a loop reads batches of several loaders at once: `for batches in zip(*loaders)`."""
    return any(isinstance(each, IteratorValue) and each.kind == "zip" for each in options_of(loop.iterable))


def _range_size(iterable: ast.expr) -> ast.expr | None:
    match iterable:
        case ast.Call(func=ast.Name(id="range"), args=[count]):
            return count
        case ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=0), count]):
            return count
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
            return _range_size(inner)
        case _:
            return None


# -- factors of a loss


@dataclass(frozen=True, eq=False)
class Factor:
    """What a loss is multiplied with, or divided by."""

    operation: str
    """"*" or "/"."""
    operand: Value
    location: Location | None


def factors(loss: Value | None, limit: int = 60) -> list[Factor]:
    """By what a loss is scaled, from the outside in; the terms of a sum are all followed."""
    found, seen = list[Factor](), set[int]()
    waiting = list(options_of(loss))
    while waiting and len(seen) < limit:
        value = waiting.pop(0)
        if not isinstance(value, TensorValue) or id(value) in seen:
            continue
        seen.add(id(value))
        if value.operation in ("/", "*") and len(value.parts) > 1:
            scaled, operand = _scaled_part(value)
            found.append(Factor(value.operation, operand, value.location))
            waiting += options_of(scaled)
        elif value.operation in ("+", "-") or len(value.parts) == 1:
            waiting += [option for part in value.parts for option in options_of(part)]
    return found


def _scaled_part(value: TensorValue) -> tuple[Value, Value]:
    left, right = value.parts[0], value.parts[1]
    is_right = value.operation == "*" and not _needs_grad(left) and _needs_grad(right)
    return (right, left) if is_right else (left, right)


def _needs_grad(value: Value) -> bool:
    return any(isinstance(each, TensorValue) and each.needs_grad for each in options_of(value))


# -- counting through a loop


def file_of(analysis: Analysis, location: Location) -> SourceFile | None:
    """The file of a location."""
    return next((file for file in analysis.files if str(file.path) == location.file), None)


def resolve(
    analysis: Analysis, node: ast.AST | None, location: Location, known: Collection[str] = ()
) -> ast.expr | None:
    """An expression in which names are replaced by what is assigned to them, if that is one assignment.

    Names in `known` stay as they are.
    """
    file = file_of(analysis, location)
    if not isinstance(node, ast.expr) or file is None:
        return None
    around = _function_around(file, node) if node in file.parents else function_around(analysis, location)
    return _resolve(file, node, around or node, _MAX_RESOLVED, known)


def _function_around(file: SourceFile, node: ast.AST) -> ast.AST:
    while node in file.parents and not isinstance(node, _Functions):
        node = file.parents[node]
    return node


def _resolve(file: SourceFile, node: ast.expr, function: ast.AST, depth: int, known: Collection[str]) -> ast.expr:
    if isinstance(node, ast.Name) and depth and node.id not in known:
        found = assigned(file, function, node.id)
        return node if found is None else _resolve(file, found, function, depth - 1, known)
    if isinstance(node, ast.Constant | ast.Attribute | ast.Call | ast.Subscript | ast.Lambda):
        return node
    made = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            setattr(made, name, _resolve(file, value, function, depth, known))
        elif isinstance(value, list):
            items: list[Any] = [
                _resolve(file, each, function, depth, known) if isinstance(each, ast.expr) else each for each in value
            ]
            setattr(made, name, items)
    return made


def assigned(file: SourceFile, function: ast.AST, name: str) -> ast.expr | None:
    """What is assigned to a name of a function; the two branches of an `if` become a conditional expression."""
    found = list[ast.Assign]()
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign | ast.For | ast.NamedExpr) and _binds(node.target, name):
            return None
        if isinstance(node, ast.Assign) and any(_binds(target, name) for target in node.targets):
            if not isinstance(node.targets[0], ast.Name):
                return None
            found.append(node)
    if len(found) == 1:
        return found[0].value
    branch = file.parents.get(found[0]) if len(found) == 2 else None
    if isinstance(branch, ast.If) and found[0] in branch.body and found[1] in branch.orelse:
        return ast.copy_location(ast.IfExp(branch.test, found[0].value, found[1].value), found[0].value)
    return None


def _binds(target: ast.expr, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(target))


class UnknownValueError(Exception):
    """An expression has a part that cannot be counted through."""


class Counter:
    """Evaluates conditions on the number of a micro-batch, as if a loop ran."""

    def __init__(self, analysis: Analysis, loop: Loop, is_inner: bool) -> None:
        self._analysis = analysis
        self._loop = loop
        self._index, self._start = _index_of(loop)
        count = _range_size(loop.node.iter) if is_inner and isinstance(loop.node, ast.For) else None
        size = _group_of(resolve(analysis, count, loop.location)) if is_inner else BATCHES
        self._lengths = _lengths_of(loop, size)
        if count is not None:
            self._lengths[ast.unparse(count)] = size
        self.numbers = [self._start + position for position in range(size)]

    @property
    def is_usable(self) -> bool:
        """Whether the loop numbers its micro-batches."""
        return bool(self._index)

    def holds(self, condition: ast.AST | None, location: Location, number: int) -> bool:
        """Whether a condition holds for a micro-batch; raises UnknownValueError if that is not known."""
        resolved = resolve(self._analysis, condition, location, self._lengths)
        if resolved is None:
            raise UnknownValueError
        return bool(_evaluate(resolved, {self._index: number, **self._lengths}))

    def runs(self, guards: Sequence[Guard], number: int) -> bool:
        """Whether all conditions inside of the loop hold for a micro-batch."""
        inside = set(ast.walk(self._loop.node))
        return all(
            self.holds(guard.condition, guard.location, number) != guard.is_negated
            for guard in guards
            if guard.node in inside
        )


def _group_of(count: ast.expr | None) -> int:
    """The number of micro-batches of a step: that of the script, if it is a small constant."""
    value = count.value if isinstance(count, ast.Constant) else None
    return value if isinstance(value, int) and 1 < value <= _MAX_GROUP else GROUP


def _lengths_of(loop: Loop, size: int) -> dict[str, int]:
    """What `len(...)` of something that the loop reads is, by its text."""
    iterable = loop.node.iter if isinstance(loop.node, ast.For) else None
    nodes = ast.walk(iterable) if iterable is not None else ()
    return {f"len({ast.unparse(node)})": size for node in nodes if isinstance(node, ast.Name | ast.Attribute)}


def _index_of(loop: Loop) -> tuple[str, int]:
    match loop.node:
        case ast.For(target=ast.Tuple(elts=[ast.Name(id=name), *_]), iter=ast.Call() as call):
            return name, _enumerate_start(call)
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[_])):
            return name, 0
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[first, _])):
            return (name, first.value) if isinstance(first, ast.Constant) and isinstance(first.value, int) else ("", 0)
        case _:
            return "", 0


def _enumerate_start(call: ast.Call) -> int:
    for each in (node for node in ast.walk(call) if isinstance(node, ast.Call)):
        if isinstance(each.func, ast.Name) and each.func.id == "enumerate":
            given = [*each.args[1:], *(word.value for word in each.keywords if word.arg == "start")]
            return 1 if given and isinstance(given[0], ast.Constant) and given[0].value == 1 else 0
    return 0


def _evaluate(node: ast.expr, names: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.BoolOp(op=operator, values=values):
            return _evaluate_boolean(isinstance(operator, ast.And), values, names)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, names)
        case ast.BinOp(left=left, op=operator, right=right):
            return _calculate(operator, _evaluate(left, names), _evaluate(right, names))
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return _compare(operator, _evaluate_number(left, names), _evaluate_number(right, names))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _evaluate(body if _evaluate(test, names) else orelse, names)
        case _:
            return _evaluate_number(node, names)


def _evaluate_boolean(is_and: bool, values: Sequence[ast.expr], names: Mapping[str, int]) -> bool:
    """A name that is a separate condition, such as `use_ddp`, is neutral."""
    known = [each for each in values if not isinstance(each, ast.Name | ast.Attribute)]
    results = [bool(_evaluate(each, names)) for each in known]
    if not results:
        raise UnknownValueError
    return all(results) if is_and else any(results)


def _evaluate_number(node: ast.expr, names: Mapping[str, int]) -> Any:
    match node:
        case ast.Name() | ast.Attribute() | ast.Subscript() if ast.unparse(node) in names:
            return names[ast.unparse(node)]
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return GROUP
        case ast.Call() if ast.unparse(node) in names:
            return names[ast.unparse(node)]
        case ast.Constant() | ast.BinOp() | ast.Compare() | ast.BoolOp() | ast.UnaryOp():
            return _evaluate(node, names)
        case _:
            raise UnknownValueError


def _calculate(operator: ast.operator, left: Any, right: Any) -> Any:
    if not isinstance(left, int) or not isinstance(right, int):
        raise UnknownValueError
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Mod() if right:
            return left % right
        case ast.FloorDiv() if right:
            return left // right
        case _:
            raise UnknownValueError


def _compare(operator: ast.cmpop, left: Any, right: Any) -> bool:
    if not isinstance(left, int) or not isinstance(right, int):
        raise UnknownValueError
    results: dict[type[ast.cmpop], bool] = {
        ast.Eq: left == right, ast.NotEq: left != right, ast.Lt: left < right, ast.LtE: left <= right,
        ast.Gt: left > right, ast.GtE: left >= right,
    }  # fmt: skip
    if type(operator) not in results:
        raise UnknownValueError
    return results[type(operator)]


# -- when gradients are exchanged


@dataclass(frozen=True, eq=False)
class Synchronization:
    """Under which condition DDP exchanges gradients in a backward pass."""

    condition: ast.expr | None
    """None: never."""
    is_negated: bool
    location: Location
    """Of the condition."""
    context: Location
    """Of `no_sync()`."""
    is_late: bool = False
    """Whether the forward pass, which decides, comes before: it sees the condition of the micro-batch before."""


def synchronization(analysis: Analysis, backward: Event) -> Synchronization | None:
    """The `no_sync()` around a backward pass in the same function; None if there is none or if it is not known."""
    file = file_of(analysis, backward.location)
    if file is None:
        return None
    for node in _around(file, backward.node):
        if not isinstance(node, ast.With | ast.AsyncWith):
            continue
        for item in node.items:
            found = _from_context(file, item.context_expr, backward) or _from_helper(analysis, file, item, backward)
            if found is not None:
                return found
    return _from_flag(analysis, backward)


def _from_flag(analysis: Analysis, backward: Event) -> Synchronization | None:
    """`model.require_backward_grad_sync = i == 3` before the backward pass."""
    for event in analysis.of("assign_attribute"):
        is_before = event.order < backward.order and event.loops == backward.loops
        if event.name == "require_backward_grad_sync" and isinstance(event.node, ast.Assign) and is_before:
            is_late = any(
                call.order < event.order and call.loops == event.loops and call.is_grad and is_wrapped(call.model)
                for call in analysis.of("model_call")
            )
            return Synchronization(event.node.value, False, event.location, event.location, is_late)
    return None


def _around(file: SourceFile, node: ast.AST) -> Iterator[ast.AST]:
    while node in file.parents and not isinstance(node, _Functions):
        node = file.parents[node]
        yield node


def _from_context(file: SourceFile, context: ast.expr, backward: Event) -> Synchronization | None:
    function = _function_around(file, context)
    expression = context
    if isinstance(context, ast.Name):
        expression = assigned(file, function, context.id) or context

    def at(node: ast.AST) -> Location:
        return file.locate(node, backward.location.function)

    if isinstance(expression, ast.IfExp):
        delays = [_delays(expression.body), _delays(expression.orelse)]
        if delays[0] == delays[1]:
            return None
        where = _definition(file, function, expression.test) or expression
        delayed = expression.body if delays[0] else expression.orelse
        return Synchronization(expression.test, delays[0], at(where), at(delayed))
    if not _delays(expression) or not isinstance(expression, ast.Call) or _is_own_method(file, expression):
        return None
    enabled = next((word.value for word in expression.keywords if word.arg == "enabled"), None)
    if enabled is not None:
        where = _definition(file, function, enabled) or expression
        return Synchronization(enabled, True, at(where), at(expression))
    return Synchronization(None, False, at(expression), at(expression))


def _from_helper(analysis: Analysis, file: SourceFile, item: ast.withitem, backward: Event) -> Synchronization | None:
    """`with sync_context(model, step):`, a function of the project that returns `model.no_sync()` on a condition."""
    call = item.context_expr
    if isinstance(call, ast.Name):
        call = assigned(file, _function_around(file, call), call.id) or call
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
        return None
    name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
    helpers = [
        (each, node)
        for each in analysis.files
        for node in ast.walk(each.tree)
        if isinstance(node, ast.FunctionDef) and node.name == name and _delays(node)
    ]
    branch = _branch(helpers[0][1].body) if len(helpers) == 1 else None
    if branch is None:
        return None
    test, delays = branch
    entered = next(
        each for each in ast.walk(helpers[0][1]) if isinstance(each, ast.Attribute) and each.attr in _DELAYING
    )
    entry, context = helpers[0][0].locate(entered, name), file.locate(call, backward.location.function)
    return Synchronization(_with_arguments(test, helpers[0][1], call), delays, entry, context)


def _branch(body: Sequence[ast.stmt]) -> tuple[ast.expr, bool] | None:
    """The condition that decides on `no_sync()`, and whether it is entered if the condition holds."""
    for position, statement in enumerate(body):
        if isinstance(statement, ast.If):
            first, rest = statement.body, statement.orelse or list(body[position + 1 :])
            if any(map(_delays, first)) != any(map(_delays, rest)):
                return statement.test, any(map(_delays, first))
        for node in ast.walk(statement):
            if isinstance(node, ast.IfExp) and _delays(node.body) != _delays(node.orelse):
                return node.test, _delays(node.body)
    return None


def _with_arguments(test: ast.expr, helper: ast.FunctionDef, call: ast.Call) -> ast.expr:
    """A condition of a function in the names of its caller."""
    names = [each.arg for each in (*helper.args.posonlyargs, *helper.args.args)]
    is_method = isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"])
    given = [call.func, *call.args] if is_method else call.args
    values = dict(zip(names, given, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}

    class Substitute(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return values.get(node.id, node)

    return Substitute().visit(copy.deepcopy(test))


def _definition(file: SourceFile, function: ast.AST, test: ast.expr) -> ast.AST | None:
    """Where the name of a condition is assigned."""
    name = test.operand if isinstance(test, ast.UnaryOp) else test
    return assigned(file, function, name.id) if isinstance(name, ast.Name) else None


def _is_own_method(file: SourceFile, call: ast.Call) -> bool:
    """Whether `self.no_sync(...)` is a method of the script."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return any(isinstance(each, ast.FunctionDef) and each.name == name for each in ast.walk(file.tree))
        case _:
            return False


def _delays(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in _DELAYING for each in ast.walk(node))


# -- Accelerate


def accumulates(analysis: Analysis) -> bool:
    """Whether an Accelerator is created with more than one micro-batch per step."""
    return accumulation_option(analysis) is not None


def accumulation_option(analysis: Analysis) -> Value | None:
    """The `gradient_accumulation_steps` of the Accelerator, unless it is 1."""
    for event in analysis.of("accelerator"):
        for name in ("gradient_accumulation_steps", "gradient_accumulation_plugin"):
            option = event.service.options.get(name)
            if option is not None and option.constant != 1:
                return option
    return None


def mentions(analysis: Analysis, guard: Guard, name: str) -> bool:
    """Whether a condition depends on an attribute of a name, also through a variable."""
    condition = resolve(analysis, guard.condition, guard.location)
    nodes = ast.walk(condition) if condition is not None else ()
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes)
