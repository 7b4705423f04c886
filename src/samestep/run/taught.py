"""A teacher in a run: closed with it, and met by all ranks equally often where its calls need them."""

from pathlib import Path

from samestep.run.engine import RunEngine
from samestep.teacher.frozen import Build
from samestep.teacher.ground import Ground, Wish
from samestep.teacher.teacher import Teacher, open_teacher


def take_teacher(
    engine: RunEngine,
    ground: Ground,
    build: Build | str | Path,
    weights: str | Path | None,
    placement: str | None,
    wish: Wish,
) -> Teacher:
    """A teacher that ends with the run, also where that fails: other ranks may wait for what this one serves."""
    teacher = open_teacher(ground, build, weights, placement, wish)
    engine.teachers.append(teacher)
    engine.at_end.append(teacher.close)
    return teacher


def needs_all(engine: RunEngine) -> bool:
    """Whether the calls of a teacher need all ranks, so that an evaluation must give each equally many batches."""
    return any(teacher.lockstep for teacher in engine.teachers)
