"""Loggers of a run: console, text log, metrics.jsonl, TensorBoard, CSV and experiment trackers."""

from importlib import import_module
from typing import TYPE_CHECKING

# Imported on first access: the launcher needs other modules of this package, and must not wait for torch.
if TYPE_CHECKING:
    from samestep.loggers.logger_thread import Logger, RunInfo
    from samestep.loggers.trackers import CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger

_HOMES = {
    "Logger": "logger_thread",
    "RunInfo": "logger_thread",
    "CSVLogger": "trackers",
    "MLflowLogger": "trackers",
    "TensorBoardLogger": "trackers",
    "WandbLogger": "trackers",
}

__all__ = ["CSVLogger", "Logger", "MLflowLogger", "RunInfo", "TensorBoardLogger", "WandbLogger"]


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep.loggers' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"samestep.loggers.{_HOMES[name]}"), name)
