"""The options of a recipe, read from its text without running it: told and checked before any rank is started.

A recipe imports torch and more before it looks at its options, and as ranks it would complain once for each of them.
Its signature needs none of that, so what is read here is the script's outline: light imports, the names made of them,
and `main` without its body.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

_LIGHT = ("pathlib", "typer", "typing")


class _App(Protocol):
    """A typer.Typer; typer itself comes with an extra."""

    def __call__(self, *, args: list[str], prog_name: str) -> object:
        """Parse, run, and leave by SystemExit."""
        ...


def parse_options(path: Path, arguments: Sequence[str]) -> int | None:
    """The exit code where `arguments` ask for help or are wrong, which is told; None where a run can begin."""
    outline = ast.Module(list(_outline(ast.parse(path.read_text(encoding="utf-8")))), type_ignores=[])
    names: dict[str, object] = {"__name__": path.stem}
    exec(compile(outline, str(path), "exec"), names)  # a recipe of ours, and less of it than a run would run
    words, reached = ["--help"] if "-h" in arguments else list(arguments), list[bool]()
    names["_parsed"] = lambda: reached.append(True)
    try:
        cast("_App", names["app"])(args=words, prog_name=f"samestep recipe run {path.stem}")
    except SystemExit as ended:
        code = ended.code
    else:
        code = 0
    return None if reached else code if isinstance(code, int) else 1


def _outline(script: ast.Module) -> Iterator[ast.stmt]:
    """What the signature of `main` needs; in place of its body a call that tells that everything was understood."""
    known: set[str] = set()
    for node in script.body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            told = [node.body[0]] if ast.get_docstring(node) else []
            node.body = [*told, *ast.parse("_parsed()").body]
            yield node
        elif made := _light(node, known):
            known |= made
            yield node


def _light(node: ast.stmt, known: set[str]) -> set[str]:
    """The names that a line makes of what is light, or of names so made; none where it needs more."""
    match node:
        case ast.Import(names=names) if all(alias.name in _LIGHT for alias in names):
            return {alias.asname or alias.name for alias in names}
        case ast.ImportFrom(module=module, names=names) if module in _LIGHT:
            return {alias.asname or alias.name for alias in names}
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _used(value) <= known:
            return {name}
        case _:
            return set()


def _used(value: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
