"""Measurements of Python source by its syntax tree: sizes, branches, types, documentation, imports, protocols."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
BROAD = {"Exception", "BaseException"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Module:
    """One source file: `path` relative to the repository, `name` as Python imports it."""

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

    def location(self, node: ast.stmt | ast.expr | ast.ExceptHandler) -> str:
        name = f" {node.name}" if isinstance(node, Function | ast.ClassDef) else ""
        return f"{self.path}:{node.lineno}{name}"


def read_package(folder: Path) -> list[Module]:
    """Read every module of a package, without empty files."""
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


def complexity(function: Function) -> int:
    """McCabe's complexity: one more than the number of branching statements."""
    return 1 + sum(isinstance(node, BRANCHES) for node in ast.walk(function))


def parameters(function: Function) -> list[ast.arg]:
    """List the parameters, including *args and **kwargs, without self and cls."""
    arguments = function.args
    variadic = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *variadic]
    return [argument for argument in named if argument.arg not in ("self", "cls")]


def is_typed(function: Function) -> bool:
    """Whether every parameter and the result have a type; __init__ needs no result type."""
    returns = function.returns is not None or function.name == "__init__"
    return returns and all(argument.annotation is not None for argument in parameters(function))


def decorators(function: Function) -> set[str]:
    """Return the last names of a function's decorators: {"setter"} for @size.setter."""
    calls = (node.func if isinstance(node, ast.Call) else node for node in function.decorator_list)
    return {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in calls}


def undocumented(module: Module) -> Iterator[Function | ast.ClassDef]:
    """Find public definitions without a docstring, except overloads, setters and functions inside of functions."""
    local = {inner for outer in module.functions for inner in ast.walk(outer) if inner is not outer}
    for node in (*module.functions, *module.classes):
        if node in local:
            continue
        repeated = isinstance(node, Function) and decorators(node) & {"overload", "setter", "deleter"}
        if not node.name.startswith("_") and not repeated and not ast.get_docstring(node):
            yield node


def environment_reads(module: Module) -> Iterator[ast.expr | ast.stmt]:
    """Find uses of the process's environment variables, under whatever name the module imported os."""
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
    """Find bare except clauses, and clauses that catch Exception and do nothing."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or (is_broad(node.type) and is_idle(node.body))):
            yield node


def is_broad(caught: ast.expr) -> bool:
    """Whether the type of a handler, alone or in a tuple, is Exception or BaseException."""
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(kind, ast.Name) and kind.id in BROAD for kind in kinds)


def is_idle(body: list[ast.stmt]) -> bool:
    """Whether the statements ignore the exception: pass, continue, break, a constant, return None."""
    return all(does_nothing(statement) for statement in body)


def does_nothing(statement: ast.stmt) -> bool:
    """Whether one statement has no effect except control flow."""
    match statement:
        case ast.Pass() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Return(value=None | ast.Constant(value=None)):
            return True
        case _:
            return False


def loading_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Walk the statements that run when a module is imported, without those for type checkers only."""
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
    """Yield what a module imports when it is imported, as absolute dotted names including the imported attribute."""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    for node in loading_statements(module.tree.body):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = [*above, *([node.module] if node.module else [])]
            yield from ((node, ".".join([*origin, alias.name])) for alias in node.names)


def base_names(node: ast.ClassDef) -> list[str]:
    """Return the last names of the base classes: ["Protocol"] for class A(typing.Protocol[T])."""
    plain = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in plain]


def members(node: ast.ClassDef) -> set[str]:
    """Name the methods and attributes that a class defines in its body or assigns to self."""
    found = {item.name for item in node.body if isinstance(item, Function)}
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case _:
                pass
    for item in node.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            case _:
                pass
    return found


def implementations(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Map the location of each Protocol to the classes that have all its members, themselves or by inheritance."""
    located = [(module, node) for module in modules for node in module.classes]
    own = {node.name: (members(node), base_names(node)) for _, node in located}

    def all_members(name: str) -> set[str]:
        mine, bases = own.get(name, (set[str](), list[str]()))
        return mine.union(*(all_members(base) for base in bases if base != name))

    concrete = {node.name for _, node in located if "Protocol" not in base_names(node)}
    return {
        module.location(node): sorted(name for name in concrete if members(node) <= all_members(name))
        for module, node in located
        if "Protocol" in base_names(node)
    }
