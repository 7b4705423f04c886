"""Which expressions of the user's source depend on what some lines compute.

The analysis is by names and ignores the order of statements: a name depends on the lines if any assignment to it does,
a parameter if an argument of any call does, a call if the function returns something that does. The length of something
and its shape do not count: they are known before anything is computed.
"""

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from samestep.findings import Location
from samestep.verify.source import Function, name_of, parents, tree_of

PRINTS: Final = ("print", "info", "write", "log", "debug", "warning")
"""Functions and methods that report values."""
_STATELESS: Final = (
    *PRINTS, "backward", "gather", "gather_for_metrics", "pad_across_processes", "reduce", "all_gather", "all_reduce",
    "broadcast",
)  # fmt: skip
"""Methods, also of Accelerate and Fabric, that do not keep their arguments."""
_SIZES: Final = ("len", "size", "numel", "shape", "ndim", "range", "enumerate")
_COMPOUND: Final = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.ClassDef, Function)
_MAX_ROUNDS: Final = 20

Variable = tuple[str, int, str]  # file, line of the function (0 for the module or an attribute) and name


class DataFlow:
    """The variables and functions that depend on the calls of some lines."""

    def __init__(self, files: Iterable[str], sources: Iterable[Location]) -> None:
        lines = {(each.file, each.line) for each in sources}
        self._trees = [(file, tree_of(file)) for file in {*files, *(file for file, _ in lines)}]
        self._imported = {
            alias.asname or alias.name.split(".")[0]
            for _, tree in self._trees
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        self._variables = set[Variable]()
        self._returning = set[str]()
        self._sources = {
            id(node)
            for file, tree in self._trees
            for statement in _statements(tree, {line for name, line in lines if name == file})
            for node in ast.walk(statement)
            if isinstance(node, ast.Call)
        }
        self._functions = {
            node.name: (file, node)
            for file, tree in self._trees
            for node in ast.walk(tree)
            if isinstance(node, Function)
        }
        for _ in range(_MAX_ROUNDS):
            before = len(self._variables), len(self._returning)
            for file, tree in self._trees:
                for node in ast.walk(tree):
                    self._propagate(file, node)
            if before == (len(self._variables), len(self._returning)):
                break

    def reaches(self, location: Location, names: Iterable[str]) -> bool | None:
        """Whether an argument of a call of these functions on a line depends on the sources; None if there is none."""
        wanted, found = set(names), False
        calls = [
            node
            for statement in _statements(tree_of(location.file), {location.line})
            for node in ast.walk(statement)
            if isinstance(node, ast.Call) and name_of(node) in wanted
        ]
        for call in calls:
            found = found or any(self.depends(location.file, each) for each in _arguments(call))
        return found if calls else None

    def _propagate(self, file: str, node: ast.AST) -> None:
        """Apply one statement or expression."""
        match node:
            case ast.Assign(targets=targets, value=value):
                self._assign(file, targets, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(file, [target], value)
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                self._assign(file, [target], value)
            case (
                ast.For(target=target, iter=value)
                | ast.AsyncFor(target=target, iter=value)
                | ast.comprehension(target=target, iter=value)
            ):
                self._assign(file, [target], value)
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                self._assign(file, [target], value)
            case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
                function = next((each for each in parents(node) if isinstance(each, Function)), None)
                if function is not None and self.depends(file, value):
                    self._returning.add(function.name)
            case ast.Call():
                self._call(file, node)
            case _:
                pass

    def _assign(self, file: str, targets: list[ast.expr], value: ast.expr) -> None:
        if self.depends(file, value):
            for target in targets:
                for each in _bases(target):
                    self._variables.add(_variable(file, each))

    def _call(self, file: str, call: ast.Call) -> None:
        """Arguments reach the parameters of a function, and the object of a method, unless it does not keep them."""
        dependent = [self.depends(file, each) for each in _arguments(call)]
        if not any(dependent):
            return
        if isinstance(call.func, ast.Attribute) and name_of(call) not in _STATELESS:
            for each in _bases(call.func.value):
                if name_of(each) not in self._imported:  # a function of a module, not a method
                    self._variables.add(_variable(file, each))
        if (known := self._functions.get(name_of(call))) is not None:
            where, function = known
            names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
            names = names[1:] if names[:1] == ["self"] else names
            reached = {name for name, each in zip(names, call.args, strict=False) if self.depends(file, each)}
            reached |= {each.arg for each in call.keywords if each.arg and self.depends(file, each.value)}
            self._variables |= {(where, function.lineno, name) for name in reached}

    def depends(self, file: str, value: ast.expr) -> bool:
        """Whether an expression in a file depends on the sources."""
        for node in _computed(value):
            if id(node) in self._sources:
                return True
            if isinstance(node, ast.Call) and name_of(node) in self._returning:
                return True
            if isinstance(node, ast.Name | ast.Attribute) and _variable(file, node) in self._variables:
                return True
        return False


def _statements(tree: ast.AST, lines: set[int]) -> Iterator[ast.stmt]:
    """The simple statements on some lines."""
    for node in ast.walk(tree) if lines else ():
        if not isinstance(node, ast.stmt) or isinstance(node, _COMPOUND):
            continue
        if any(line in lines for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)):
            yield node


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _computed(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression, without what only its size depends on."""
    if name_of(node) in _SIZES and not isinstance(node, ast.Name):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _computed(child)


def _bases(target: ast.expr) -> Iterator[ast.expr]:
    """The variables that an assignment changes: `total` for `total[0]`, `self.total` for itself."""
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _bases(part)
        case ast.Attribute(value=ast.Name(id="self")) | ast.Name():
            yield target
        case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
            yield from _bases(value)
        case _:
            pass


def _variable(file: str, node: ast.AST) -> Variable:
    """A name in its function, or in the module if the function does not assign it; an attribute of self."""
    if isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
        return (file, 0, f"self.{node.attr}") if is_own else (file, -1, node.attr)
    name = node.id if isinstance(node, ast.Name) else ""
    for function in parents(node):
        if isinstance(function, Function) and _assigns(function, name):
            return file, function.lineno, name
    return file, 0, name


def _assigns(function: Function, name: str) -> bool:
    arguments = function.args
    parameters = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    if name in parameters:
        return True
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(function)
    )
