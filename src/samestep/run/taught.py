"""A teacher in a run: closed with it, and met by all ranks equally often where its calls need them."""

from dataclasses import replace
from pathlib import Path

from samestep.facts.world import World
from samestep.plan.teacher import Setting
from samestep.run.engine import RunEngine
from samestep.run.machines import machines_of_ranks
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


def setting_here(world: World, global_batch: int, sharing: int) -> Setting:
    """What a teacher is placed for: this machine once for each node, and the ranks on it, `sharing` on a device.

    Memory that is free lacks what this process has taken already, its CUDA context among it.
    """
    found = machines_of_ranks(world, sharing)
    # A rank may see its own GPU only, so that a node has at least as many as it has ranks.
    found = replace(found, per_node=max(found.per_node, world.local_size))
    return Setting(found, world.size, global_batch, -(-global_batch // world.size))


def needs_all(engine: RunEngine) -> bool:
    """Whether the calls of a teacher need all ranks, so that an evaluation must give each equally many batches."""
    return any(teacher.lockstep for teacher in engine.teachers)
