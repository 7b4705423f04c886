"""samestep in a Lightning Trainer: an unchanged LightningModule has the same result on any number of ranks."""

from importlib import import_module
from typing import TYPE_CHECKING

from samestep.errors import SamestepError

# Imported on first access: Lightning takes seconds to import and comes with an extra.
_MODULES = {
    "FileLogger": "file_logger", "SameStep": "same_step", "StopAllRanks": "trainer_ranks",
    "launcher_args": "trainer_ranks", "mean": "same_step", "normal": "same_step", "once": "trainer_ranks",
    "random": "same_step",
}  # fmt: skip

if TYPE_CHECKING:
    from samestep.lightning.file_logger import FileLogger
    from samestep.lightning.same_step import SameStep, mean, normal, random
    from samestep.lightning.trainer_ranks import StopAllRanks, launcher_args, once

__all__ = ["FileLogger", "SameStep", "StopAllRanks", "launcher_args", "mean", "normal", "once", "random"]


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in __all__:
        raise AttributeError(f"module 'samestep.lightning' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        import_module("lightning.pytorch")
    except ModuleNotFoundError as error:
        raise SamestepError(
            f"samestep.lightning needs Lightning and cannot import it ({error}): pip install 'samestep[lightning]'"
        ) from error
    return getattr(import_module(f"samestep.lightning.{_MODULES[name]}"), name)
