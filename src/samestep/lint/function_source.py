"""What the source around a call says that its values do not: its statement, and the function that it is in."""

import ast
from collections.abc import Iterator

from samestep.findings import Location
from samestep.lint.events import Event
from samestep.lint.rule import Analysis

Body = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


def function_around(analysis: Analysis, location: Location) -> Body | None:
    """The innermost function around a line, or the module."""
    file = next((each for each in analysis.files if str(each.path) == location.file), None)
    if file is None:
        return None
    found: Body = file.tree
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _contains(node, location.line):
            found = node  # breadth first, so that inner functions come later
    return found


def _contains(node: ast.FunctionDef | ast.AsyncFunctionDef, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def statement_around(analysis: Analysis, event: Event) -> ast.stmt | None:
    """The statement whose value is the call of an event: an assignment, or an expression that drops its value."""
    function = function_around(analysis, event.location)
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) and node.value is event.node:
            return node
    return None


def assigned_names(statement: ast.AST | None) -> list[str]:
    """The names that a statement binds."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [
        each.id for target in targets if target is not None for each in ast.walk(target) if isinstance(each, ast.Name)
    ]


def last_assignment(function: ast.AST, name: str, line: int) -> ast.expr | None:
    """What was assigned to a name before a line, by the text."""
    found = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and name in assigned_names(node) and node.lineno < line
    ]
    return max(found, key=lambda node: node.lineno).value if found else None


def uses_of(tree: ast.AST, name: str) -> Iterator[ast.Name]:
    """Where a name is read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node


def passed(event: Event, position: int, *names: str) -> ast.expr | None:
    """The source of an argument of a call, by its position or its name."""
    node = event.node
    if not isinstance(node, ast.Call):
        return None
    named = [each.value for each in node.keywords if each.arg in names]
    return named[0] if named else node.args[position] if position < len(node.args) else None
