"""A model for evaluation: right mode, no gradients, nothing in its forward pass that could hang."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from samestep.distributed.communicator import Communicator
from samestep.environment.world import World
from samestep.errors import WrapError
from samestep.parallel.batchnorm import average_running_stats
from samestep.parallel.wrapped_model import WrappedModel
from samestep.planner.cluster_discovery import cluster_of_ranks
from samestep.planner.teacher_costs import TeacherSetup
from samestep.teacher.frozen_model import Build
from samestep.teacher.options import Ground, TeacherOptions
from samestep.teacher.teacher import Teacher, open_teacher
from samestep.training.step_engine import RunEngine


def take_teacher(
    engine: RunEngine,
    ground: Ground,
    build: Build | str | Path,
    weights: str | Path | None,
    placement: str | None,
    wish: TeacherOptions,
) -> Teacher:
    """A teacher that ends with the run, also where that fails: other ranks may wait for what this one serves."""
    teacher = open_teacher(ground, build, weights, placement, wish)
    engine.teachers.append(teacher)
    engine.at_end.append(teacher.close)
    return teacher


def setting_here(world: World, global_batch: int, sharing: int) -> TeacherSetup:
    """What a teacher is placed for: this machine once for each node, and the ranks on it, `sharing` on a device.

    Memory that is free lacks what this process has taken already, its CUDA context among it.
    """
    found = cluster_of_ranks(world, sharing)
    # A rank may see its own GPU only, so that a node has at least as many as it has ranks.
    found = replace(found, devices_per_node=max(found.devices_per_node, world.local_size))
    return TeacherSetup(found, world.size, global_batch, -(-global_batch // world.size))


def needs_all(engine: RunEngine) -> bool:
    """Whether the calls of a teacher need all ranks, so that an evaluation must give each equally many batches."""
    return any(teacher.lockstep for teacher in engine.teachers)


@contextmanager
def evaluate(link: Communicator, engine: RunEngine, model: nn.Module) -> Generator[nn.Module]:
    """Yield what to call; every submodule's mode is restored afterwards, also after an exception."""
    wrapped = _find(engine, model)
    net = model if wrapped is None else wrapped.core
    average_running_stats(link, net)  # a moving average of a model has some of its own
    modes = [(module, module.training) for module in net.modules()]
    before = engine.lockstep
    sharded = wrapped is not None and wrapped.sharded
    engine.lockstep = not link.alone and (sharded or needs_all(engine))
    net.eval()
    try:
        with torch.no_grad():
            yield net
    finally:
        engine.lockstep = before
        if wrapped is not None:
            wrapped.rest()
        for module, training in modes:
            module.training = training


def _find(engine: RunEngine, model: nn.Module) -> WrappedModel | None:
    """The wrapped model that `model` is a name for; None for one that nobody wrapped, such as a moving average."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # what scripts pass is not typed
        raise WrapError(
            f"run.evaluate got a {type(model).__name__}, which is no torch.nn.Module: give it what run.wrap returned"
        )
    return next((known for known in engine.models if model in (known.model, known.core, known.inner)), None)
