"""Frozen models that teach: one copy, in the right place."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep.teacher.student import Student, pooled

__all__ = ["Student", "pooled"]


def __getattr__(name: str) -> object:
    """Import what a student is made of when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'samestep.teacher' has no attribute {name!r}; it has {', '.join(__all__)}")
    from samestep.teacher import student

    return getattr(student, name)
