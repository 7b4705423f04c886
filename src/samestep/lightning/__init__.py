"""The same laws inside a Lightning Trainer, for an unchanged LightningModule."""

from importlib import import_module
from typing import TYPE_CHECKING

from samestep.errors import SamestepError

# Lightning costs seconds to import and comes with an extra: names are imported when first asked for.
_HOMES = {
    "SameStep": "samestep.lightning.same_step",
    "Logs": "samestep.lightning.file_logger",
    "StopTogether": "samestep.lightning.trainer_ranks",
    "layout": "samestep.lightning.trainer_ranks",
    "mean": "samestep.lightning.weighted_loss",
    "once": "samestep.lightning.trainer_ranks",
}

if TYPE_CHECKING:
    from samestep.lightning.file_logger import Logs
    from samestep.lightning.same_step import SameStep
    from samestep.lightning.trainer_ranks import StopTogether, layout, once
    from samestep.lightning.weighted_loss import mean

__all__ = ["Logs", "SameStep", "StopTogether", "layout", "mean", "once"]


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep.lightning' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        import_module("lightning.pytorch")
    except ModuleNotFoundError as error:
        raise SamestepError(
            f"samestep.lightning needs Lightning and cannot import it ({error}): pip install 'samestep[lightning]'"
        ) from error
    return getattr(import_module(_HOMES[name]), name)
