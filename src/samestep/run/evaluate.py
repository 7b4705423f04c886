"""A model for evaluation: right mode, no gradients, nothing in its forward pass that could hang."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from samestep.errors import WrapError
from samestep.ranks.link import Link
from samestep.run.engine import RunEngine
from samestep.run.taught import needs_all
from samestep.wrap.batchnorm import average_statistics
from samestep.wrap.wrapped import Wrapped


@contextmanager
def evaluate(link: Link, engine: RunEngine, model: nn.Module) -> Generator[nn.Module]:
    """Yield what to call; every submodule's mode is restored afterwards, also after an exception."""
    wrapped = _find(engine, model)
    net = model if wrapped is None else wrapped.core
    average_statistics(link, net)  # a moving average of a model has some of its own
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


def _find(engine: RunEngine, model: nn.Module) -> Wrapped | None:
    """The wrapped model that `model` is a name for; None for one that nobody wrapped, such as a moving average."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # what scripts pass is not typed
        raise WrapError(
            f"run.evaluate got a {type(model).__name__}, which is no torch.nn.Module: give it what run.wrap returned"
        )
    return next((known for known in engine.models if model in (known.model, known.core, known.inner)), None)
