"""Measures of Python source by its syntax tree: sizes, paths, types, documentation, imports."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.match_case)
BROAD = {"Exception", "BaseException"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Module:
    """One source file: `path` as people write it, `name` as Python imports it."""

    path: str
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def place(self, node: ast.stmt | ast.expr | ast.ExceptHandler) -> str:
        named = f" {node.name}" if isinstance(node, Function | ast.ClassDef) else ""
        return f"{self.path}:{node.lineno}{named}"


def read_package(folder: Path) -> list[Module]:
    """Read every module below a package's folder; empty files hold nothing to measure."""
    modules: list[Module] = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if text := path.read_text(encoding="utf-8"):
            modules.append(Module(path.relative_to(folder.parents[1]).as_posix(), name, text))
    return modules


def length(node: Function | ast.ClassDef) -> int:
    """Count the lines of a definition, without its decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def percentile(values: Iterable[int], share: float) -> int:
    """Give the value that a share of all values does not exceed; 0 where there are none."""
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))] if ordered else 0


def complexity(function: Function) -> int:
    """Count the paths as McCabe does, each `and`, `or`, conditional expression and comprehension being a fork too."""
    nodes = list(ast.walk(function))
    operators = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return 1 + operators + sum(isinstance(node, BRANCHES) for node in nodes)


def parameters(function: Function) -> list[ast.arg]:
    """List what a caller may give, *args and **kwargs included, without self and cls."""
    given = function.args
    variadic = [argument for argument in (given.vararg, given.kwarg) if argument]
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *variadic]
    return [argument for argument in named if argument.arg not in ("self", "cls")]


def is_typed(function: Function) -> bool:
    """Tell whether every parameter and the result carry a type; what __init__ returns is known."""
    returns = function.returns is not None or function.name == "__init__"
    return returns and all(argument.annotation is not None for argument in parameters(function))


def decorators(function: Function) -> set[str]:
    """Give the last names of a function's decorators: {"setter"} for @size.setter."""
    calls = (node.func if isinstance(node, ast.Call) else node for node in function.decorator_list)
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in calls}


def undocumented(module: Module) -> Iterator[Function | ast.ClassDef]:
    """Find public definitions without a docstring; overloads and setters are documented once, with their first."""
    for node in (*module.functions, *module.classes):
        repeated = isinstance(node, Function) and decorators(node) & {"overload", "setter", "deleter"}
        if not node.name.startswith("_") and not repeated and not ast.get_docstring(node):
            yield node


def public_methods(node: ast.ClassDef) -> list[str]:
    """Name the public methods that a class itself defines; properties are values, not methods."""
    methods = (item for item in node.body if isinstance(item, Function) and not item.name.startswith("_"))
    names = [item.name for item in methods if not decorators(item) & {"property", "cached_property", "setter"}]
    return sorted(set(names))


def environment_reads(module: Module) -> Iterator[ast.expr | ast.stmt]:
    """Find where a module reaches for the variables of its process, under whatever name it imported os."""
    imports = [node for node in ast.walk(module.tree) if isinstance(node, ast.Import)]
    system = {alias.asname or alias.name for node in imports for alias in node.names if alias.name == "os"}
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in system and attribute in ENVIRONMENT:
                yield node
            case ast.ImportFrom(module="os", level=0, names=names) if {n.name for n in names} & {*ENVIRONMENT, "*"}:
                yield node
            case _:
                pass


def swallowed(module: Module) -> Iterator[ast.ExceptHandler]:
    """Find handlers that catch everything without a name, or catch it broadly and do nothing."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or (is_broad(node.type) and is_idle(node.body))):
            yield node


def is_broad(caught: ast.expr) -> bool:
    """Tell whether a handler's type, alone or in a tuple, is Exception or BaseException."""
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(kind, ast.Name) and kind.id in BROAD for kind in kinds)


def is_idle(body: list[ast.stmt]) -> bool:
    """Tell whether statements do nothing about what was caught: pass, continue, a lone constant, return None."""
    return all(does_nothing(statement) for statement in body)


def does_nothing(statement: ast.stmt) -> bool:
    """Tell whether one statement has no effect but to go on."""
    match statement:
        case ast.Pass() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Return(value=None | ast.Constant(value=None)):
            return True
        case _:
            return False


def loading_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Walk the statements that run when a module is loaded, leaving out what only a type checker sees."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from loading_statements(node.orelse)
        elif not isinstance(node, Function):
            for part in ("body", "orelse", "finalbody"):
                yield from loading_statements(getattr(node, part, []))
            for branch in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
                yield from loading_statements(branch.body)


def loaded_names(module: Module) -> Iterator[tuple[ast.stmt, str]]:
    """Give what a module imports when it is loaded, as absolute dotted names down to the imported attribute."""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    for node in loading_statements(module.tree.body):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = [*above, *([node.module] if node.module else [])]
            yield from ((node, ".".join([*origin, alias.name])) for alias in node.names)


def import_graph(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Map each module to those among the others that it imports when it is loaded."""
    known = {module.name: module for module in modules}
    graph: dict[str, set[str]] = {name: set() for name in known}
    for name, module in known.items():
        for _, target in loaded_names(module):
            while target and target not in known:
                target = target.rpartition(".")[0]  # an attribute belongs to the module that holds it
            if target and target != name:
                graph[name].add(target)
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Find every module that a module leads to."""
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        if (name := ahead.pop()) not in found:
            found.add(name)
            ahead.extend(graph[name])
    return found


def largest_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Name the modules of the largest set in which each leads to every other; empty where there is none."""
    led_to = {name: reachable(graph, name) for name in graph}
    cycles = [
        sorted(other for other in led_to[name] if name in led_to[other]) for name in graph if name in led_to[name]
    ]
    return max(cycles, key=len, default=[])
