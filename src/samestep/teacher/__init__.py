"""Frozen models that teach: one copy, in the right place."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep.teacher.student import Student, Timed, pooled

__all__ = ["Student", "Timed", "pooled"]
_HOMES = {"Student": "student", "Timed": "student", "pooled": "student"}


def __getattr__(name: str) -> object:
    """Import what a student is made of when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep.teacher' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"samestep.teacher.{_HOMES[name]}"), name)
