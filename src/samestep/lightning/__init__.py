"""The same laws inside a Lightning Trainer, for an unchanged LightningModule."""

from importlib import import_module
from typing import TYPE_CHECKING

from samestep.errors import SamestepError

# Lightning costs seconds to import and comes with an extra: names are imported when first asked for.
_HOMES = {
    "SameStep": "samestep.lightning.same_step",
    "Logs": "samestep.lightning.logs",
    "StopTogether": "samestep.lightning.stop",
    "layout": "samestep.lightning.launched",
    "mean": "samestep.lightning.loss",
    "once": "samestep.lightning.peers",
}

if TYPE_CHECKING:
    from samestep.lightning.launched import layout
    from samestep.lightning.logs import Logs
    from samestep.lightning.loss import mean
    from samestep.lightning.peers import once
    from samestep.lightning.same_step import SameStep
    from samestep.lightning.stop import StopTogether

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
