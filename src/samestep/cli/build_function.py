"""Options of the user's own build function, typed after `--`: its parameters, by their names and kinds."""

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper, wraps
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import click

from samestep.environment.world import import_without_running, refuse_if_only_imported
from samestep.errors import PlanError

_EXAMPLE = "mylab:build, or train.py:build"
_BUILD = "build"


def find_build(words: str, arguments: Sequence[str] = ()) -> Callable[[], object]:
    """The function of these words, its parameters bound to `arguments`; whatever in it would train is refused."""
    build = with_options(_of_recipe(words) if words.isidentifier() else find_function(words), words, arguments)

    @wraps(build)
    def looked_at() -> object:
        """Build, and do not train."""
        with looking():
            return build()

    looked_at.__qualname__ = getattr(build, "__qualname__", words)  # what is called need not be a function
    return looked_at


def script_of(words: str) -> str:
    """The script that these words belong to: the file that was named, a recipe, or one whose name nobody knows.

    >>> script_of("lab/train.py:build"), script_of("mylab:build"), script_of("saliency")
    ('lab/train.py', 'train.py', 'saliency')
    """
    place = words.rpartition(":")[0]
    return words if words.isidentifier() else place if place.endswith(".py") else "train.py"


def find_function(words: str) -> Callable[..., object]:
    """Import what stands before the colon, from the current folder first, and take what stands behind it."""
    place, name = _split(words)
    module = _of_file(Path(place)) if place.endswith(".py") else _of_module(place)
    found: object = getattr(module, name, None)
    if found is None:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise PlanError(f"{place} has no function {name}: it has {', '.join(own) or 'none'}")
    if not callable(found):
        raise PlanError(
            f"{words} is a {type(found).__name__}, not a function: name one that returns a model and a batch"
        )
    return found


def _split(words: str) -> tuple[str, str]:
    """The module or file, and the function."""
    place, colon, name = words.rpartition(":")
    if not colon or not place or not name:
        raise PlanError(
            f"{words} names no function: type the module or file, a colon and the function, as in {_EXAMPLE}"
        )
    if not place.endswith(".py") and not all(part.isidentifier() for part in place.split(".")):
        raise PlanError(f"{place} is no name of a module: type it as in import, or the file as in {place}.py:{name}")
    return place, name


def _of_recipe(name: str) -> Callable[..., object]:
    """The build function of a recipe that comes with samestep."""
    from samestep.cli.recipe_command import recipes

    known = recipes()
    if name not in known:
        raise PlanError(
            f"{name} names no function and no recipe: type the module or file, a colon and the function, as in "
            f"{_EXAMPLE}, or one of {', '.join(known)}"
        )
    found: object = getattr(_read_recipe(name, known[name]), _BUILD, None)
    if not callable(found):
        raise PlanError(
            f"the recipe {name} has no function {_BUILD} that gives its model and a batch: copy it with `samestep "
            f"recipe copy {name}`, write one, and type {name}.py:{_BUILD}"
        )
    return found


def _read_recipe(name: str, path: Path) -> ModuleType:
    try:
        return _of_file(path)
    except PlanError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError):
            raise
        extra = "recipes,lightning" if str(missing.name).startswith("lightning") else "recipes"
        raise PlanError(
            f"the recipe {name} needs {missing.name}, which is not installed: pip install 'samestep[{extra}]'"
        ) from error


def _of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PlanError(f"there is no file {path} in {Path.cwd()}: name a file and a function in it, as in {_EXAMPLE}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does, so that what it defines can find itself
    _look_in(path.parent.resolve())
    with _importing(str(path)):
        spec.loader.exec_module(module)
    return module


def _of_module(name: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        known = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package on the way to it
        known = False
    if not known:
        raise PlanError(
            f"there is no module {name} in {Path.cwd()}, nor is it installed: type its dotted name as in {_EXAMPLE}, "
            "from the folder that holds it"
        )
    with _importing(name):
        return importlib.import_module(name)


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextmanager
def _importing(place: str) -> Generator[None]:
    """Read a module, without training what it trains; what it raises is told in one line."""
    try:
        with looking():
            yield
    except PlanError:
        raise
    except (Exception, SystemExit) as error:
        from samestep.planner.traced_model import said_by

        raise PlanError(
            f"{place} cannot be imported ({said_by(error)}): a plan imports it to call its function; what is meant to "
            'run as a script only belongs under `if __name__ == "__main__":`'
        ) from error


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NONE = inspect.Parameter.empty


def with_options(function: Callable[..., object], name: str, arguments: Sequence[str]) -> Callable[[], object]:
    """The function with what was typed for its parameters: `-- --layers 12 --small` for build(layers=2, small=False).

    A parameter whose default is a dataclass is typed by its fields, one of a list as often as needed.

    >>> with_options(lambda layers=2: layers, "build", ["--layers", "12"])()
    12
    """
    parameters = _parameters(function)
    options = {option.name: option for each in parameters for option in _options(each)}
    try:
        context = click.Command(name, params=[*options.values()]).make_context(name, list(arguments))
    except click.UsageError as error:
        known = ", ".join(option.opts[0] for option in options.values()) or "none"
        raise PlanError(
            f"{name} cannot be called so ({error.format_message()}): the options of a build function follow `--`, and "
            f"are its parameters; here {known}"
        ) from error
    bound = partial(function, **{each.name: _value(each, context.params) for each in parameters})
    update_wrapper(bound, function)
    return bound


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError):  # annotations that name what is not imported; what is called need not be a function
        signature = inspect.signature(function)
    return [each for each in signature.parameters.values() if each.kind in _NAMED]


def _options(parameter: inspect.Parameter) -> Iterator[click.Option]:
    if not _is_record(parameter.default):
        yield _option(parameter.name, parameter.annotation, parameter.default)
        return
    kinds = get_type_hints(type(parameter.default), include_extras=True)
    for field in dataclasses.fields(parameter.default):
        yield _option(field.name, kinds[field.name], getattr(parameter.default, field.name))


def _value(parameter: inspect.Parameter, typed: dict[str, object]) -> object:
    record = parameter.default
    if not _is_record(record):
        return _given(typed[parameter.name], record)
    fields = [field.name for field in dataclasses.fields(record)]
    return dataclasses.replace(record, **{name: _given(typed[name], getattr(record, name)) for name in fields})


def _given(typed: object, default: object) -> object:
    """What was typed; of a list that was not typed at all, the default."""
    return list(cast("tuple[object, ...]", typed)) or default if isinstance(typed, tuple) else typed


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _option(name: str, annotation: object, default: object) -> click.Option:
    kind = _kind(annotation, default)
    flag = f"--{name.replace('_', '-')}"
    if get_origin(kind) is list:
        return click.Option([flag, name], type=_click_type(get_args(kind)[0]), multiple=True, required=default is _NONE)
    if default is _NONE:
        return click.Option([flag, name], type=_click_type(kind), required=True)
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", name], default=default)
    return click.Option([flag, name], type=_click_type(kind), default=default, show_default=True)


def _kind(annotation: object, default: object) -> object:
    """What a parameter is: as it is annotated, else as its default is; text where neither tells."""
    if annotation is _NONE:
        return str if default in (None, _NONE) else type(default)
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0], default)
    if get_origin(annotation) in (Union, UnionType):
        return next((_kind(each, default) for each in get_args(annotation) if each is not NoneType), str)
    return annotation


def _click_type(kind: object) -> "click.ParamType[Any, Any]":  # quoted: older ones take no arguments
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))  # gives the value, not its text
    known: dict[object, click.ParamType[Any, Any]] = {
        int: click.INT,
        float: click.FLOAT,
        bool: click.BOOL,
        Path: click.Path(path_type=Path),
    }
    return known.get(kind, click.STRING)


@contextmanager
def looking() -> Generator[None]:
    """Inside, a Run that is created, an optimizer that steps and a process group that is opened are errors.

    A group is noticed when the script has been read, since torch tells nobody before.
    """
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def refuse(*_: object) -> None:
        """Every optimizer asks here before it steps."""
        refuse_if_only_imported("an optimizer was stepped")

    stepping = register_optimizer_step_pre_hook(refuse)
    try:
        with import_without_running():
            yield
            if dist.is_available() and dist.is_initialized():
                refuse_if_only_imported("a process group was opened")
    finally:
        stepping.remove()
