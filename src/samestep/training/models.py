"""`run.wrap` and `run.evaluate`: a model registered with the run for training, and in evaluation mode."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn

from samestep.context import RunContext, next_seed, seed_all_ranks
from samestep.data.loader import list_tensors, move_to_device
from samestep.distributed.once import run_on_every_rank
from samestep.errors import CommunicationError, DataError, TeacherError, WrapError
from samestep.messages import format_list
from samestep.parallel.batchnorm import average_running_stats
from samestep.parallel.materialize import Read, saved_tensors
from samestep.parallel.precision import convert_weights
from samestep.parallel.wrap import WrapOptions, check_options, wrap
from samestep.parallel.wrapped_model import WrappedModel
from samestep.teacher.model_files import module_names, open_weights, unused_names
from samestep.training.auto_plan import RunPlan, plan_run
from samestep.training.mistakes import check_not_wrapped

_SHOWN: Final = 5


def wrap_model(
    context: RunContext,
    plans: list[RunPlan],
    model: nn.Module,
    options: WrapOptions,
    example: object,
    optimizer: str,
    batch_dim: int | None = None,
    weights: str | Path | None = None,
) -> nn.Module:
    """What `run.wrap` does: plan what the options leave open, wrap, and register the model with the run."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
        raise WrapError(
            f"run.wrap needs a torch.nn.Module, got {type(model).__name__}: wrap the model that trains; a teacher is "
            "frozen and needs no wrapping"
        )
    if torch.get_default_device().type == "meta":
        raise WrapError(
            "run.wrap was called inside of `with torch.device('meta')`: build the model there, and wrap it after that "
            "block"
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
    read = None
    if weights is not None:
        read = run_on_every_rank(context.comm, "opening weights=", WrapError, _open_weights, model, weights)
    wrapped = wrap(context.comm, model, context.device, options, precision, in_step, context.print, read)
    context.models.append(wrapped)
    context.randomness.add_model(wrapped.inner, batch_dim)
    seed_all_ranks(next_seed(context.config.seed))
    return wrapped.model


def _open_weights(model: nn.Module, path: str | Path) -> Read:
    """How to read a tensor of the model, by its name there, from a file or folder with exactly these tensors."""
    own = dict(saved_tensors(model))
    try:
        files = open_weights(path)
    except TeacherError as error:
        raise WrapError(f"weights= of run.wrap: {error}") from error
    files = files.renamed(module_names(model, own, files.names()))
    held, tied = set(files.names()), dict[int, list[str]]()
    for name, tensor in own.items():
        tied.setdefault(id(tensor), []).append(name)
    stored = {name: next((each for each in names if each in held), None) for names in tied.values() for name in names}
    missing = [name for name in own if stored[name] is None]
    extra = [name for name in held - {*own} if name not in unused_names(model, sorted(held - {*own}), own)]
    wrong = [name for name in own if (each := stored[name]) and files.shape(each) != tuple(own[name].shape)]
    problems = (
        ("not in the file", missing),
        ("only in the file", sorted(extra)),
        ("of another shape in the file", wrong),
    )
    if texts := [f"{len(names)} tensor(s) {what}: {format_list(names, _SHOWN)}" for what, names in problems if names]:
        raise WrapError(
            f"weights={str(path)!r} does not match {type(model).__name__}: {'; '.join(texts)}. Pass the weights of a "
            "model with the same names and shapes; to train a new layer on top of them, load them on the CPU of rank 0"
        )
    return lambda name: files.tensor(stored[name] or name)


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
