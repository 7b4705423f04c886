"""Lines of the user's source that belong to what was observed: loops, assignments, calls, origins of a value."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from samestep.findings import Location

Function = ast.FunctionDef | ast.AsyncFunctionDef
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_MAX_HOPS = 6


@lru_cache(maxsize=256)
def _parse(file: str) -> ast.Module | None:
    """The syntax tree of a file, whose nodes know their parents; None if it cannot be read."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            setattr(child, "parent", node)  # noqa: B010 - ast.AST declares no such attribute
    return tree


def parents(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes around a node, the innermost first."""
    parent: ast.AST | None = getattr(node, "parent", None)
    while parent is not None:
        yield parent
        parent = getattr(parent, "parent", None)


def statement_at(location: Location) -> ast.stmt | None:
    """The innermost statement on a line; of a loop or a condition only its first lines count."""
    tree = _parse(location.file)
    found: ast.stmt | None = None
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)] if tree else []
    for node in statements:
        is_on_line = node.lineno <= location.line <= (node.end_lineno or node.lineno)
        if is_on_line and (found is None or node.lineno >= found.lineno):
            found = node
    return found


def function_at(location: Location) -> Function | ast.Module | None:
    """The function around a line, or the module."""
    statement = statement_at(location)
    if statement is None:
        return None
    around = [node for node in (statement, *parents(statement)) if isinstance(node, Function | ast.Module)]
    return around[0] if around else None


def epoch_loop(site: Iterable[Location]) -> Location | None:
    """The loop over epochs around a loop over a loader: the innermost loop whose body runs the loader's loop."""
    for depth, location in enumerate(site):
        statement = statement_at(location)
        if statement is None:
            continue
        for node in parents(statement):
            if isinstance(node, Function | ast.ClassDef):
                break
            if isinstance(node, _LOOPS):
                return replace(location, line=node.lineno)
        if depth == 0 and isinstance(statement, _LOOPS):
            continue
    return None


def calls_at(location: Location) -> list[ast.Call]:
    """The calls in the statement on a line, the outermost first; of a loop or a condition only those of its head."""
    statement = statement_at(location)
    return [node for node in walk_head(statement) if isinstance(node, ast.Call)] if statement else []


def walk_head(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement; of a loop, a condition or another block those of its first lines."""
    bodies = {"body", "orelse", "finalbody", "handlers", "cases"}
    if not isinstance(statement, (*_LOOPS, ast.If, ast.With, ast.AsyncWith, ast.Try, Function, ast.ClassDef)):
        yield from ast.walk(statement)
        return
    for name, value in ast.iter_fields(statement):
        if name not in bodies:
            for node in value if isinstance(value, list) else [value]:
                if isinstance(node, ast.AST):
                    yield from ast.walk(node)


def name_of(node: ast.AST) -> str:
    """The last name of a call or an attribute: "DataLoader" for `torch.utils.data.DataLoader(...)`."""
    match node:
        case ast.Call(func=function):
            return name_of(function)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def call_named(location: Location, names: Iterable[str]) -> ast.Call | None:
    """The call of one of these functions in the statement on a line."""
    wanted = set(names)
    return next((call for call in calls_at(location) if name_of(call) in wanted), None)


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """An argument of a call, by name or position."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if named is None and position is not None and len(call.args) > position:
        return call.args[position]
    return named


def assignment(location: Location, name: str, executed: set[tuple[str, int]] | None = None) -> ast.stmt | None:
    """The last statement before a line that assigns a name, in its function or else in the module.

    With `executed`, statements that were not executed count only if there are no others.
    """
    function, tree = function_at(location), _parse(location.file)
    for scope in (function, tree):
        if scope is None:
            continue
        found = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
            and any(name_of(target) == name and isinstance(target, ast.Name) for target in _targets(node))
            and (scope is tree or node.lineno <= location.line)
        ]
        found = [node for node in found if _was_executed(location.file, node, executed)] or found
        if found:
            return max(found, key=lambda node: node.lineno)
    return None


def _was_executed(file: str, node: ast.stmt, executed: set[tuple[str, int]] | None) -> bool:
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return executed is None or any((file, line) in executed for line in lines)


def assigned(location: Location, value: ast.expr) -> Location:
    """The line of the same function that assigns a name; another value is at its own line."""
    statement = assignment(location, value.id) if isinstance(value, ast.Name) else None
    return location if statement is None else replace(location, line=statement.lineno)


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.expr]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def origin(location: Location, value: ast.expr | None, executed: set[tuple[str, int]] | None = None) -> Location:
    """The line that a value comes from: through names that are assigned once, and results of functions of the file."""
    for _ in range(_MAX_HOPS):
        match value:
            case ast.Name(id=name):
                statement = assignment(location, name, executed)
                if (
                    statement is None
                    or not isinstance(statement, ast.Assign | ast.AnnAssign)
                    or statement.value is None
                ):
                    return location
                location, value = replace(location, line=statement.lineno), statement.value
            case ast.Call() if (returned := _returned(location, value, executed)) is not None:
                location, value = replace(location, line=returned.lineno), returned.value
            case _:
                return location
    return location


def statements_behind(location: Location, value: ast.AST) -> Iterator[ast.stmt]:
    """The statements that assign the names in an expression, and those in what these assign."""
    names = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
    seen = set[ast.stmt]()
    while names:
        statement = assignment(location, names.pop())
        if statement is not None and statement not in seen:
            seen.add(statement)
            yield statement
            names += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]


def _returned(location: Location, call: ast.Call, executed: set[tuple[str, int]] | None) -> ast.Return | None:
    """The return statement of a function of the same file that is called; None if there are several or none."""
    function = find_function(location.file, name_of(call))
    if function is None or (isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Name)):
        return None
    returns = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Return)
        and node.value is not None
        and (executed is None or (location.file, node.lineno) in executed)
    ]
    return returns[0] if len(returns) == 1 else None


def find_function(file: str, name: str) -> Function | None:
    """A function or method of a file by its name."""
    tree = _parse(file)
    return (
        next((node for node in ast.walk(tree) if isinstance(node, Function) and node.name == name), None)
        if tree
        else None
    )


def find_class(files: Iterable[str], name: str) -> tuple[str, ast.ClassDef] | None:
    """A class by its name in some files."""
    for file in files:
        for node in ast.walk(_parse(file) or ast.Module([], [])):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return file, node
    return None


def find_calls(file: str, names: Iterable[str], scope: ast.AST | None = None) -> list[ast.Call]:
    """Calls of these functions in a file, or in a part of it, in the order of their lines."""
    wanted = set(names)
    nodes = ast.walk(scope or _parse(file) or ast.Module([], []))
    return sorted(
        (node for node in nodes if isinstance(node, ast.Call) and name_of(node) in wanted), key=lambda node: node.lineno
    )


def attribute_assignments(
    files: Iterable[str], attribute: str
) -> list[tuple[str, ast.Assign | ast.AnnAssign | ast.AugAssign]]:
    """Statements that assign an attribute, such as `self.vocab = ...`."""
    return [
        (file, node)
        for file in files
        for node in ast.walk(_parse(file) or ast.Module([], []))
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        and any(isinstance(target, ast.Attribute) and target.attr == attribute for target in _targets(node))
    ]


def key_assignments(file: str, key: str) -> list[int]:
    """The lines of statements that assign to a key, such as `group["lr"] = ...`."""
    return [
        node.lineno
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        and any(
            isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and target.slice.value == key
            for target in _targets(node)
        )
    ]


_RANK_NAMES = (
    "rank",
    "process_index",
    "world_size",
    "world",
    "num_processes",
    "num_replicas",
    "global_rank",
    "get_rank",
    "get_world_size",
)


def is_about_ranks(node: ast.AST) -> bool:
    """Whether an expression or a statement names the rank or the number of ranks."""
    names = {name_of(each) for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute)}
    return any(name in _RANK_NAMES or name.endswith("_rank") for name in names)


def division_by_ranks(location: Location) -> Location | None:
    """The first line after this one, in the same function, that divides by the number of ranks."""
    function = function_at(location)
    divisions = [
        node.lineno
        for node in (ast.walk(function) if isinstance(function, Function) else ())
        if isinstance(node, ast.BinOp | ast.AugAssign)
        and isinstance(node.op, ast.Div)
        and node.lineno > location.line
        and is_about_ranks(node)
    ]
    return replace(location, line=min(divisions)) if divisions else None


def sharding_statement(files: Iterable[str], executed: set[tuple[str, int]]) -> Location | None:
    """The executed statement that takes a rank's part of something: a range or a slice that depends on the rank."""
    for file in files:
        for node in ast.walk(_parse(file) or ast.Module([], [])):
            is_part = (isinstance(node, ast.Call) and name_of(node) in ("range", "slice")) or isinstance(
                node, ast.Slice
            )
            if is_part and is_about_ranks(node) and len([*ast.iter_child_nodes(node)]) >= 2:
                statement = next((each for each in parents(node) if isinstance(each, ast.stmt)), None)
                if statement is not None and (file, statement.lineno) in executed:
                    return Location(file, statement.lineno)
    return None


def tree_of(file: str) -> ast.AST:
    """The syntax tree of a file; an empty one if it cannot be read."""
    return _parse(file) or ast.Module([], [])
