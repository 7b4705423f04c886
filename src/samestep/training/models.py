"""`run.wrap` and `run.evaluate`: a model registered with the run for training, and in evaluation mode."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from samestep.context import RunContext, next_seed, seed_all_ranks
from samestep.data.loader import list_tensors, move_to_device
from samestep.errors import CommunicationError, DataError, WrapError
from samestep.parallel.batchnorm import average_running_stats
from samestep.parallel.precision import convert_weights
from samestep.parallel.wrap import WrapOptions, check_options, wrap
from samestep.parallel.wrapped_model import WrappedModel
from samestep.training.auto_plan import RunPlan, plan_run
from samestep.training.mistakes import check_not_wrapped


def wrap_model(
    context: RunContext,
    plans: list[RunPlan],
    model: nn.Module,
    options: WrapOptions,
    example: object,
    optimizer: str,
    batch_dim: int | None = None,
) -> nn.Module:
    """What `run.wrap` does: plan what the options leave open, wrap, and register the model with the run."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
        raise WrapError(
            f"run.wrap needs a torch.nn.Module, got {type(model).__name__}: wrap the model that trains; a teacher is "
            "frozen and needs no wrapping"
        )
    if any(known.owns(parameter) for known in context.models for parameter in model.parameters()):
        raise WrapError(f"{type(model).__name__} has parameters that are already wrapped: wrap a model once")
    check_not_wrapped(model)
    context.acceleration.report()
    check_options(options, model)
    precision, in_step = context.acceleration.precision, partial(getattr, context.progress, "in_step")
    convert_weights(model, precision)
    if example is not None:
        _check_example(example)
        if precision.convert_to is not None:
            example = move_to_device(example, torch.device("cpu"), precision.convert_to)
    made = plan_run(context, model, options, example, optimizer)
    if made is not None:
        plans.append(made)
        if made.micro_batch is not None:
            context.planned_micro_batch = min(made.micro_batch, context.planned_micro_batch or made.micro_batch)
        context.print(made.message)
        options = made.apply(options, model)
    wrapped = wrap(context.comm, model, context.device, options, precision, in_step, context.print)
    context.models.append(wrapped)
    context.randomness.add_model(wrapped.inner, batch_dim)
    seed_all_ranks(next_seed(context.config.seed))
    return wrapped.model


@contextmanager
def evaluate(context: RunContext, model: nn.Module, teacher_needs_all_ranks: bool) -> Generator[nn.Module]:
    """Yield the module to call; the mode of every submodule is restored afterwards, also after an exception."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
        raise WrapError(
            f"run.evaluate needs a torch.nn.Module, got {type(model).__name__}: pass the model that run.wrap returned"
        )
    wrapped = context.find_wrapped(model)
    _check_same_model(context, type(model if wrapped is None else wrapped.inner).__name__, wrapped)
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


def _check_same_model(context: RunContext, name: str, wrapped: WrappedModel | None) -> None:
    """Raise if not every rank is here, or if ranks evaluate different models; a collective."""
    own = name, None if wrapped is None else context.models.index(wrapped)
    for rank, (other, number) in enumerate(context.comm.exchange_objects("run.evaluate", own)):
        if (other, number) != own:
            mine, theirs = (f"{kind} (model {i})" for kind, i in (own, (other, number)))
            raise CommunicationError(
                f"rank {context.world.rank} evaluates {mine} and rank {rank} evaluates {theirs}: pass the same model "
                "to run.evaluate on every rank"
            )


def _check_example(example: object) -> None:
    """Raise if there is no batch to trace a step with."""
    try:
        sizes = [len(tensor) for tensor in list_tensors(example) if tensor.dim()]
    except DataError:
        sizes = []
    if not sizes or not sizes[0]:
        raise WrapError(
            f"run.wrap got a {type(example).__name__} without samples as example=: pass a batch as the model is called "
            "with it, a tensor or tuples, lists and dicts of tensors, with samples along the first dimension"
        )
