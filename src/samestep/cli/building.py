"""The user's own function, found by the words `package.module:function` or `file.py:function`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast

from samestep.errors import PlanError

_EXAMPLE = "mylab:build, or train.py:build"


def find_function(words: str) -> Callable[[], object]:
    """Import what stands before the colon, from the current folder first, and take what stands behind it."""
    place, colon, name = words.rpartition(":")
    if not colon or not place or not name:
        raise PlanError(
            f"{words} names no function: type the module or file, a colon and the function, as in {_EXAMPLE}"
        )
    module = _of_file(Path(place)) if place.endswith(".py") else _of_module(place)
    found: object = getattr(module, name, None)
    if found is None:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise PlanError(f"{place} has no function {name}: it has {', '.join(own) or 'none'}")
    if not callable(found):
        raise PlanError(
            f"{words} is a {type(found).__name__}, not a function: name one that returns a model and a batch"
        )
    return cast("Callable[[], object]", found)


def _of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PlanError(f"there is no file {path} in {Path.cwd()}: name a file and a function in it, as in {_EXAMPLE}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does, so that what it defines can find itself
    _look_in(path.parent.resolve())
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(str(path), error) from error
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
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _failed(name, error) from error


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _failed(place: str, error: Exception) -> PlanError:
    return PlanError(
        f"{place} cannot be imported ({type(error).__name__}: {error}): a plan imports it to call its function; what "
        'is meant to run as a script only belongs under `if __name__ == "__main__":`'
    )
