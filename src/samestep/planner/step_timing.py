"""Measure the time of a micro-batch on an available device by running its operations one by one, without the model."""

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import prod
from typing import Any

import torch
from torch.nn import functional

from samestep.data.loader import map_tensors
from samestep.data.sample_rng import set_micro_batch
from samestep.errors import PlanError
from samestep.parallel.precision import (
    ComputePrecision,
    check_precision,
    choose_precision,
    detect_support,
    set_fp32_products,
    use_channels_last,
)
from samestep.parallel.submodules import frozen_parts, keep_frozen_in_eval
from samestep.planner.calibration import synchronize
from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.model_profile import MeasuredTime, ModelProfile, Op
from samestep.planner.step_recorder import CPU_ATTENTION, OpCall, OpCost, OpCounter, TensorShape
from samestep.planner.time_model import op_seconds
from samestep.planner.trace import MIN_SAMPLES, trace_calls
from samestep.planner.traced_model import Build, FloatsOnMeta, Loss, TracedModel, build_model
from samestep.torch_private import cannot_be_traced

Run = Callable[[], object]

_SECONDS_PER_CALL = 0.003
_MAX_REPEATS = 30
_CACHE_BYTES, _MAX_COPIES, _SMALL_CALL = 2**28, 4, 2**20  # more than caches hold; calls below are not copied
_HOST_BOUND = 1.15  # a device that finishes at most this much later than the host was waiting for it
_WARM_UP, _TIMED = 3, 7
# Raised by calls that need real values, more memory than there is, or an operator that the device lacks.
_CALL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
# Raised by the user's code if all weights are zero.
_MODEL_ERRORS = (
    *(PlanError, RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError),
)


def time_on_gpu(
    profile: ModelProfile, build: Build, cluster: ClusterSpec, micro_batch: int, precision: str, *, channels_last: bool
) -> ModelProfile:
    """`time_model` outside of a run, on the first GPU of this machine, which is one of `cluster`."""
    device = torch.device("cuda", 0)
    compute = choose_precision([detect_support(device, check_precision(precision), compile=False)])
    return time_model(profile, build, cluster, device, micro_batch, compute, channels_last=channels_last)


def time_model(
    profile: ModelProfile,
    build: Build,
    cluster: ClusterSpec,
    device: torch.device,
    micro_batch: int,
    precision: ComputePrecision,
    *,
    loss: Loss | None = None,
    channels_last: bool = False,
) -> ModelProfile:
    """`profile` with the measured time of micro-batches up to `micro_batch` on `device`, which is one of `cluster`.

    The profile is unchanged if the model cannot be traced.
    """
    sizes = sorted({max(MIN_SAMPLES, micro_batch // 2), max(2 * MIN_SAMPLES, micro_batch)})
    target = "cuda" if device.type == "cuda" else "cpu"
    try:
        counters = trace_calls(
            build, sizes, precision=precision.name, loss=loss, target=target, channels_last=channels_last
        )
    except Exception as error:
        if cannot_be_traced(error) or isinstance(error, PlanError):  # a step of this size may fail, unlike the planned
            return profile
        raise
    restore = set_fp32_products(precision)
    try:
        seconds = [time_calls(counter, cluster, device, precision.tf32) for counter in counters]
    finally:
        restore()
    points = tuple(zip(sizes, seconds, strict=True))
    host = None
    if device.type == "cuda":
        if 2 * profile.persistent + profile.activations.at(2) < torch.cuda.mem_get_info(device)[0]:
            host = host_seconds(build, device, precision.dtype, loss, channels_last)
        torch.cuda.empty_cache()  # later code checks the free memory
        torch.cuda.reset_peak_memory_stats(device)  # the measurement must not count as training
    method = f"{profile.method}; operations timed on this device"
    return replace(profile, measured_time=MeasuredTime(cluster.device.name, points, host), method=method)


def time_calls(counter: OpCounter, cluster: ClusterSpec, device: torch.device, tf32: bool) -> float:
    """Device time of all recorded calls; those that cannot run alone are estimated."""
    measured = replay(counter.calls, device)
    return sum(
        measured[call] * cost.count if call in measured else op_seconds(cluster, as_op(call, cost), tf32)
        for call, cost in counter.calls.items()
    )


def as_op(call: OpCall, cost: OpCost) -> Op:
    """Equal calls as an `Op`, in the dtype of the last floating-point tensor."""
    flat = [each for value in call.args for each in (value if isinstance(value, tuple) else (value,))]
    shapes = [each for each in flat if isinstance(each, TensorShape) and each.dtype.is_floating_point]
    dtype = str(shapes[-1].dtype).removeprefix("torch.") if shapes else ""
    return Op(str(call.func.overloadpacket), cost.count, cost.flops, cost.bytes_moved, dtype)


def replay(calls: Iterable[OpCall], device: torch.device) -> dict[OpCall, float]:
    """Device time of each call.

    Calls that finish before the host launches the next one are missing, and so are calls that cannot run alone. Values
    are random, because a GPU computes faster with zeros.
    """
    found: dict[OpCall, float] = {}
    for call in calls:
        with suppress(*_CALL_ERRORS):
            seconds = _device_seconds(_alternating_runs(call, device), device)
            if seconds is not None:
                found[call] = seconds
    return found


def _device_seconds(run: Run, device: torch.device) -> float | None:
    """Device time of one of many calls in a row; None if the device waits for the host between them."""
    run()  # the first call loads and selects kernels
    once = max(_time(run, 1, device)[0], 1e-7)
    total, host = _time(run, max(2, min(_MAX_REPEATS, int(_SECONDS_PER_CALL / once))), device)
    return None if device.type == "cuda" and total < host * _HOST_BOUND else total


def _time(run: Run, repeats: int, device: torch.device) -> tuple[float, float]:
    """Seconds per call, and host seconds to launch one."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    host = time.perf_counter() - start
    synchronize(device)
    return (time.perf_counter() - start) / repeats, host / repeats


def _alternating_runs(call: OpCall, device: torch.device) -> Run:
    """Run the call on other tensors each time, as training does, so that caches do not hold them."""
    size = sum(prod(shape.size) * shape.dtype.itemsize for shape in call.args if isinstance(shape, TensorShape))
    copies = min(_MAX_COPIES, _CACHE_BYTES // max(1, size) + 1) if size > _SMALL_CALL else 1
    runs = cycle([_make_run(call, device) for _ in range(copies)])
    return lambda: next(runs)()


def _make_run(call: OpCall, device: torch.device) -> Run:
    """A function that runs the call on `device` with the kernels that training uses there."""
    name = str(call.func.overloadpacket)
    args: list[Any] = [_make_tensors(value, device, _integer_limit(name, call)) for value in call.args]
    kwargs: dict[str, Any] = {key: _make_tensors(value, device) for key, value in call.kwargs}
    if name.startswith(CPU_ATTENTION):
        return _attention_run(args, kwargs, backward=name.endswith("backward"))
    if name.startswith("aten.native_batch_norm"):
        return _batch_norm_run(args, backward=name.endswith("backward"))
    if name == "aten._grouped_mm" and isinstance(args[2], torch.Tensor):
        args[2] = _even_groups(*args[:3])
    if "device" in kwargs:
        kwargs["device"] = device
    return partial(call.func, *args, **kwargs)


def _even_groups(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Where the groups of a grouped product end if all have the same number of rows, which is the goal of training."""
    size = second.shape[-1] if first.dim() == 3 else first.shape[0] if second.dim() == 3 else first.shape[1]
    return torch.arange(1, len(ends) + 1, device=ends.device, dtype=ends.dtype) * size // len(ends)


def _attention_run(args: list[Any], kwargs: dict[str, Any], *, backward: bool) -> Run:
    """Attention was traced as the CPU kernel; run the kernel of the device."""
    query, key, value = args[1:4] if backward else args[:3]
    causal = next((value for value in args if isinstance(value, bool)), False)
    attend = partial(
        functional.scaled_dot_product_attention,
        attn_mask=kwargs.get("attn_mask"),
        is_causal=causal,
        scale=kwargs.get("scale"),
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    return _backward_run(attend, query, key, value) if backward else partial(attend, query, key, value)


def _batch_norm_run(args: list[Any], *, backward: bool) -> Run:
    """Batch norm was traced as torch's own kernel; a GPU uses cuDNN if it can."""
    image, weight, mean, variance = args[1:5] if backward else (args[0], args[1], args[3], args[4])
    bias = None if weight is None else torch.zeros_like(weight)
    training = next(value for value in args[5:] if isinstance(value, bool))

    def normalize(image: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.batch_norm(image, mean, variance, weight, bias, training)

    return _backward_run(normalize, image, weight, bias) if backward else partial(normalize, image, weight, bias)


def _backward_run(function: Callable[..., torch.Tensor], *inputs: torch.Tensor | None) -> Run:
    """A function that runs the backward pass of `function` alone."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad():
        result = function(*leaves)
    tensors = [each for each in leaves if each is not None]
    return partial(torch.autograd.grad, result, tensors, torch.rand_like(result), retain_graph=True)


def _integer_limit(name: str, call: OpCall) -> int:
    """Upper limit of integer arguments: the number of rows for embeddings, else 1, so that all are 0."""
    if name == "aten.embedding_dense_backward" and isinstance(call.args[2], int):
        return call.args[2]
    table = call.args[0] if call.args else None
    return table.size[0] if name == "aten.embedding" and isinstance(table, TensorShape) else 1


def _make_tensors(value: object, device: torch.device, limit: int = 1) -> object:
    """The value with tensors in place of shapes."""
    if isinstance(value, tuple):
        return [_make_tensors(each, device, limit) for each in value]
    if not isinstance(value, TensorShape):
        return value
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.size, value.stride, strict=True))
    flat = torch.empty(extent if all(value.size) else 0, dtype=value.dtype, device=device)
    if value.dtype.is_floating_point:
        flat.uniform_()
    elif limit < 2 or value.dtype == torch.bool:
        flat.zero_()
    else:
        flat.random_(0, limit)
    return flat.as_strided(value.size, value.stride)


def host_seconds(
    build: Build, device: torch.device, dtype: torch.dtype | None, loss: Loss | None, channels_last: bool
) -> float | None:
    """Host time of the forward and backward pass of a micro-batch of any size.

    Weights are zeros, created on `device`. None if the model cannot run with them.
    """
    try:
        with FloatsOnMeta():
            traced = build_model(build, loss)
        traced = _fill_with_zeros(traced, device)
        keep_frozen_in_eval(traced.model, frozen_parts(traced.model))
        if channels_last:
            use_channels_last(traced.model, traced.model)
        return _time_host(traced, device, dtype)
    except _MODEL_ERRORS:
        return None
    finally:
        set_micro_batch(None)


def _time_host(traced: TracedModel, device: torch.device, dtype: torch.dtype | None) -> float:
    batch, seconds = traced.batch(MIN_SAMPLES), list[float]()
    for _ in range(_WARM_UP + _TIMED):
        synchronize(device)
        start = time.perf_counter()
        set_micro_batch(torch.zeros(MIN_SAMPLES, dtype=torch.long))
        with torch.autocast(device.type, dtype) if dtype is not None else nullcontext():
            loss = traced.compute_loss(batch)
        loss.backward()
        seconds.append(time.perf_counter() - start)
        traced.model.zero_grad()
    return statistics.median(seconds[_WARM_UP:])


def _fill_with_zeros(traced: TracedModel, device: torch.device) -> TracedModel:
    """The model and its example on `device`: tensors on the meta device become zeros, the others keep their values."""
    known = [(name, tensor) for name, tensor in _named_tensors(traced) if not tensor.is_meta]
    model = traced.model.to_empty(device=device)
    tensors = dict(_named_tensors(traced))
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
        for name, value in known:
            tensors[name].copy_(value)
    example = map_tensors(traced.example, lambda t: torch.zeros_like(t, device=device) if t.is_meta else t.to(device))
    return replace(traced, model=model, example=example)


def _named_tensors(traced: TracedModel) -> list[tuple[str, torch.Tensor]]:
    return [*traced.model.named_parameters(), *traced.model.named_buffers()]
