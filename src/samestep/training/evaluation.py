"""`run.evaluate`: a model in evaluation mode, without gradients and without collectives that could hang."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from samestep.context import RunContext
from samestep.errors import WrapError
from samestep.parallel.batchnorm import average_running_stats
from samestep.parallel.wrapped_model import WrappedModel


@contextmanager
def evaluate(context: RunContext, model: nn.Module, teacher_needs_all_ranks: bool) -> Generator[nn.Module]:
    """Yield the module to call; the mode of every submodule is restored afterwards, also after an exception."""
    wrapped = _find(context, model)
    net = model if wrapped is None else wrapped.core
    average_running_stats(context.comm, net)  # the average of a model has running statistics of its own
    modes = [(module, module.training) for module in net.modules()]
    before = context.lockstep
    sharded = wrapped is not None and wrapped.sharded
    context.lockstep = not context.comm.alone and (sharded or teacher_needs_all_ranks)
    net.eval()
    try:
        with torch.no_grad():
            yield net
    finally:
        context.lockstep = before
        if wrapped is not None:
            wrapped.reshard()
        for module, training in modes:
            module.training = training


def _find(context: RunContext, model: nn.Module) -> WrappedModel | None:
    """The wrapped model that `model` belongs to; None for one that was not wrapped, such as a moving average."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
        raise WrapError(
            f"run.evaluate needs a torch.nn.Module, got {type(model).__name__}: pass the model that run.wrap returned"
        )
    return next((known for known in context.models if model in (known.model, known.core, known.inner)), None)
