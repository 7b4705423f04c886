"""Frozen models for distillation: loading, placements, caching and serving their outputs."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep.teacher.student import Student, Timed, mean_pool

__all__ = ["Student", "Timed", "mean_pool"]


def __getattr__(name: str) -> object:
    """Import the student, and torch with it, on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'samestep.teacher' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("samestep.teacher.student"), name)
