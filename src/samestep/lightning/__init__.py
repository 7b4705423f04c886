"""samestep in a Lightning Trainer: an unchanged LightningModule has the same result on any number of ranks."""

from importlib import import_module
from typing import TYPE_CHECKING

from samestep.errors import SamestepError

# Imported on first access: Lightning takes seconds to import and comes with an extra.
_MODULES = {
    "FileLogger": "samestep.lightning.file_logger",
    "SameStep": "samestep.lightning.same_step",
    "StopAllRanks": "samestep.lightning.trainer_ranks",
    "launcher_args": "samestep.lightning.trainer_ranks",
    "mean": "samestep.lightning.weighted_loss",
    "once": "samestep.lightning.trainer_ranks",
}

if TYPE_CHECKING:
    from samestep.lightning.file_logger import FileLogger
    from samestep.lightning.same_step import SameStep
    from samestep.lightning.trainer_ranks import StopAllRanks, launcher_args, once
    from samestep.lightning.weighted_loss import mean

__all__ = ["FileLogger", "SameStep", "StopAllRanks", "launcher_args", "mean", "once"]


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'samestep.lightning' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        import_module("lightning.pytorch")
    except ModuleNotFoundError as error:
        raise SamestepError(
            f"samestep.lightning needs Lightning and cannot import it ({error}): pip install 'samestep[lightning]'"
        ) from error
    return getattr(import_module(_MODULES[name]), name)
