"""The user's own function, found by the words `package.module:function`, `file.py:function` or a recipe's name."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import ModuleType

from samestep.cli.plan_guard import looking
from samestep.cli.plan_options import with_options
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
    from samestep.cli.recipe import recipes

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
        from samestep.measure.failures import said_by

        raise PlanError(
            f"{place} cannot be imported ({said_by(error)}): a plan imports it to call its function; what is meant to "
            'run as a script only belongs under `if __name__ == "__main__":`'
        ) from error
