"""`samestep recipe`: list, run and copy the training scripts that come with samestep."""

import ast
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any, cast

import click

from samestep.cli.main import Group
from samestep.cli.run_command import command as run_command
from samestep.errors import LaunchError
from samestep.launch.configuration import (
    FileOption,
    KnownConfig,
    OptionsFile,
    hide_secret_values,
    read_options_file,
    without_given,
)

_LAUNCHER_OPTIONS = [option for option in run_command.params if option.name not in ("module", "script")]
_NAME = click.Argument(["script"], nargs=-1, type=click.UNPROCESSED, metavar="NAME [OPTIONS OF THE RECIPE]...")
_FAST_IMPORTS = {"pathlib", "typer", "typing"}


@click.group("recipe", cls=Group)
def command() -> None:
    """List, run and copy short scripts that train real models."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of lines.")
def list_recipes(as_json: bool) -> None:
    """List every recipe with what it shows."""
    found = recipes()
    if as_json:
        entries = [{"name": name, "shows": _summary(path), "path": str(path)} for name, path in found.items()]
        click.echo(json.dumps(entries, indent=2))
        return
    indent = max(map(len, found)) + 2
    for name, path in found.items():
        line = f"{name:{indent}}{_summary(path)}"
        if sys.stdout.isatty():
            line = textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent=" " * indent)
        click.echo(line)
    click.echo("`samestep recipe run NAME` runs one, `samestep recipe copy NAME` copies its script", err=True)


@command.command(
    "run",
    short_help="Run the recipe NAME on all GPUs of this machine, or on several nodes.",
    params=[*_LAUNCHER_OPTIONS, _NAME],
    context_settings=run_command.context_settings,
    epilog="Options before NAME are those of `samestep run`, options after it are those of the recipe. Examples: "
    "samestep recipe run saliency --help; samestep recipe run --nproc-per-node 2 saliency --epochs 3; "
    "samestep recipe run saliency --config run.yaml",
)
@click.pass_context
def run_recipe(context: click.Context, script: tuple[str, ...], **options: Any) -> int:
    """Run the recipe NAME on all GPUs of this machine, or on several nodes together."""
    if not script:
        raise LaunchError(f"no recipe given: choose one of {', '.join(recipes())}")
    name, *arguments = script
    path = find(name)
    if missing := [module for module in _imported_packages(path) if find_spec(module) is None]:
        extra = "recipes,lightning" if "lightning" in missing else "recipes"
        raise LaunchError(
            f"the recipe {name} needs {', '.join(missing)}, which is not installed: pip install 'samestep[{extra}]'"
        )
    config, arguments = _take_config(options.pop("config"), arguments)
    known = None
    if config is not None:
        file = read_options_file(config)
        arguments = [*_file_arguments(path, file, arguments), *arguments]
        known = KnownConfig(hide_secret_values(file.values()), str(config))
    if (code := parse_options(path, arguments)) is not None:  # without starting ranks or creating a run folder
        return code
    code = context.invoke(run_command, module=False, script=(str(path), *arguments), config=known, **options)
    assert isinstance(code, int)
    return code


@command.command("copy")
@click.argument("name")
@click.option("--to", "target", type=click.Path(path_type=Path),
              help="The file to write, or the folder to write NAME.py into; default: the current folder.")  # fmt: skip
def copy_recipe(name: str, target: Path | None) -> None:
    """Copy the script of the recipe NAME to start your own from."""
    source = find(name)
    target = target or Path(source.name)
    try:
        folder, other = target.parent, "pass another file with --to"
        if target.is_dir():
            folder, target = target, target / source.name
        elif target.suffix != ".py":
            folder, other = target, "pass a file name that ends in .py"
        if folder.exists() and not folder.is_dir():
            raise LaunchError(f"{folder} is not a folder: {other}")
        if not folder.is_dir():
            create = f"create it with `mkdir -p {quote(str(folder))}`"
            raise LaunchError(f"the folder {folder} does not exist: {create}, or {other}")
        if target.exists():
            raise LaunchError(f"{target} exists and is not overwritten: move it, or pass another file with --to")
        shutil.copyfile(source, target)
    except OSError as error:
        raise LaunchError(f"cannot write {target} ({error.strerror}): pass another file with --to") from error
    path = quote(str(target))
    click.echo(f"{target}: run it with `samestep run {path}`, show its options with `python {path} --help`")


def recipes() -> dict[str, Path]:
    """All recipes by name: those of the installed package, or those of a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if found := {path.stem: path for path in sorted(folder.glob("*.py"))}:
            return found
    raise LaunchError(f"no recipes found in {package / 'recipes'}: reinstall samestep")


def find(name: str) -> Path:
    """The script of a recipe."""
    known = recipes()
    if name not in known:
        hint = "".join(f"; did you mean {similar}?" for similar in get_close_matches(name, known, n=1))
        raise LaunchError(f"unknown recipe {name}: choose one of {', '.join(known)}{hint}")
    return known[name]


def _take_config(config: Path | None, arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The file of `--config`, which may also come after the name of the recipe, and the other arguments."""
    left = list[str]()
    words = iter(arguments)
    for word in words:
        if word == "--config":
            if (value := next(words, None)) is None:
                raise LaunchError("--config needs a file: pass a .yaml, .toml or .json file")
            config = Path(value)
        elif word.startswith("--config="):
            config = Path(word.partition("=")[2])
        else:
            left.append(word)
    return config, left


def _file_arguments(path: Path, file: OptionsFile, explicit: Sequence[str]) -> list[str]:
    """The options of a file as arguments of a recipe, each checked by the recipe's own parser."""
    import typer.main

    app = _load_outline(path, lambda: None)["app"]
    command = cast("Any", typer.main.get_command(cast("typer.Typer", app)))
    known = {name.lstrip("-"): each for each in command.params for name in each.opts if name.startswith("--")}
    known = {name: each for name, each in known.items() if name not in ("help", "version")}
    found = list[str]()
    for name, option in file.options.items():
        dashed = name.replace("_", "-")
        if dashed not in known:
            hint = "".join(f"; did you mean {near}?" for near in get_close_matches(dashed, known, n=1))
            names = ", ".join(sorted(known))
            raise file.error(option.line, f"the recipe {path.stem} has no option {name}: use one of {names}{hint}")
        words = _as_words(file, dashed, option, known[dashed])
        try:
            command.main(args=list(words), prog_name=path.stem, standalone_mode=False)
        except Exception as error:  # of the click that typer contains
            if not hasattr(error, "format_message"):
                raise
            if type(error).__name__ != "MissingParameter":  # the other options come later
                problem = getattr(error, "message", error)
                raise file.error(option.line, f"{name} is {option.value}, which is not valid: {problem}") from error
        found += words if dashed in without_given({dashed: option}, explicit) else []
    return found


def _as_words(file: OptionsFile, name: str, option: FileOption, parameter: Any) -> list[str]:
    value, text = option.value, option.text
    if value is None:
        return []
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise file.error(option.line, f"{name} is {text}, and it must be true or false")
        return [f"--{name}"] if value else list(parameter.secondary_opts[:1])
    if isinstance(text, list) and not parameter.multiple:
        raise file.error(option.line, f"{name} is a list, and it must be one value")
    if isinstance(value, bool):
        raise file.error(option.line, f"{name} is {str(value).lower()}, and it is not a flag: write its value")
    return [f"--{name}={each}" for each in ([text] if isinstance(text, str) else text)]


def parse_options(path: Path, arguments: Sequence[str]) -> int | None:
    """Parse the options of a recipe without importing torch: None if they are valid, else typer's exit code.

    Only the signature of `main` is executed. Typer prints the help text or the error.
    """
    parsed: list[bool] = []
    namespace = _load_outline(path, lambda: parsed.append(True))
    words = ["--help"] if "-h" in arguments else list(arguments)
    try:
        cast("Callable[..., object]", namespace["app"])(args=words, prog_name=f"samestep recipe run {path.stem}")
    except SystemExit as ended:
        code = ended.code
    else:
        code = 0
    return None if parsed else code if isinstance(code, int) else 1


def _load_outline(path: Path, parsed: Callable[[], None]) -> dict[str, object]:
    """The app of a recipe whose `main` only calls `parsed`."""
    outline = ast.Module(list(_outline(ast.parse(path.read_text(encoding="utf-8")))), type_ignores=[])
    namespace: dict[str, object] = {"__name__": path.stem, "_parsed": parsed}
    exec(compile(outline, str(path), "exec", optimize=0), namespace)  # a part of a script that comes with samestep
    return namespace


def _outline(script: ast.Module) -> Iterator[ast.stmt]:
    """The statements that the signature of `main` needs, and `main` with a call of `_parsed` as its body."""
    known: set[str] = set()
    for node in script.body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            docstring = [node.body[0]] if ast.get_docstring(node) else []
            node.body = [*docstring, *ast.parse("_parsed()").body]
            yield node
        elif defined := _names_defined(node, known):
            known |= defined
            yield node


def _names_defined(node: ast.stmt, known: set[str]) -> set[str]:
    """The names that a fast import, or an assignment from known names, defines; empty for other statements."""
    match node:
        case ast.Import(names=names) | ast.ImportFrom(names=names) if _modules(node) <= _FAST_IMPORTS:
            return {alias.asname or alias.name for alias in names}
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            used = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}
            return {name} if used <= known else set()
        case _:
            return set()


def _imported_packages(path: Path) -> list[str]:
    """The packages that a script imports at module level, each once."""
    modules = [name for node in ast.parse(path.read_text(encoding="utf-8")).body for name in _modules(node)]
    return list(dict.fromkeys(name.partition(".")[0] for name in modules))


def _modules(node: ast.stmt) -> set[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return {node.module} if node.module else set()
    return {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()


def _summary(path: Path) -> str:
    """The first line of the docstring of a script."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
