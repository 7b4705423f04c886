"""`run.wrap` and `run.average`: a model registered with the run for training, and a moving average of its weights."""

from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from samestep.context import RunContext, next_seed, seed_all_ranks
from samestep.data.loader import list_tensors, move_to_device
from samestep.distributed.once import run_on_every_rank
from samestep.errors import DataError, TeacherError, WrapError
from samestep.messages import format_list
from samestep.parallel.fsdp import fill_copy, local_tensor
from samestep.parallel.materialize import Read, saved_tensors
from samestep.parallel.precision import convert_weights
from samestep.parallel.wrap import WrapOptions, check_options, wrap
from samestep.teacher.frozen_model import common_prefix, explain_prefix, first_difference, unsaved_buffers
from samestep.teacher.model_files import Weights, module_names, open_weights, unused_names
from samestep.torch_private import copy_without_weights
from samestep.training.auto_plan import RunPlan, plan_run
from samestep.training.mistakes import check_not_wrapped
from samestep.training.rank_times import watch_forward
from samestep.training.run_description import describe_model

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
        context.record("plan", **made.details)
        options = made.apply(options, model)
    read = None
    if weights is not None:
        read = run_on_every_rank(context.comm, "opening weights=", WrapError, _open_weights, model, weights)
    wrapped = wrap(context.comm, model, context.device, options, precision, in_step, context.print, read)
    context.models.append(wrapped)
    context.record("model", **describe_model(wrapped.inner, wrapped.strategy))
    watch_forward(context.times, wrapped, precision.compile)
    context.randomness.add_model(wrapped.inner, batch_dim)
    seed_all_ranks(next_seed(context.config.seed))
    return wrapped.model


def _open_weights(model: nn.Module, path: str | Path) -> Read:
    """How to read a tensor of the model, by its name there, from a file or folder with exactly these tensors."""
    if not isinstance(path, str | Path) or not str(path).strip():  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
        raise WrapError(
            f"weights={path!r} of run.wrap is not a path: pass the path of a .safetensors file, of a Hugging Face "
            "folder or of a file written by torch.save, or omit it"
        )
    own = dict(saved_tensors(model))
    try:
        files = open_weights(path)
    except TeacherError as error:
        raise WrapError(f"weights= of run.wrap: {error}") from error
    files = files.renamed(module_names(model, own, files.names()))
    held = set(files.names())
    tied, stored, missing = dict[int, list[str]](), dict[str, str](), list[str]()
    for name, tensor in own.items():
        tied.setdefault(id(tensor), []).append(name)
    for names in tied.values():
        if found := [name for name in names if name in held]:
            _check_tied(model, files, found)
            stored.update(dict.fromkeys(names, found[0]))
        else:
            missing.append(names[0])
    firsts = [names[0] for names in tied.values() if names[0] in stored]
    problems = {"not in the file": missing, "only in the file": _only_in_files(model, files, missing, path)}
    problems |= _type_problems(files, {name: (own[name], stored[name]) for name in firsts})
    texts = [f"{len(each)} tensor(s) {what}: {format_list(each, _SHOWN)}" for what, each in problems.items() if each]
    if texts:
        raise WrapError(
            f"weights={str(path)!r} does not match {type(model).__name__}: {'; '.join(texts)}. Pass the weights of a "
            "model with the same names, shapes and dtypes; to train a new layer on top of them, load them on the CPU "
            "of rank 0"
        )
    return lambda name: files.tensor(stored[name])


def _check_tied(model: nn.Module, files: Weights, names: Sequence[str]) -> None:
    if other := first_difference(files, names):
        raise WrapError(
            f"{type(model).__name__} ties {names[0]!r} and {other!r} to one tensor, but {files.path} holds two "
            "different ones: build the model without tying them, or save a file with only the right one"
        )


def _only_in_files(model: nn.Module, files: Weights, missing: list[str], path: str | Path) -> list[str]:
    """Names that the model does not have, not even as a buffer that is not saved; raises if a prefix is the reason."""
    own = {name for name, _ in (*saved_tensors(model), *unsaved_buffers(model))}
    others = [name for name in files.names() if name not in own]
    unused = set(unused_names(model, others, own))
    extra, kind = [name for name in others if name not in unused], type(model).__name__
    if message := explain_prefix(kind, files.path, missing, extra):
        raise WrapError(f"weights= of run.wrap: {message}")
    if prefix := common_prefix(extra, missing):
        raise WrapError(
            f"weights={str(path)!r} holds the weights of a part of {kind}, whose names begin with {prefix!r} in the "
            f"model: add the prefix once, {{{prefix!r} + name: tensor for name, tensor in state.items()}}, with the "
            "other tensors of the model if it has any, and save that; to train these from their initialization, load "
            "the part on the CPU of rank 0"
        )
    return extra


def _type_problems(files: Weights, tensors: Mapping[str, tuple[torch.Tensor, str]]) -> dict[str, list[str]]:
    """Tensors with another shape in the file, or with whole numbers there and floats in the model or vice versa."""
    shapes, dtypes = list[str](), list[str]()
    for name, (tensor, source) in tensors.items():
        shape, dtype = files.shape(source), files.dtype(source)
        if shape != tuple(tensor.shape):
            shapes.append(f"{name} is {tuple(tensor.shape)}, in the file {shape}")
        elif (tensor.is_floating_point(), tensor.is_complex()) != (dtype.is_floating_point, dtype.is_complex):
            dtypes.append(f"{name} is {tensor.dtype}, in the file {dtype}")
    return {"of another shape in the file": shapes, "of another kind of dtype in the file": dtypes}


def average_model(context: RunContext, model: nn.Module, decay: float) -> AveragedModel:
    """What `run.average` does: torch's average of the user's module, sharded as the module is."""
    wrapped = context.find_wrapped(model) if isinstance(model, nn.Module) else None  # pyright: ignore[reportUnnecessaryIsInstance]  # scripts are not type-checked
    if wrapped is None:
        raise WrapError(
            f"run.average got a {type(model).__name__} that run.wrap has not returned: wrap the model first, and pass "
            "what run.wrap returned"
        )
    if not isinstance(decay, Real) or not 0 <= decay <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WrapError(
            f"run.average got decay={decay!r}: pass the weight of the old average, a number from 0 to 1, such as 0.999"
        )
    update = get_ema_multi_avg_fn(decay)

    def average(averaged: Sequence[torch.Tensor], current: Sequence[torch.Tensor], updates: torch.Tensor | int) -> None:
        """On this rank's parts: torch cannot combine sharded tensors and those of frozen parts in one call."""
        update(list(map(local_tensor, averaged)), list(map(local_tensor, current)), updates)

    if wrapped.shard_copy is None:
        return AveragedModel(wrapped.inner, multi_avg_fn=average)
    wrapped.reshard()
    averaged = AveragedModel(copy_without_weights(wrapped.inner), multi_avg_fn=average)
    wrapped.shard_copy(averaged.module)
    fill_copy(averaged.module, wrapped.inner)
    return averaged


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
