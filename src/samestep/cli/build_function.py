"""Import the user's build function for `samestep plan`, and bind its parameters to options after `--`."""

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper, wraps
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, cast, get_args, get_origin, get_type_hints

import click

from samestep.environment.world import import_without_running, refuse_if_only_imported
from samestep.errors import PlanError
from samestep.messages import format_list

_EXAMPLE = "train.py:build or mypackage.models:build"
_BUILD = "build"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LISTED = 20  # functions in an error message
_EMPTY = inspect.Parameter.empty


def find_build(target: str, arguments: Sequence[str] = ()) -> Callable[[], object]:
    """The function of MODULE:FUNCTION, FILE.py:FUNCTION or RECIPE with its parameters bound to `arguments`.

    The function raises PlanError if it starts to train.
    """
    function = _recipe_build(target) if target.isidentifier() else find_function(target)
    build = bind_options(function, target, arguments)

    @wraps(build)
    def build_only() -> object:
        with forbid_training():
            return build()

    build_only.__qualname__ = getattr(build, "__qualname__", target)  # a callable object has none
    return build_only


def script_of(target: str) -> str:
    """The script of a target: the file, the recipe, or train.py if the target is a module.

    >>> script_of("lab/train.py:build"), script_of("mypackage.models:build"), script_of("saliency")
    ('lab/train.py', 'train.py', 'saliency')
    """
    module = target.rpartition(":")[0]
    return target if target.isidentifier() else module if module.endswith(".py") else "train.py"


def find_function(target: str) -> Callable[..., object]:
    """Import MODULE or FILE.py of `target`, from the current folder first, and return its function."""
    place, name = _split(target)
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found: object = getattr(module, name, None)
    if found is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise PlanError(f"{place} has no function {name}. It has {format_list(functions, _LISTED) or 'none'}.")
    if not callable(found):
        raise PlanError(
            f"{target} is of type {type(found).__name__}, not a function. Name a function that returns a model and a "
            "batch."
        )
    return found


def _split(target: str) -> tuple[str, str]:
    """The module or file, and the function."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise PlanError(
            f"{target} does not name a function. Pass the module or file, a colon and the function, for example "
            f"{_EXAMPLE}."
        )
    if not place.endswith(".py") and not all(part.isidentifier() for part in place.split(".")):
        raise PlanError(f"{place} is not a module name. Pass a dotted name, or the file: {place}.py:{name}")
    return place, name


def _recipe_build(name: str) -> Callable[..., object]:
    """The build function of a recipe that samestep ships."""
    from samestep.cli.recipe_command import recipes

    known = recipes()
    if name not in known:
        raise PlanError(
            f"{name} is neither a function nor a recipe. Pass the module or file, a colon and the function, for "
            f"example {_EXAMPLE}, or one of the recipes {', '.join(known)}."
        )
    try:
        module = _import_file(known[name])
    except PlanError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError):
            raise
        extra = "recipes,lightning" if str(missing.name).startswith("lightning") else "recipes"
        raise PlanError(
            f"The recipe {name} needs {missing.name}, which is not installed. Run pip install 'samestep[{extra}]'."
        ) from error
    found: object = getattr(module, _BUILD, None)
    if not callable(found):
        raise PlanError(
            f"The recipe {name} has no function {_BUILD} that returns its model and a batch. Copy it with `samestep "
            f"recipe copy {name}`, write one, and pass {name}.py:{_BUILD}."
        )
    return found


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise PlanError(f"{path} {problem} in {Path.cwd()}. Pass a file and its function, for example {_EXAMPLE}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does, so that classes of the module can be looked up
    _add_to_path(path.parent.resolve())
    with _importing(str(path)):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    try:
        known = importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # a parent package is missing, or the name is __main__
        known = False
    if not known:
        raise PlanError(
            f"Module {name} is neither in {Path.cwd()} nor installed. Pass its dotted name from the folder "
            f"that contains it, for example {_EXAMPLE}."
        )
    with _importing(name):
        return importlib.import_module(name)


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextmanager
def _importing(place: str) -> Generator[None]:
    """Import without training, and turn exceptions into a PlanError."""
    try:
        with forbid_training():
            yield
    except (PlanError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # also SystemExit, and classes of the user
        from samestep.planner.traced_model import describe_error

        raise PlanError(
            f"{place} cannot be imported ({describe_error(error)}). A plan imports it to call its function. Put code "
            'that should run only as a script under `if __name__ == "__main__":`.'
        ) from error


@contextmanager
def forbid_training() -> Generator[None]:
    """Inside, creating a Run, stepping an optimizer or opening a process group raises PlanError.

    A process group is noticed at the end, since torch has no hook for it. `os._exit` raises SystemExit: otherwise the
    command would end without a plan and without a message.
    """
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def refuse(*_: object) -> None:
        refuse_if_only_imported("an optimizer was stepped")

    def leave(code: int) -> NoReturn:
        if os.getpid() != process:  # a child of the user's code ends as it wants
            exit_at_once(code)
        raise SystemExit(f"os._exit({code})")

    process, exit_at_once = os.getpid(), os._exit
    os._exit, hook = leave, register_optimizer_step_pre_hook(refuse)
    try:
        with import_without_running():
            yield
            if dist.is_available() and dist.is_initialized():
                refuse_if_only_imported("a process group was opened")
    finally:
        os._exit = exit_at_once
        hook.remove()


def bind_options(function: Callable[..., object], name: str, arguments: Sequence[str]) -> Callable[[], object]:
    """The function with its parameters parsed from options: `-- --layers 12 --small` for build(layers=2, small=False).

    The fields of a dataclass default are options of their own; an option for a list can be repeated.

    >>> bind_options(lambda layers=2: layers, "build", ["--layers", "12"])()
    12
    """
    parameters = _parameters(function)
    options = {option.name: option for each in parameters for option in _options(each)}
    try:
        context = click.Command(name, params=[*options.values()]).make_context(name, list(arguments))
    except click.UsageError as error:
        known = ", ".join(option.opts[0] for option in options.values()) or "none"
        raise PlanError(
            f"{name} cannot be called with these options ({error.format_message()}). Pass the parameters of the build "
            f"function after `--`. It has: {known}"
        ) from error
    bound = partial(function, **{each.name: _value(each, context.params) for each in parameters})
    update_wrapper(bound, function)
    return bound


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError):  # annotations with names that are not imported, or a callable object
        signature = inspect.signature(function)
    return [each for each in signature.parameters.values() if each.kind in _NAMED]


def _options(parameter: inspect.Parameter) -> Iterator[click.Option]:
    if not _is_dataclass(parameter.default):
        yield _option(parameter.name, parameter.annotation, parameter.default)
        return
    types = get_type_hints(type(parameter.default), include_extras=True)
    for field in dataclasses.fields(parameter.default):
        yield _option(field.name, types[field.name], getattr(parameter.default, field.name))


def _value(parameter: inspect.Parameter, parsed: dict[str, object]) -> object:
    default = parameter.default
    if not _is_dataclass(default):
        return _or_default(parsed[parameter.name], default)
    names = [field.name for field in dataclasses.fields(default)]
    return dataclasses.replace(default, **{name: _or_default(parsed[name], getattr(default, name)) for name in names})


def _or_default(value: object, default: object) -> object:
    """The parsed value; the default of a list whose option was not given."""
    return list(cast("tuple[object, ...]", value)) or default if isinstance(value, tuple) else value


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _option(name: str, annotation: object, default: object) -> click.Option:
    kind = _type(annotation, default)
    flag = f"--{name.replace('_', '-')}"
    if get_origin(kind) is list:
        item = _click_type(get_args(kind)[0])
        return click.Option([flag, name], type=item, multiple=True, required=default is _EMPTY)
    if default is _EMPTY:
        return click.Option([flag, name], type=_click_type(kind), required=True)
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", name], default=default)
    return click.Option([flag, name], type=_click_type(kind), default=default, show_default=True)


def _type(annotation: object, default: object) -> object:
    """The type of a parameter by its annotation, else by its default, else str."""
    if annotation is _EMPTY:
        return str if default in (None, _EMPTY) else type(default)
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0], default)
    if get_origin(annotation) in (Union, UnionType):
        return next((_type(each, default) for each in get_args(annotation) if each is not NoneType), str)
    return annotation


def _click_type(kind: object) -> "click.ParamType[Any, Any]":  # quoted: not generic in older versions
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))  # converts to the value, not to its text
    known: dict[object, click.ParamType[Any, Any]] = {
        int: click.INT,
        float: click.FLOAT,
        bool: click.BOOL,
        Path: click.Path(path_type=Path),
    }
    return known.get(kind, click.STRING)
