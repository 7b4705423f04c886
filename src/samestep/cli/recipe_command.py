"""`samestep recipe`: the scripts that come with samestep, to look at, to run and to start from."""

import ast
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any, Protocol, cast

import click

from samestep.cli.main import Group
from samestep.cli.run_command import command as start
from samestep.errors import LaunchError

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


@click.group("recipe", cls=Group)
def command() -> None:
    """Scripts that train something real, each short enough to be read in one sitting."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of lines.")
def list_recipes(as_json: bool) -> None:
    """Name every recipe and say what it shows."""
    found = recipes()
    if as_json:
        entries = [{"name": name, "shows": _subject(path), "path": str(path)} for name, path in found.items()]
        click.echo(json.dumps(entries, indent=2))
        return
    indent = max(map(len, found)) + 2
    for name, path in found.items():
        click.echo(_hanging(f"{name:{indent}}{_subject(path)}", indent))
    click.echo("`samestep recipe run NAME` runs one, `samestep recipe copy NAME` puts its script here", err=True)


_OF_THE_LAUNCHER = [each for each in start.params if each.name not in ("module", "script")]
_NAME = click.Argument(["script"], nargs=-1, type=click.UNPROCESSED, metavar="NAME [OPTIONS OF THE RECIPE]...")


# It takes what `samestep run` takes, with the name of a recipe where the script would stand.
@command.command(
    "run",
    short_help="Run the recipe NAME as ranks, on this machine or on several nodes.",
    params=[*_OF_THE_LAUNCHER, _NAME],
    context_settings=start.context_settings,
    epilog="Options before NAME are those of `samestep run`, options after it the recipe's own. Examples: "
    "samestep recipe run saliency --help; samestep recipe run --nproc-per-node 2 saliency --epochs 3",
)
@click.pass_context
def run_recipe(context: click.Context, script: tuple[str, ...], **options: Any) -> int:
    """Run the recipe NAME as ranks on this machine, or on several nodes together."""
    if not script:
        raise LaunchError(f"no recipe was named: there are {', '.join(recipes())}")
    name, *arguments = script
    path = find(name)
    if missing := [module for module in _imported(path) if find_spec(module) is None]:
        extra = "recipes,lightning" if "lightning" in missing else "recipes"
        raise LaunchError(
            f"the recipe {name} needs {', '.join(missing)}, which is not installed: pip install 'samestep[{extra}]'"
        )
    if (told := parse_options(path, arguments)) is not None:  # no ranks, and no folder for what they would log
        return told
    code = context.invoke(start, module=False, script=(str(path), *arguments), **options)
    assert isinstance(code, int)
    return code


@command.command("copy")
@click.argument("name")
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    help="The file to write, or the folder to write NAME.py into; default: here.",
)
def copy_recipe(name: str, target: Path | None) -> None:
    """Put the recipe NAME into this folder, to start from."""
    source = find(name)
    target = target or Path(source.name)
    if target.suffix != ".py" and not target.is_dir():
        raise LaunchError(
            f"there is no folder {target}: type `mkdir -p {quote(str(target))}` first, or name a file that ends in .py"
        )
    try:
        if target.is_dir():
            target = target / source.name
        if target.exists():
            raise LaunchError(f"{target} exists and is not overwritten: move it away, or name another file with --to")
        if not target.parent.is_dir():
            make = f"type `mkdir -p {quote(str(target.parent))}` first"
            raise LaunchError(f"there is no folder {target.parent}: {make}, or name another file with --to")
        shutil.copyfile(source, target)
    except OSError as error:
        raise LaunchError(f"{target} cannot be written ({error.strerror}): name another file with --to") from error
    typed = quote(str(target))
    click.echo(f"{target}: run it with `samestep run {typed}`, see its options with `python {typed} --help`")


def recipes() -> dict[str, Path]:
    """Every recipe by its name: those in the installed package, or those beside the sources in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if found := {path.stem: path for path in sorted(folder.glob("*.py"))}:
            return found
    raise LaunchError(f"there are no recipes in {package / 'recipes'}: install samestep anew")


def find(name: str) -> Path:
    """The script of a recipe."""
    known = recipes()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise LaunchError(f"there is no recipe {name}: there are {', '.join(known)}{meant}")
    return known[name]


def _imported(path: Path) -> list[str]:
    """The packages that a script imports at its top, each once."""
    found: dict[str, None] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found.update(dict.fromkeys(alias.name.partition(".")[0] for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found[node.module.partition(".")[0]] = None
    return list(found)


def _hanging(line: str, indent: int) -> str:
    """A line folded under its second column where a terminal is narrower; piped on, it stays one."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent=" " * indent)


def _subject(path: Path) -> str:
    """The first line of a script's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
