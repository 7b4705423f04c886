"""Profile a model by tracing a training step on shapes alone, without a GPU and without memory for weights.

The user's build function returns a model and an example batch, both without a device. Tensors of the batch have samples
along their first dimension. The loss is the one that the model returns (`.loss` or `["loss"]`), or the cross entropy if
the model takes the first item of a pair and the second one matches its output as labels, or the sum of the outputs.
A third value, `lambda model, batch: loss`, replaces these defaults.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from samestep.data.loader import list_tensors
from samestep.data.sample_rng import set_micro_batch
from samestep.errors import MeasurementTooSlow, PlanError
from samestep.messages import format_bytes
from samestep.parallel.precision import compute_in, turn_on_fused, use_channels_last
from samestep.parallel.submodules import checkpoint_activations, frozen_parts, keep_frozen_in_eval
from samestep.planner.cuda_emulation import emulate_cuda
from samestep.planner.model_profile import MemoryPoint, ModelProfile, PeakMemory
from samestep.planner.step_recorder import CUBLAS_WORKSPACE, MemorySample, MemoryTracker, OpCounter, fit_peak_memory
from samestep.planner.traced_model import (
    Build,
    FloatsOnMeta,
    Loss,
    MeasuredOnCpu,
    RealIntegers,
    TracedModel,
    build_model,
    checkpointable_classes,
    describe_error,
    describe_parts,
    explain_errors,
    first_line,
    give_memory,
    named_blocks,
    profile_weights,
    resolve_classes,
    storage_bytes,
    strip_memory,
    watch_parts,
)
from samestep.torch_private import cannot_be_traced, without_memory

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MIN_SAMPLES = 2
"""Smallest traced micro-batch: a single sample is a special case for BatchNorm and for some kernels."""
MEASURE_SECONDS = 60.0
"""Time limit of real micro-batches on the CPU, for steps that cannot be traced."""
TRACED = "traced without memory"
"""`ModelProfile.method` of a trace without caveats."""
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_AUTO_PRECISION = {"cuda": "bf16", "cpu": "fp32"}
# What the user wrote, by the error that it causes.
_VALUE_ACCESS = {
    "aten._local_scalar_dense.default": ".item(), float() or `if` of a tensor",
    "aten.nonzero.default": "nonzero(), or a mask as an index",
    ".numpy() is not supported for tensor subclasses.": ".numpy() of a tensor",
}
_UPPER_BOUND = (
    "; a mask selects elements by values, which a trace does not have (nonzero(), or a mask as an index): all elements "
    "count, so memory and time are upper bounds"
)


@dataclass(frozen=True)
class StepConfig:
    """How the traced step is configured."""

    optimizer: str | MakeOptimizer  # name of a class in torch.optim, or a function of the parameters
    dtype: torch.dtype | None  # dtype of autocast; None: no autocast
    target: str  # the device that the step would run on: "cuda" or "cpu"
    blocks: tuple[type[nn.Module] | str, ...] = ()  # classes of the blocks, or their names; empty: detected
    channels_last: bool = False  # whether images and convolution weights use the channels-last memory format


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

    A mask that selects by values (`nonzero`, a mask as an index) counts as if it selected everything, which is an upper
    bound. A step that needs values (`.item()`, `.numpy()`) cannot be traced. Then two small micro-batches are run on
    the CPU, for at most MEASURE_SECONDS, and then MeasurementTooSlow is raised. `ModelProfile.method` says how the
    profile was made. Nothing else should compute in this process during a trace. `blocks` are classes of submodules, or
    their names, as in run.wrap(blocks=...).

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
            stripped = replace(traced, example=strip_memory(traced.model, traced.example))
            tracer = StepTracer(stripped, config, sizes[0])
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
    integers = RealIntegers()
    with _target(config.target):
        traced, method = _build(build, loss)
        try:
            _prepare(traced, config)
            with without_memory(), integers:
                stripped = replace(traced, example=strip_memory(traced.model, traced.example))
                profile = _measure_steps(stripped, config, 2 * max(MIN_SAMPLES, traced.samples), method)
                return replace(profile, method=method + _UPPER_BOUND) if integers.selected_all else profile
        except Exception as error:
            if not (cannot_be_traced(error) or integers.selected_all):
                raise
            why = first_line(error) if cannot_be_traced(error) else "aten.nonzero.default"
        return _measure_on_cpu(build, loss, config, _VALUE_ACCESS.get(why, why))


def _measure_on_cpu(build: Build, loss: Loss | None, config: StepConfig, why: str) -> ModelProfile:
    """Run real micro-batches, since a step needs values; raises MeasurementTooSlow after MEASURE_SECONDS."""
    method = (
        f"measured with real micro-batches of {MIN_SAMPLES} and {2 * MIN_SAMPLES} samples on the CPU, since a step "
        f"needs values, which a trace does not have ({why})"
    )
    traced = build_model(build, loss)
    give_memory(traced.model)
    _prepare(traced, config)
    # fp16 has the size of bf16, whose kernels crash on some CPUs
    config = replace(config, dtype=None if config.dtype is None else torch.float16)
    name, persistent = type(traced.model).__name__, format_bytes(profile_weights(traced.model).persistent)
    too_slow = MeasurementTooSlow(
        f"A step of {name} needs values, which a trace does not have ({why}), and steps of {MIN_SAMPLES} and "
        f"{2 * MIN_SAMPLES} samples take more than {MEASURE_SECONDS:g} s on the CPU. So the memory of activations is "
        f"unknown; weights, gradients and Adam's two moments need {persistent}, which is a lower bound. Compute "
        "without these values, or plan with fewer layers."
    )
    with MeasuredOnCpu(MEASURE_SECONDS, too_slow):
        return _measure_steps(traced, config, 2 * MIN_SAMPLES, method)


def _build(build: Build, loss: Loss | None) -> tuple[TracedModel, str]:
    """Build the model without memory, or with memory if the build function needs values of tensors."""
    try:
        with FloatsOnMeta():
            return build_model(build, loss), TRACED
    except PlanError as error:
        if error.__cause__ is None:  # the returned values are wrong, with and without memory
            raise
        why = first_line(error.__cause__)
    return build_model(build, loss), f"traced, but built with memory, since it cannot be built without ({why})"


def _prepare(traced: TracedModel, config: StepConfig) -> None:
    keep_frozen_in_eval(traced.model, frozen_parts(traced.model))
    if config.channels_last:
        use_channels_last(traced.model, traced.model)


def _measure_steps(traced: TracedModel, config: StepConfig, samples: int, method: str) -> ModelProfile:
    """Trace steps of `samples` and of half as many samples, without and with activation checkpointing."""
    model, sizes = traced.model, (samples // 2, samples)
    classes = resolve_classes(model, config.blocks)
    frozen, blocks = frozen_parts(model), named_blocks(model, classes)
    tracer = StepTracer(traced, config, samples)
    counter = OpCounter()
    small = tracer.trace(sizes[0])
    with watch_parts(counter, [*blocks.values(), *frozen.values()]) as calls:
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
        blocks=describe_parts(blocks, calls, samples),
        frozen_parts=describe_parts(frozen, calls, samples),
        method=method,
    )


def _peak_memory(tracer: "StepTracer", small: "StepTrace", large: "StepTrace", sizes: tuple[int, int]) -> PeakMemory:
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


@dataclass(frozen=True)
class StepTrace:
    """The trace of one step."""

    timeline: list[MemorySample]  # memory in use after each operation
    forward_flops: float  # FLOPs of the forward pass; 0 without a counter
    batch_bytes: int  # bytes of the batch


class StepTracer:
    """A model and its optimizer after a first step, so that the optimizer state exists."""

    def __init__(self, traced: TracedModel, config: StepConfig, samples: int) -> None:
        self.traced, self._config, self.on_cuda = traced, config, config.target == "cuda"
        self._trainable = [p for p in traced.model.parameters() if p.requires_grad]
        self.optimizer = _make_optimizer(config.optimizer, self._trainable)
        if config.dtype is not None and not self.on_cuda:
            compute_in(traced.model, torch.device("cpu"), config.dtype)
        self.gradient_bytes = self._first_step(samples)
        self.state_bytes = storage_bytes(_state_tensors(self.optimizer))
        self.weight_bytes = storage_bytes((*traced.model.parameters(), *traced.model.buffers()))

    def trace(self, samples: int, counter: OpCounter | None = None) -> StepTrace:
        """Trace a step with one micro-batch; `counter` counts the operators of forward and backward pass."""
        tracker = MemoryTracker(cuda=self.on_cuda, counter=counter)
        model, batch = self.traced.model, self.traced.batch(samples)
        state = _state_tensors(self.optimizer)
        for tensor in (*model.parameters(), *model.buffers(), *state, *list_tensors(batch)):
            tracker.add(tensor)
        hooks = [p.register_post_accumulate_grad_hook(tracker.mark_gradient) for p in self._trainable]
        try:
            with tracker:
                loss = self._forward(samples, batch)
                forward_flops = 0.0 if counter is None else counter.flops
                self._backward(loss)
                del loss
                tracker.counter = None  # the optimizer's work is estimated from the bytes of its state
                self._step()
        finally:
            for hook in hooks:
                hook.remove()
            self.optimizer.zero_grad()
        return StepTrace(tracker.timeline, forward_flops, storage_bytes(list_tensors(batch)))

    def _first_step(self, samples: int) -> int:
        """Create the optimizer state; returns the bytes of all gradients."""
        self._backward(self._forward(samples, self.traced.batch(samples)))
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        size = storage_bytes(gradient for gradient in gradients if gradient.layout == torch.strided)
        if self.on_cuda:
            _step_as_on_cuda(self.optimizer)
        self._step()
        self.optimizer.zero_grad()
        return size

    def _forward(self, samples: int, batch: object) -> torch.Tensor:
        """The loss, under autocast as in a run on CUDA."""
        set_micro_batch(torch.zeros(samples, dtype=torch.long))
        dtype = self._config.dtype if self.on_cuda else None
        with torch.autocast("cpu", dtype=dtype) if dtype is not None else nullcontext():
            return self.traced.compute_loss(batch)

    def _backward(self, loss: torch.Tensor) -> None:
        what = f"the backward pass of {type(self.traced.model).__name__}"
        with explain_errors(what, "failed", "Call loss.backward() on its own to see the traceback."):
            loss.backward()

    def _step(self) -> None:
        """Step the optimizer without a closure, as training loops do."""
        with explain_errors(
            _optimizer_name(self._config.optimizer),
            "cannot step after a backward pass",
            "Use an optimizer that needs no closure and supports the gradients of this model, such as AdamW or SGD.",
        ):
            self.optimizer.step()


def _make_optimizer(optimizer: str | MakeOptimizer, parameters: list[nn.Parameter]) -> Optimizer:
    make = _find_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    with explain_errors(
        _optimizer_name(optimizer),
        "does not accept the parameters of this model",
        "Name another class of torch.optim, or pass trace_model(optimizer=...) a function of the parameters.",
    ):
        made = make(parameters)
    if not isinstance(made, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's function
        raise PlanError(
            f"The optimizer function returned a {type(made).__name__}. Pass the name of a class in torch.optim, or a "
            "function of the parameters, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)"
        )
    return made


def _find_optimizer(name: str) -> MakeOptimizer:
    known = {n: kind for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    known.pop("Optimizer", None)
    if name not in known:
        raise PlanError(f"optimizer={name!r} is not in torch.optim. Use one of {', '.join(sorted(known))}.")
    return cast("MakeOptimizer", known[name])


def _optimizer_name(optimizer: str | MakeOptimizer) -> str:
    return f"optimizer={optimizer!r}" if isinstance(optimizer, str) else "the optimizer"


def _step_as_on_cuda(optimizer: Optimizer) -> None:
    """Make an optimizer of CPU parameters step as on CUDA; call it before the first step, with gradients present.

    Run enables fused kernels if torch has them. Otherwise torch steps all parameters at once, with temporaries.
    """
    if turn_on_fused(optimizer, device="cpu"):
        return
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
