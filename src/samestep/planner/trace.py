"""What a model needs, seen from one training step that is traced by shapes alone, without a GPU and without memory.

The build function is the user's: it returns a model and an example batch, built without a device. Tensors of the batch
have samples along their first dimension. A model that returns a loss (`.loss` or `["loss"]`) is asked for it; one that
takes the first of a pair is scored by the cross entropy with the second, where its shape fits; else the outputs are
summed. A third value, `lambda model, batch: loss`, does it in the user's own way.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from samestep.data.sample_rng import set_micro_batch
from samestep.errors import PlanError
from samestep.parallel.activation_checkpointing import checkpoint_activations
from samestep.parallel.precision import use_channels_last
from samestep.parallel.submodules import frozen_parts, keep_frozen_in_eval
from samestep.planner.cuda_emulation import as_on_cuda
from samestep.planner.memory_tracker import CUDA_LIBRARIES, peak_of
from samestep.planner.model_parts import ForwardWork, blocks_of, classes_in, describe, nbytes, recomputable
from samestep.planner.model_profile import ModelProfile, Moment, Peak
from samestep.planner.operations import Work
from samestep.planner.traced_model import (
    Build,
    FloatsOnMeta,
    Loss,
    Subject,
    WholeNumbers,
    build_subject,
    first_line,
    said_by,
    to_shapes,
)
from samestep.planner.traced_step import Followed, MakeOptimizer, Stepping, Terms
from samestep.torch_private import cannot_be_traced, without_memory

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_AUTO = {"cuda": "bf16", "cpu": "fp32"}
FEWEST = 2
"""Samples that a step is looked at with, at least: one row is a case of its own for BatchNorm, and for kernels."""
# What a user wrote, by the operation that it comes down to.
_ASKED = {
    "aten._local_scalar_dense.default": ".item(), float() or `if` of a tensor",
    "aten.nonzero.default": "nonzero(), or a mask as an index",
    ".numpy() is not supported for tensor subclasses.": ".numpy() of a tensor",
}


@dataclass(frozen=True)
class _Wish:
    """How the model is set up."""

    blocks: tuple[type[nn.Module] | str, ...]
    """Classes of its blocks, or their names; empty: found."""
    channels_last: bool
    """Whether images lie channel by channel last."""


def trace_model(
    build: Build,
    *,
    optimizer: str | MakeOptimizer = "AdamW",
    precision: str = "auto",
    blocks: Sequence[type[nn.Module] | str] = (),
    loss: Loss | None = None,
    target: str = "cuda",
    channels_last: bool = False,
) -> ModelProfile:
    """Facts of the model that `build` makes, from steps that are traced without memory, whatever its size.

    Where a step looks at values (`.item()`, `nonzero`, `.numpy()`), it cannot be traced: then two small micro-batches
    are computed for real on the CPU, and `how` says so. While a trace runs, nothing else in the process should compute.
    `blocks` are classes of submodules, or their names, as in run.wrap(blocks=...).

    >>> facts = trace_model(lambda: (nn.Linear(1000, 10), torch.zeros(4, 1000)), optimizer="SGD", precision="fp32")
    >>> facts.weights, facts.gradients, facts.optimizer_state
    (40040, 40040, 0)
    """
    terms = Terms(optimizer, _dtype(precision, target), target)
    wish = _Wish(tuple(blocks), channels_last)
    try:
        return _facts(build, loss, terms, wish)
    except PlanError as error:
        if error.__cause__ is None or not _blames_precision(build, loss, terms, wish):
            raise
        name = next(name for name, dtype in _DTYPES.items() if dtype == terms.dtype)
        raise PlanError(
            f"the model fails in {name} and not in fp32 ({said_by(error.__cause__)}): where autocast gives tensors "
            "that meet two dtypes, training fails as well; bring them together with .to(other.dtype), or take "
            "precision fp32"
        ) from error


def _blames_precision(build: Build, loss: Loss | None, terms: Terms, wish: _Wish) -> bool:
    """Whether what failed goes well in fp32."""
    if terms.dtype is None:
        return False
    try:
        _facts(build, loss, replace(terms, dtype=None), wish)
    except PlanError:
        return False
    return True


def _facts(build: Build, loss: Loss | None, terms: Terms, wish: _Wish) -> ModelProfile:
    """Traced, or where that cannot be, measured."""
    with ExitStack() as until_done:
        until_done.callback(set_micro_batch, None)
        if terms.target == "cuda":
            until_done.enter_context(as_on_cuda())
        subject, how = _build(build, loss)
        try:
            return _trace(subject, terms, wish, how)
        except Exception as error:
            if not cannot_be_traced(error):
                raise
            why = first_line(error)
        how = (
            f"measured with real micro-batches of {FEWEST} and {2 * FEWEST} samples on the CPU, since a step looks "
            f"at values, which a trace has not ({_ASKED.get(why, why)})"
        )
        subject = build_subject(build, loss)
        _set_up(subject, wish)
        # as many bytes as bf16, whose kernels some CPUs claim to have and die of
        real = replace(terms, dtype=None if terms.dtype is None else torch.float16)
        return _look(subject, real, wish, 2 * FEWEST, how)


def trace_calls(
    build: Build,
    sizes: Sequence[int],
    *,
    precision: str = "auto",
    loss: Loss | None = None,
    target: str = "cuda",
    channels_last: bool = False,
) -> list[Work]:
    """The calls of steps of so many samples, each step's own; those of an optimizer left out."""
    terms = Terms("SGD", _dtype(precision, target), target)
    with ExitStack() as until_done:
        until_done.callback(set_micro_batch, None)
        if target == "cuda":
            until_done.enter_context(as_on_cuda())
        subject, _ = _build(build, loss)
        _set_up(subject, _Wish((), channels_last))
        until_done.enter_context(without_memory())
        until_done.enter_context(WholeNumbers())
        bare = replace(subject, example=to_shapes(subject.model, subject.example))
        stepping = Stepping(bare, terms, sizes[0])
        works = [Work(each_call=True) for _ in sizes]
        for samples, work in zip(sizes, works, strict=True):
            stepping.follow(samples, work)
        return works


def _build(build: Build, loss: Loss | None) -> tuple[Subject, str]:
    """Build by shapes alone, or with memory where that does not work: numbers may be asked of the weights."""
    try:
        with FloatsOnMeta():
            return build_subject(build, loss), "traced without memory"
    except PlanError as error:
        if error.__cause__ is None:  # what came back is wrong, however it was built
            raise
        why = first_line(error.__cause__)
    return build_subject(build, loss), f"traced, but built with its memory: by shapes alone it cannot be ({why})"


def _trace(subject: Subject, terms: Terms, wish: _Wish, how: str) -> ModelProfile:
    _set_up(subject, wish)
    with without_memory(), WholeNumbers():
        bare = replace(subject, example=to_shapes(subject.model, subject.example))
        return _look(bare, terms, wish, 2 * max(FEWEST, subject.samples), how)


def _set_up(subject: Subject, wish: _Wish) -> None:
    keep_frozen_in_eval(subject.model, frozen_parts(subject.model))
    if wish.channels_last:
        use_channels_last(subject.model, subject.model)


def _dtype(precision: str, target: str) -> torch.dtype | None:
    for name, value, known in (("target", target, _AUTO), ("precision", precision, ("auto", *_DTYPES))):
        if value not in known:
            raise PlanError(f"{name}={value!r} is not known: use one of {', '.join(map(repr, known))}")
    return _DTYPES[_AUTO[target] if precision == "auto" else precision]


def _look(subject: Subject, terms: Terms, wish: _Wish, samples: int, how: str) -> ModelProfile:
    """Follow steps of `samples` samples and of half as many, without and with recomputation."""
    model, sizes = subject.model, (samples // 2, samples)
    classes = classes_in(model, wish.blocks)
    asleep, blocks = frozen_parts(model), blocks_of(model, classes)
    stepping = Stepping(subject, terms, samples)
    work = Work()
    parts = ForwardWork(work, [*blocks.values(), *asleep.values()])
    small = stepping.follow(sizes[0])
    with parts.watching():
        large = stepping.follow(sizes[1], work)
    working = _peak(stepping, small, large, sizes)
    again, recomputed = work, None
    if twice := recomputable(model, classes):
        checkpoint_activations(model, twice)
        small, again = stepping.follow(sizes[0]), Work()
        recomputed = _peak(stepping, small, stepping.follow(sizes[1], again), sizes)
    return ModelProfile(
        name=type(model).__name__,
        trainable=_by_dtype(p for p in model.parameters() if p.requires_grad),
        frozen=_by_dtype(p for p in model.parameters() if not p.requires_grad),
        buffers=nbytes(model.buffers()),
        gradients=stepping.gradients,
        optimizer=type(stepping.optimizer).__name__,
        optimizer_state=stepping.state,
        working=working,
        working_recomputed=recomputed,
        forward_flops=large.forward_flops / samples,
        step_flops=work.flops / samples,
        step_flops_recomputed=again.flops / samples,
        ops=work.ops(),
        traced_batch=samples,
        blocks=describe(blocks, parts, samples),
        frozen_parts=describe(asleep, parts, samples),
        how=how,
    )


def _peak(stepping: Stepping, small: Followed, large: Followed, sizes: tuple[int, int]) -> Peak:
    """Memory over the micro-batch, with what CUDA takes beside tensors."""
    extra = Moment(0, 0, 0)
    if stepping.on_cuda:  # the next batch is copied while this one is still known
        ahead = -(-(large.batch - small.batch) // (sizes[1] - sizes[0]))
        extra = Moment(CUDA_LIBRARIES, ahead, 0)
    standing = stepping.weights + stepping.state
    return peak_of(small.notes, large.notes, sizes, standing, stepping.gradients, extra)


def _by_dtype(tensors: Iterable[torch.Tensor]) -> Mapping[str, int]:
    found: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor)
    return {name: nbytes(group) for name, group in found.items()}
