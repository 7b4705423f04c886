"""What each type of expression gives: a function per type, in `EXPRESSIONS`; and what an assignment binds."""

import ast
import builtins
import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

from samestep.findings import Location
from samestep.lint.abstract_interpreter import ExpressionTable, Frame, Interpreter, last_name
from samestep.lint.events import Guard, Loop
from samestep.lint.library import call_external, call_object
from samestep.lint.library.operations import COMPARISON, attribute_of, combine, element, single_items, subscript
from samestep.lint.library.partitions import first_clock, number_items
from samestep.lint.project_calls import call_function, create, decorators
from samestep.lint.rank_names import environment_value, guess, named
from samestep.lint.values import (
    UNSET,
    ChoiceValue,
    ClassValue,
    ContainerValue,
    ExternalValue,
    FunctionValue,
    ImportedValue,
    InstanceValue,
    ModuleValue,
    Scope,
    SuperValue,
    TensorValue,
    Value,
    any_world,
    choice_taints,
    choose,
    merge_taints,
    options_of,
    part_of,
    sources_of,
    without_number,
)

_HASHABLE: Final = (str, int, float, bool, bytes, type(None))

# -- assignments


def assign(run: Interpreter, target: ast.expr, value: Value, node: ast.AST) -> None:
    """Bind a value to a name, an attribute, an item, or several of them."""
    match target:
        case ast.Name(id=name):
            run.frame.scope.set(name, named(value, name, run.locate(target)))
        case ast.Attribute(value=owner, attr=name):
            holder = run.evaluate(owner)
            for option in options_of(holder):
                if isinstance(option, InstanceValue):
                    run.set_attribute(option, name, value)
            run.emit("assign_attribute", node, owner=holder, name=name, value=value, target=target)
        case ast.Subscript(value=owner, slice=index):
            _assign_item(run, run.evaluate(owner), run.evaluate(index), value, target, node)
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            _assign_several(run, targets, value, node)
        case ast.Starred(value=inner):
            assign(run, inner, Value(taints=value.taints), node)
        case _:
            return


def _assign_item(run: Interpreter, owner: Value, key: Value, value: Value, target: ast.expr, node: ast.AST) -> None:
    if isinstance(owner, ContainerValue):
        is_known = key.is_known and isinstance(key.constant, _HASHABLE)
        is_single = len(owner.items) == 1 and owner.length is None  # an item of a comprehension represents all
        other = next(iter(owner.items)) if is_single else len(owner.items)
        owner.items[key.constant if is_known else other] = value
    elif isinstance(owner, InstanceValue) and owner.is_module:
        run.set_attribute(owner, str(key.constant) if key.is_known else f"[{len(owner.attributes)}]", value)
    elif isinstance(owner, TensorValue):
        owner.taints = merge_taints([owner, value])
    run.emit("assign_item", node, owner=owner, key=key, value=value, target=target)


def _assign_several(run: Interpreter, targets: Sequence[ast.expr], value: Value, node: ast.AST) -> None:
    known = value
    if isinstance(value, ChoiceValue):
        containers = [each for each in value.options if isinstance(each, ContainerValue)]
        known = next((each for each in reversed(containers) if len(each.items) == len(targets)), value)
    for position, target in enumerate(targets):
        item = known.items.get(position) if isinstance(known, ContainerValue) else None
        assign(run, target, item if item is not None else part_of(value), node)


# -- names and attributes


def _evaluate_constant(run: Interpreter, node: ast.Constant) -> Value:
    return Value(run.locate(node), constant=node.value)


def _evaluate_name(run: Interpreter, node: ast.Name) -> Value:
    found = run.frames[-1].scope.get(node.id)
    if isinstance(found, ImportedValue):
        return imported_value(run, found)
    if found is not None:
        return found
    if hasattr(builtins, node.id):
        return ExternalValue(run.locate(node), qualname=node.id)
    return guess(node.id, run.locate(node))


def imported_value(run: Interpreter, imported: ImportedValue) -> Value:
    """The value of an imported name, through the files that import it from each other; its file is read now."""
    seen = list[tuple[str, str]]()
    found: Value | None = imported
    while isinstance(found, ImportedValue):
        base, name = found.base, found.attribute
        if not name:
            return ModuleValue(state=run.load(run.files[base]))
        if (base, name) in seen:  # `from . import tools` in a package is its module
            found = None
            break
        seen.append((base, name))
        found = run.load(run.files[base]).scope.names.get(name) if base in run.files else None
    if found is not None:
        return found
    module = next((run.files[f"{base}.{name}"] for base, name in reversed(seen) if f"{base}.{name}" in run.files), None)
    return ModuleValue(state=run.load(module)) if module is not None else Value()


def _evaluate_attribute(run: Interpreter, node: ast.Attribute) -> Value:
    owner = run.evaluate(node.value)
    if not isinstance(owner, ChoiceValue):
        return _attribute(run, owner, node)
    return choose([_attribute(run, each, node) for each in owner.options])


def _attribute(run: Interpreter, owner: Value, node: ast.Attribute) -> Value:
    name, location = node.attr, run.locate(node)
    if isinstance(owner, ExternalValue):
        return ExternalValue(location, owner.taints, qualname=f"{owner.qualname}.{name}")
    if isinstance(owner, ModuleValue):
        return _module_attribute(run, owner, name)
    found = None
    if isinstance(owner, InstanceValue):
        found = owner.attributes.get(name) or _class_attribute(run, owner, name, node)
        if found is not None and name in run.frame.module.file.counters and run.is_repeated:
            found = without_number(found)  # it is another one in the next iteration
    elif isinstance(owner, ClassValue):
        found = owner.attribute(name)
    elif isinstance(owner, SuperValue):
        found = _super_attribute(owner, name)
    found = found or attribute_of(run, owner, name, location)
    if found is not None:
        return found
    return Value(location, owner.taints) if owner.differs else guess(name, location)


def _module_attribute(run: Interpreter, owner: ModuleValue, name: str) -> Value:
    state = owner.state
    if state is None:
        return Value()
    found = state.scope.names.get(name)
    if isinstance(found, ImportedValue):
        return imported_value(run, found)
    if found is None and f"{state.file.name}.{name}" in run.files:
        return ModuleValue(state=run.load(run.files[f"{state.file.name}.{name}"]))
    return found or Value()


def _class_attribute(run: Interpreter, owner: InstanceValue, name: str, node: ast.AST) -> Value | None:
    found = owner.class_value.attribute(name) if owner.class_value is not None else None
    if not isinstance(found, FunctionValue):
        return found
    bound = copy.copy(found)
    bound.owner, bound.location = owner, run.locate(node)
    is_property = any(last_name(each) in ("property", "cached_property") for each in decorators(found.node))
    return call_function(run, bound, [], {}, node) if is_property else bound


def _super_attribute(owner: SuperValue, name: str) -> Value | None:
    for base in owner.bases:
        found = base.method(name, owner.owner) if isinstance(base, ClassValue) else None
        if found is not None:
            return found
    return None


# -- calls


def _evaluate_call(run: Interpreter, node: ast.Call) -> Value:
    function = run.evaluate(node.func)
    arguments = list[Value]()
    for each in node.args:
        value = run.evaluate(each.value if isinstance(each, ast.Starred) else each)
        if isinstance(each, ast.Starred) and isinstance(value, ContainerValue):
            arguments += value.values()
        else:
            arguments.append(value)
    keywords = dict[str, Value]()
    for each in node.keywords:
        value = run.evaluate(each.value)
        if each.arg is not None:
            keywords[each.arg] = value
        elif isinstance(value, ContainerValue):
            keywords |= {key: item for key, item in value.items.items() if isinstance(key, str)}
    if not isinstance(function, ChoiceValue):
        return call(run, function, arguments, keywords, node)
    return choose([call(run, each, arguments, keywords, node) for each in function.options])


def call(
    run: Interpreter, function: Value, arguments: list[Value], keywords: dict[str, Value], node: ast.Call
) -> Value:
    """Call something with what is known of its arguments."""
    if isinstance(function, FunctionValue):
        return call_function(run, function, arguments, keywords, node)
    if isinstance(function, ClassValue):
        if _is_loader(function):
            return call_external(run, "torch.utils.data.DataLoader", arguments, keywords, node)
        return create(run, function, arguments, keywords, node)
    if isinstance(function, ExternalValue):
        if function.qualname == "super":
            return _super(run)
        if function.qualname == "getattr" and len(arguments) > 1 and isinstance(arguments[1].constant, str):
            return _named_attribute(run, arguments, node)
        return call_external(run, function.qualname, arguments, keywords, node)
    value = call_object(run, function, arguments, keywords, node)
    if value is not None:
        return value
    if isinstance(function, InstanceValue) and function.class_value is not None:
        method = function.class_value.method("__call__", function)
        if method is not None:
            return call_function(run, method, arguments, keywords, node)
    parts = [function, *arguments, *keywords.values()]
    return Value(run.locate(node), merge_taints(parts), name=last_name(node.func))


def _is_loader(function: ClassValue) -> bool:
    """Whether a class of the project is a DataLoader that takes the arguments of one."""
    if not function.derives_from("DataLoader"):
        return False
    constructor = function.method("__init__")
    given = constructor.node.args if constructor is not None and constructor.node is not None else None
    return given is None or (given.vararg is not None and given.kwarg is not None)


def _named_attribute(run: Interpreter, arguments: list[Value], node: ast.Call) -> Value:
    """`getattr(x, "name", default)` is `x.name`, or the default."""
    attribute = ast.copy_location(ast.Attribute(node.args[0], str(arguments[1].constant), ast.Load()), node)
    found = [_attribute(run, each, attribute) for each in options_of(arguments[0])]
    return choose([*found, *arguments[2:3]])


def _super(run: Interpreter) -> Value:
    frame = run.frame
    bases = frame.class_value.bases if frame.class_value is not None else ()
    return SuperValue(owner=frame.owner, bases=bases)


# -- operators and conditions


def _evaluate_conditional(run: Interpreter, node: ast.IfExp) -> Value:
    test = run.evaluate(node.test)
    if test.truth is not None:
        return run.evaluate(node.body if test.truth else node.orelse)
    guard = Guard(run.locate(node), test.taints, node, node.test)
    with run.inside(guard):
        one = run.evaluate(node.body)
    with run.inside(replace(guard, is_negated=True)):
        other = run.evaluate(node.orelse)
    return choose([one, other], test.taints)


def _evaluate_binary(run: Interpreter, node: ast.BinOp) -> Value:
    return combine(run, node, run.evaluate(node.left), run.evaluate(node.right), node.op)


def _evaluate_boolean(run: Interpreter, node: ast.BoolOp) -> Value:
    """`a and b`: b is evaluated only if a is true, which may differ between ranks."""
    is_and = isinstance(node.op, ast.And)
    values, guards = list[Value](), list[Guard]()
    for each in node.values:
        with run.inside(*guards):
            value = run.evaluate(each)
        values.append(value)
        if value.truth is (not is_and):
            break
        if value.taints and value.truth is None:
            guards.append(Guard(run.locate(each), value.taints, node, each, is_negated=not is_and))
    truths = [each.truth for each in values]
    assumed = (not is_and) if (not is_and) in truths else is_and if all(each is is_and for each in truths) else None
    result = Value(
        run.locate(node), merge_taints(values), is_world=any_world(values), assumed=assumed,
        clock=first_clock(*values).clock,
    )  # fmt: skip
    if assumed is None and not is_and and len(values) > 1:  # `a or b` is one of them
        objects = [option for each in values for option in options_of(each) if type(option) is not Value]
        chosen = choose(objects, result.taints) if objects else result
        return chosen if chosen.taints or not result.taints else result
    return result


def _evaluate_unary(run: Interpreter, node: ast.UnaryOp) -> Value:
    value = run.evaluate(node.operand)
    location = run.locate(node)
    if isinstance(node.op, ast.Not):
        truth = value.truth
        assumed = None if truth is None else not truth
        return Value(location, value.taints, is_world=value.is_world, assumed=assumed, clock=value.clock)
    if value.is_known and isinstance(value.constant, int | float) and isinstance(node.op, ast.USub):
        return replace(value, location=location, constant=-value.constant)
    if value.is_floored:
        return replace(value, is_floored=False)  # -(-n // world) is rounded up
    return replace(value, constant=UNSET) if value.is_known else value


_COMPARISONS: Final[dict[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b, ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
}  # fmt: skip


def _evaluate_comparison(run: Interpreter, node: ast.Compare) -> Value:
    values = [run.evaluate(node.left), *(run.evaluate(each) for each in node.comparators)]
    location, taints = run.locate(node), merge_taints(values)
    compare = _COMPARISONS.get(type(node.ops[0]))
    if len(values) == 2 and all(each.is_known for each in values):
        constant = compare(values[0].constant, values[1].constant) if compare is not None else UNSET
        return Value(location, taints, constant)
    if len(values) == 2 and (is_member := _is_member(node.ops[0], values[0], values[1])) is not None:
        return Value(location, taints, is_member)
    has_ranks = _asks_for_ranks(node, values)
    if has_ranks is not None:
        return Value(location, is_world=True, assumed=has_ranks)
    is_world = any_world(values)
    if isinstance(node.ops[0], ast.In | ast.NotIn) and values[1].name == "torch.load":
        taints = values[0].taints  # the checkpoints of all ranks have the same keys
    if (
        isinstance(node.ops[0], ast.Is | ast.IsNot)
        and values[1].constant is None
        and isinstance(values[0], ChoiceValue)
    ):
        taints = choice_taints(values[0])
    assumed = _assume(node) if is_world and not taints else UNSET
    if any(isinstance(each, TensorValue) for each in values) and not is_world:
        return TensorValue(location, taints, parts=tuple(values), name=COMPARISON)
    return Value(location, taints, is_world=is_world, assumed=assumed, clock=first_clock(*values).clock)


def _is_member(operator: ast.cmpop, item: Value, container: Value) -> bool | None:
    """The result of `in` and `not in` for a constant and a container of constants; None if it is not known."""
    if not isinstance(operator, ast.In | ast.NotIn) or not isinstance(container, ContainerValue) or not item.is_known:
        return None
    items = list(container.values())
    if container.length != len(items) or not all(each.is_known for each in items):
        return None
    return any(each.constant == item.constant for each in items) is isinstance(operator, ast.In)


def _asks_for_ranks(node: ast.Compare, values: Sequence[Value]) -> bool | None:
    """Whether there are several ranks, from `rank != -1`, `local_rank >= 0` or `"RANK" in os.environ`; else None."""
    if len(values) != 2:
        return None
    left, right = values
    operator, limit = type(node.ops[0]), right.constant
    if isinstance(right, ExternalValue) and right.qualname == "os.environ" and left.is_known:
        is_set = environment_value(str(left.constant), left.location or Location("", 0))
        known = is_set.depends_on_rank or is_set.is_world
        return operator is ast.In if known and operator in (ast.In, ast.NotIn) else None
    if not left.depends_on_rank or not right.is_known or (limit is None and type(left) is not Value):
        return None  # something that only some ranks have, such as a logger, is not the rank
    if (limit in (-1, None) and operator in (ast.NotEq, ast.IsNot, ast.Gt)) or (limit == 0 and operator is ast.GtE):
        return True
    is_absent = (limit in (-1, None) and operator in (ast.Eq, ast.Is)) or (limit == 0 and operator is ast.Lt)
    return False if is_absent else None


def _assume(node: ast.Compare) -> bool | None:
    """Whether a comparison of the number of ranks holds on several."""
    match node:
        case ast.Compare(ops=[ast.Gt() | ast.GtE() | ast.NotEq()], comparators=[ast.Constant()]):
            return True
        case ast.Compare(ops=[ast.Eq() | ast.Lt() | ast.LtE()], comparators=[ast.Constant(value=limit)]):
            return False if limit in (0, 1, -1, None) else None
        case ast.Compare(ops=[ast.IsNot()]):
            return True
        case _:
            return None


# -- containers


def _evaluate_sequence(run: Interpreter, node: ast.List | ast.Tuple | ast.Set) -> Value:
    items = list[Value]()
    has_length = True
    for each in node.elts:
        value = run.evaluate(each.value if isinstance(each, ast.Starred) else each)
        if isinstance(each, ast.Starred):
            has_length = has_length and isinstance(value, ContainerValue) and value.length is not None
            items += value.values() if isinstance(value, ContainerValue) else [value]
        else:
            items.append(value)
    return ContainerValue(
        run.locate(node), merge_taints(items), items=dict(enumerate(items)), is_unordered=isinstance(node, ast.Set),
        length=len(items) if has_length else None,
        order_from=run.locate(node) if isinstance(node, ast.Set) else None,
    )  # fmt: skip


def _evaluate_dict(run: Interpreter, node: ast.Dict) -> Value:
    items = dict[Any, Value]()
    for position, (key, each) in enumerate(zip(node.keys, node.values, strict=True)):
        value = run.evaluate(each)
        if key is None:
            items |= value.items if isinstance(value, ContainerValue) else {position: value}
            continue
        name = run.evaluate(key)
        items[name.constant if name.is_known and isinstance(name.constant, _HASHABLE) else position] = value
    return ContainerValue(run.locate(node), merge_taints(items.values()), items=items)


def _evaluate_lambda(run: Interpreter, node: ast.Lambda) -> Value:
    return FunctionValue(run.locate(node), node=node, module=run.frame.module, scope=run.frame.scope)


def _comprehend(
    run: Interpreter, node: ast.expr, generators: Sequence[ast.comprehension], elements: Sequence[ast.expr]
) -> Value:
    frame, sources, loops = run.frame, list[Value](), run.loops
    inner = Frame(frame.module, Scope(frame.scope), frame.function, frame.owner, frame.class_value)
    with run.inside_frame(inner):
        tests = list[Value]()
        for generator in generators:
            source = run.evaluate(generator.iter)
            sources.append(source)
            first = (single_items(source) if len(generators) == 1 else []) or [element(run, source, node)]
            assign(run, generator.target, first[0], node)
            run.loops = (*run.loops, Loop(run.locate(node), node, source))
            tests += [run.evaluate(test) for test in generator.ifs]
        taints = merge_taints(tests)
        guard = Guard(run.locate(node), taints, node, node)
        with run.inside(guard) if taints else nullcontext():
            items = [run.evaluate(each) for each in elements]
            singles = single_items(sources[0]) if len(generators) == 1 and not tests else []
            rows = [items] if singles else []
            for single in singles[1:]:
                assign(run, generators[0].target, single, node)
                rows.append([run.evaluate(each) for each in elements])
    run.loops = loops
    if rows and not isinstance(node, ast.SetComp):
        return _comprehended(run, node, rows)
    containers = [each for source in sources for each in sources_of(source) if isinstance(each, ContainerValue)]
    is_unordered = isinstance(node, ast.SetComp) or any(each.is_unordered for each in containers)
    taints = merge_taints([*sources, *items, *tests])
    unordered = next((each for each in containers if each.is_unordered), None)
    if isinstance(node, ast.DictComp):
        for source in sources:
            number_items(run, source, node)
        is_unordered = False  # a dictionary is read by its keys
    sizes = (Value(taints=each.size_taints) for each in containers)
    return ContainerValue(
        run.locate(node), taints, items={0: items[-1]}, is_unordered=is_unordered,
        size_taints=merge_taints([*tests, *sizes]),
        name=unordered.name if unordered else "",
        order_from=(unordered.order_from if unordered else run.locate(node)) if is_unordered else None,
    )  # fmt: skip


def _comprehended(run: Interpreter, node: ast.expr, rows: list[list[Value]]) -> Value:
    """The list or dictionary of a comprehension over names that are known."""
    keys = [row[0].constant if len(row) > 1 and row[0].is_known else number for number, row in enumerate(rows)]
    values = [row[-1] for row in rows]
    length = None if isinstance(node, ast.DictComp) else len(rows)
    return ContainerValue(
        run.locate(node), merge_taints(values), items=dict(zip(keys, values, strict=True)), length=length
    )


def _evaluate_comprehension(run: Interpreter, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
    return _comprehend(run, node, node.generators, [node.elt])


def _evaluate_dict_comprehension(run: Interpreter, node: ast.DictComp) -> Value:
    return _comprehend(run, node, node.generators, [node.key, node.value])


def _evaluate_subscript(run: Interpreter, node: ast.Subscript) -> Value:
    owner, index = run.evaluate(node.value), run.evaluate(node.slice)
    return choose([_item(run, each, index, node) for each in options_of(owner)])


def _item(run: Interpreter, owner: Value, index: Value, node: ast.Subscript) -> Value:
    if isinstance(owner, ContainerValue) and index.is_known and isinstance(index.constant, _HASHABLE):
        key = index.constant
        if isinstance(key, int) and key < 0 and owner.length is not None:
            key += owner.length
        if key in owner.items:
            return owner.items[key]
    return subscript(run, owner, index, node)


def _evaluate_slice(run: Interpreter, node: ast.Slice) -> Value:
    parts = [run.evaluate(each) for each in (node.lower, node.upper, node.step) if each is not None]
    return Value(run.locate(node), merge_taints(parts), is_world=any_world(parts))


def _evaluate_text(run: Interpreter, node: ast.JoinedStr) -> Value:
    parts = [run.evaluate(each.value) for each in node.values if isinstance(each, ast.FormattedValue)]
    run.emit("text", node, parts=parts)
    return Value(run.locate(node), merge_taints(parts), clock=first_clock(*parts).clock)


# -- others


def _evaluate_named(run: Interpreter, node: ast.NamedExpr) -> Value:
    value = run.evaluate(node.value)
    assign(run, node.target, value, node)
    return value


def _evaluate_await(run: Interpreter, node: ast.Await) -> Value:
    return run.evaluate(node.value)


def _evaluate_yield(run: Interpreter, node: ast.Yield) -> Value:
    value = run.evaluate(node.value) if node.value is not None else Value()
    run.frame.yields.append(value)
    run.emit("yield", node, value=value)
    return Value()


def _evaluate_yield_from(run: Interpreter, node: ast.YieldFrom) -> Value:
    value = run.evaluate(node.value)
    run.frame.yields.append(element(run, value, node))
    return TensorValue(value.location, value.taints) if isinstance(value, TensorValue) else Value(taints=value.taints)


EXPRESSIONS: Final[ExpressionTable] = {
    ast.Attribute: _evaluate_attribute, ast.Await: _evaluate_await, ast.BinOp: _evaluate_binary,
    ast.BoolOp: _evaluate_boolean, ast.Call: _evaluate_call, ast.Compare: _evaluate_comparison,
    ast.Constant: _evaluate_constant, ast.Dict: _evaluate_dict, ast.DictComp: _evaluate_dict_comprehension,
    ast.GeneratorExp: _evaluate_comprehension, ast.IfExp: _evaluate_conditional, ast.JoinedStr: _evaluate_text,
    ast.Lambda: _evaluate_lambda, ast.List: _evaluate_sequence, ast.ListComp: _evaluate_comprehension,
    ast.Name: _evaluate_name, ast.NamedExpr: _evaluate_named, ast.Set: _evaluate_sequence,
    ast.SetComp: _evaluate_comprehension, ast.Slice: _evaluate_slice, ast.Subscript: _evaluate_subscript,
    ast.Tuple: _evaluate_sequence, ast.UnaryOp: _evaluate_unary, ast.Yield: _evaluate_yield,
    ast.YieldFrom: _evaluate_yield_from,
}  # fmt: skip
