"""Profile a model by tracing a training step on shapes alone, without a GPU and without memory for weights.

The user's build function returns a model and an example batch, both without a device. Tensors of the batch have samples
along their first dimension. The loss is the one that the model returns (`.loss` or `["loss"]`), or the cross entropy if
the model takes the first item of a pair and the second one matches its output as labels, or the sum of the outputs.
A third value, `lambda model, batch: loss`, replaces these defaults.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from samestep.data.sample_rng import set_micro_batch
from samestep.errors import PlanError
from samestep.parallel.activation_checkpointing import checkpoint_activations
from samestep.parallel.precision import use_channels_last
from samestep.parallel.submodules import frozen_parts, keep_frozen_in_eval
from samestep.planner.cuda_emulation import emulate_cuda
from samestep.planner.memory_tracker import CUBLAS_WORKSPACE, fit_peak_memory
from samestep.planner.model_parts import (
    ForwardFlops,
    checkpointable_classes,
    describe_parts,
    named_blocks,
    resolve_classes,
    storage_bytes,
)
from samestep.planner.model_profile import MemoryPoint, ModelProfile, PeakMemory
from samestep.planner.operations import OpCounter
from samestep.planner.traced_model import (
    Build,
    FloatsOnMeta,
    Loss,
    RealIntegers,
    TracedModel,
    build_model,
    describe_error,
    first_line,
    strip_memory,
)
from samestep.planner.traced_step import MakeOptimizer, StepConfig, StepTrace, StepTracer
from samestep.torch_private import cannot_be_traced, without_memory

MIN_SAMPLES = 2
"""Smallest traced micro-batch: a single sample is a special case for BatchNorm and for some kernels."""
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_AUTO_PRECISION = {"cuda": "bf16", "cpu": "fp32"}
# What the user wrote, by the error that it causes.
_VALUE_ACCESS = {
    "aten._local_scalar_dense.default": ".item(), float() or `if` of a tensor",
    "aten.nonzero.default": "nonzero(), or a mask as an index",
    ".numpy() is not supported for tensor subclasses.": ".numpy() of a tensor",
}


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
    """Profile the model that `build` returns from steps that are traced without memory, whatever its size.

    A step that needs values (`.item()`, `nonzero`, `.numpy()`) cannot be traced. Then two small micro-batches are run
    on the CPU, and `ModelProfile.method` says so. Nothing else should compute in this process during a trace. `blocks`
    are classes of submodules, or their names, as in run.wrap(blocks=...).

    >>> profile = trace_model(lambda: (nn.Linear(1000, 10), torch.zeros(4, 1000)), optimizer="SGD", precision="fp32")
    >>> profile.weights, profile.gradients, profile.optimizer_state
    (40040, 40040, 0)
    """
    config = StepConfig(optimizer, _dtype(precision, target), target, tuple(blocks), channels_last)
    try:
        return _profile(build, loss, config)
    except PlanError as error:
        if error.__cause__ is None or not _works_in_fp32(build, loss, config):
            raise
        name = next(name for name, dtype in _DTYPES.items() if dtype == config.dtype)
        raise PlanError(
            f"The model fails in {name} but not in fp32 ({describe_error(error.__cause__)}). If autocast gives an "
            "operation tensors of two dtypes, training fails too. Convert one with .to(other.dtype), or use precision "
            "fp32."
        ) from error


def trace_calls(
    build: Build,
    sizes: Sequence[int],
    *,
    precision: str = "auto",
    loss: Loss | None = None,
    target: str = "cuda",
    channels_last: bool = False,
) -> list[OpCounter]:
    """The calls of forward and backward pass for each micro-batch size."""
    config = StepConfig("SGD", _dtype(precision, target), target, channels_last=channels_last)
    with _target(target):
        traced, _ = _build(build, loss)
        _prepare(traced, config)
        with without_memory(), RealIntegers():
            example = strip_memory(traced.model, traced.example)
            tracer = StepTracer(replace(traced, example=example), config, sizes[0])
            counters = [OpCounter(record_calls=True) for _ in sizes]
            for samples, counter in zip(sizes, counters, strict=True):
                tracer.trace(samples, counter)
            return counters


def _dtype(precision: str, target: str) -> torch.dtype | None:
    for name, value, known in (("target", target, _AUTO_PRECISION), ("precision", precision, ("auto", *_DTYPES))):
        if value not in known:
            raise PlanError(f"Unknown {name} {value!r}. Use one of {', '.join(map(repr, known))}.")
    return _DTYPES[_AUTO_PRECISION[target] if precision == "auto" else precision]


def _works_in_fp32(build: Build, loss: Loss | None, config: StepConfig) -> bool:
    """Whether a model that failed in another precision can be profiled in fp32."""
    if config.dtype is None:
        return False
    try:
        _profile(build, loss, replace(config, dtype=None))
    except PlanError:
        return False
    return True


@contextmanager
def _target(target: str) -> Generator[None]:
    try:
        with emulate_cuda() if target == "cuda" else nullcontext():
            yield
    finally:
        set_micro_batch(None)


def _profile(build: Build, loss: Loss | None, config: StepConfig) -> ModelProfile:
    """Trace the model, or measure it if it cannot be traced."""
    with _target(config.target):
        traced, method = _build(build, loss)
        try:
            return _trace(traced, config, method)
        except Exception as error:
            if not cannot_be_traced(error):
                raise
            why = first_line(error)
        method = (
            f"measured with real micro-batches of {MIN_SAMPLES} and {2 * MIN_SAMPLES} samples on the CPU, since a step "
            f"needs values, which a trace does not have ({_VALUE_ACCESS.get(why, why)})"
        )
        traced = build_model(build, loss)
        _prepare(traced, config)
        # fp16 has the size of bf16, whose kernels crash on some CPUs
        config = replace(config, dtype=None if config.dtype is None else torch.float16)
        return _measure_steps(traced, config, 2 * MIN_SAMPLES, method)


def _build(build: Build, loss: Loss | None) -> tuple[TracedModel, str]:
    """Build the model without memory, or with memory if the build function needs values of tensors."""
    try:
        with FloatsOnMeta():
            return build_model(build, loss), "traced without memory"
    except PlanError as error:
        if error.__cause__ is None:  # the returned values are wrong, with and without memory
            raise
        why = first_line(error.__cause__)
    return build_model(build, loss), f"traced, but built with memory, since it cannot be built without ({why})"


def _prepare(traced: TracedModel, config: StepConfig) -> None:
    keep_frozen_in_eval(traced.model, frozen_parts(traced.model))
    if config.channels_last:
        use_channels_last(traced.model, traced.model)


def _trace(traced: TracedModel, config: StepConfig, method: str) -> ModelProfile:
    _prepare(traced, config)
    with without_memory(), RealIntegers():
        stripped = replace(traced, example=strip_memory(traced.model, traced.example))
        return _measure_steps(stripped, config, 2 * max(MIN_SAMPLES, traced.samples), method)


def _measure_steps(traced: TracedModel, config: StepConfig, samples: int, method: str) -> ModelProfile:
    """Trace steps of `samples` and of half as many samples, without and with activation checkpointing."""
    model, sizes = traced.model, (samples // 2, samples)
    classes = resolve_classes(model, config.blocks)
    frozen, blocks = frozen_parts(model), named_blocks(model, classes)
    tracer = StepTracer(traced, config, samples)
    counter = OpCounter()
    part_flops = ForwardFlops(counter, [*blocks.values(), *frozen.values()])
    small = tracer.trace(sizes[0])
    with part_flops.counting():
        large = tracer.trace(sizes[1], counter)
    activations = _peak_memory(tracer, small, large, sizes)
    checkpointed_counter, checkpointed_activations = counter, None
    if checkpointed := checkpointable_classes(model, classes):
        checkpoint_activations(model, checkpointed)
        checkpointed_counter = OpCounter()
        steps = tracer.trace(sizes[0]), tracer.trace(sizes[1], checkpointed_counter)
        checkpointed_activations = _peak_memory(tracer, *steps, sizes)
    return ModelProfile(
        name=type(model).__name__,
        trainable=_bytes_by_dtype(p for p in model.parameters() if p.requires_grad),
        frozen=_bytes_by_dtype(p for p in model.parameters() if not p.requires_grad),
        buffers=storage_bytes(model.buffers()),
        gradients=tracer.gradient_bytes,
        optimizer=type(tracer.optimizer).__name__,
        optimizer_state=tracer.state_bytes,
        activations=activations,
        checkpointed_activations=checkpointed_activations,
        forward_flops=large.forward_flops / samples,
        step_flops=counter.flops / samples,
        checkpointed_step_flops=checkpointed_counter.flops / samples,
        ops=counter.ops(),
        traced_samples=samples,
        blocks=describe_parts(blocks, part_flops, samples),
        frozen_parts=describe_parts(frozen, part_flops, samples),
        method=method,
    )


def _peak_memory(tracer: StepTracer, small: StepTrace, large: StepTrace, sizes: tuple[int, int]) -> PeakMemory:
    """Peak memory over the micro-batch, on CUDA with cuBLAS and with the next batch, which is copied ahead."""
    extra = MemoryPoint(0, 0, 0)
    if tracer.on_cuda:
        next_batch = -(-(large.batch_bytes - small.batch_bytes) // (sizes[1] - sizes[0]))
        extra = MemoryPoint(CUBLAS_WORKSPACE, next_batch, 0)
    persistent = tracer.weight_bytes + tracer.state_bytes
    return fit_peak_memory(small.timeline, large.timeline, sizes, persistent, tracer.gradient_bytes, extra)


def _bytes_by_dtype(tensors: Iterable[torch.Tensor]) -> Mapping[str, int]:
    groups: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor)
    return {name: storage_bytes(group) for name, group in groups.items()}
