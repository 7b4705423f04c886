"""Options of the user's own build function, typed after `--`: its parameters, by their names and kinds."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import click

from samestep.errors import PlanError

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
