"""How long a micro-batch takes on the device at hand: its operations run one by one, without the model's memory."""

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
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
from samestep.planner.cluster_spec import ClusterSpec
from samestep.planner.model_profile import ModelProfile, Op, Timed
from samestep.planner.operations import ATTENTION, Call, Cost, Shape, Work
from samestep.planner.time_model import op_seconds
from samestep.planner.trace import FEWEST, trace_calls
from samestep.planner.traced_model import Build, FloatsOnMeta, Loss, Subject, build_subject
from samestep.torch_private import cannot_be_traced

_SPAN = 0.003  # seconds that one call is repeated for
_MOST = 30
_CACHES, _COPIES, _SMALL = 2**28, 4, 2**20  # bytes that no cache holds, copies that are made at most, and of what
_WAITING = 1.15  # a device that ends no later than this much after the host has waited for the host
# What a call raises that needs values to make sense of, more memory than there is, or what the device lacks.
_CANNOT = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)

Run = Callable[[], object]


def replay(calls: Iterable[Call], device: torch.device) -> dict[Call, float]:
    """Seconds of each call on `device`, where that can be told.

    Missing are calls that end sooner than the host can start the next one, and those that cannot be run alone. Values
    are random: zeros would let a GPU run faster than training does.
    """
    found: dict[Call, float] = {}
    for call in calls:
        try:
            seconds = _seconds(_in_turn(call, device), device)
        except _CANNOT:
            continue
        if seconds is not None:
            found[call] = seconds
    return found


def _seconds(run: Run, device: torch.device) -> float | None:
    """How long the device takes over one of many in a row; None where it waits for the host between them."""
    run()  # the first time loads kernels and chooses among them
    once = max(_span(run, 1, device)[0], 1e-7)
    total, by_host = _span(run, max(2, min(_MOST, int(_SPAN / once))), device)
    return None if device.type == "cuda" and total < by_host * _WAITING else total


def _span(run: Run, times: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one of `times` calls, and seconds in which the host started one."""
    _wait(device)
    since = time.perf_counter()
    for _ in range(times):
        run()
    by_host = time.perf_counter() - since
    _wait(device)
    return (time.perf_counter() - since) / times, by_host / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_turn(call: Call, device: torch.device) -> Run:
    """What runs the call on other tensors each time, as training does: on the same ones a cache would hold them."""
    number = min(_COPIES, _CACHES // max(1, _bytes(call)) + 1) if _bytes(call) > _SMALL else 1
    runs = cycle([_again(call, device) for _ in range(number)])
    return lambda: next(runs)()


def _bytes(call: Call) -> int:
    shapes = [value for value in call.args if isinstance(value, Shape)]
    return sum(prod(shape.size) * shape.dtype.itemsize for shape in shapes)


def _again(call: Call, device: torch.device) -> Run:
    """What runs the call on `device`, by the kernels that training takes there."""
    name = str(call.func.overloadpacket)
    args: list[Any] = [_made(value, device, _limit(name, call)) for value in call.args]
    kwargs: dict[str, Any] = {key: _made(value, device) for key, value in call.kwargs}
    if name.startswith(ATTENTION):
        return _attention(args, kwargs, backward=name.endswith("backward"))
    if name.startswith("aten.native_batch_norm"):
        return _batch_norm(args, backward=name.endswith("backward"))
    if "device" in kwargs:
        kwargs["device"] = device
    return partial(call.func, *args, **kwargs)


def _attention(args: list[Any], kwargs: dict[str, Any], *, backward: bool) -> Run:
    """Traced under the name of the CPU's kernel."""
    query, key, value = args[1:4] if backward else args[:3]
    causal = next((value for value in args if isinstance(value, bool)), False)
    attend = partial(
        functional.scaled_dot_product_attention,
        attn_mask=kwargs.get("attn_mask"),
        is_causal=causal,
        scale=kwargs.get("scale"),
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    return _gradient(attend, query, key, value) if backward else partial(attend, query, key, value)


def _batch_norm(args: list[Any], *, backward: bool) -> Run:
    """Traced under torch's own name, where a GPU takes cuDNN's kernels if it may."""
    image, weight, mean, variance = args[1:5] if backward else (args[0], args[1], args[3], args[4])
    bias = None if weight is None else torch.zeros_like(weight)
    training = next(value for value in args[5:] if isinstance(value, bool))

    def normalise(image: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """As a layer does it."""
        return functional.batch_norm(image, mean, variance, weight, bias, training)

    return _gradient(normalise, image, weight, bias) if backward else partial(normalise, image, weight, bias)


def _gradient(function: Callable[..., torch.Tensor], *inputs: torch.Tensor | None) -> Run:
    """What runs the backward pass of `function` alone."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad():
        result = function(*leaves)
    wanted = [each for each in leaves if each is not None]
    return partial(torch.autograd.grad, result, wanted, torch.rand_like(result), retain_graph=True)


def _limit(name: str, call: Call) -> int:
    """Below which whole numbers must lie: rows of a table that are read here and there, else the first one."""
    if name == "aten.embedding_dense_backward" and isinstance(call.args[2], int):
        return call.args[2]
    table = call.args[0] if call.args else None
    return table.size[0] if name == "aten.embedding" and isinstance(table, Shape) else 1


def _made(value: object, device: torch.device, limit: int = 1) -> object:
    """The value with tensors in place of shapes."""
    if isinstance(value, tuple):
        return [_made(each, device, limit) for each in value]
    if not isinstance(value, Shape):
        return value
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.size, value.stride, strict=True))
    flat = torch.empty(reach if all(value.size) else 0, dtype=value.dtype, device=device)
    if value.dtype.is_floating_point:
        flat.uniform_()
    elif limit < 2 or value.dtype == torch.bool:
        flat.zero_()
    else:
        flat.random_(0, limit)
    return flat.as_strided(value.size, value.stride)


# What the user's own code may raise on weights that it does not expect, as it is or told by us.
_NOT_RUNNABLE_SMALL = (
    PlanError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
)
_WARM, _TIMED = 3, 7


def host_seconds(
    build: Build, device: torch.device, dtype: torch.dtype | None, loss: Loss | None, channels_last: bool
) -> float | None:
    """Seconds of the host for the forward and backward pass of a micro-batch, of any size.

    Weights are zeros, made on `device` straight away. None where the model cannot be run so.
    """
    try:
        with FloatsOnMeta():
            subject = build_subject(build, loss)
        subject = _build_small(subject, device)
        keep_frozen_in_eval(subject.model, frozen_parts(subject.model))
        if channels_last:
            use_channels_last(subject.model, subject.model)
        return _timed(subject, device, dtype)
    except _NOT_RUNNABLE_SMALL:
        return None
    finally:
        set_micro_batch(None)


def _timed(subject: Subject, device: torch.device, dtype: torch.dtype | None) -> float:
    batch, spans = subject.batch(FEWEST), list[float]()
    for _ in range(_WARM + _TIMED):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        since = time.perf_counter()
        set_micro_batch(torch.zeros(FEWEST, dtype=torch.long))
        with torch.autocast(device.type, dtype) if dtype is not None else nullcontext():
            value = subject.compute_loss(batch)
        value.backward()
        spans.append(time.perf_counter() - since)
        subject.model.zero_grad()
    return statistics.median(spans[_WARM:])


def _build_small(subject: Subject, device: torch.device) -> Subject:
    """The subject on `device`: whole numbers as they are, the others zeros."""
    known = [(name, t) for name, t in _tensors(subject) if not t.is_meta]
    model = subject.model.to_empty(device=device)
    there = dict(_tensors(subject))
    with torch.no_grad():
        for tensor in there.values():
            tensor.zero_()
        for name, value in known:
            there[name].copy_(value)
    example = map_tensors(subject.example, lambda t: torch.zeros_like(t, device=device) if t.is_meta else t.to(device))
    return Subject(model, example, subject.samples, subject.loss)


def _tensors(subject: Subject) -> list[tuple[str, torch.Tensor]]:
    return [*subject.model.named_parameters(), *subject.model.named_buffers()]


def time_here(
    facts: ModelProfile, build: Build, machines: ClusterSpec, micro_batch: int, precision: str, *, channels_last: bool
) -> ModelProfile:
    """The same before a run, on the first GPU of this machine, which is one of `machines`."""
    device = torch.device("cuda", 0)
    numbers = choose_precision([detect_support(device, check_precision(precision), compile=False)])
    return time_model(facts, build, machines, device, micro_batch, numbers, channels_last=channels_last)


def time_model(
    facts: ModelProfile,
    build: Build,
    machines: ClusterSpec,
    device: torch.device,
    micro_batch: int,
    numbers: ComputePrecision,
    *,
    loss: Loss | None = None,
    channels_last: bool = False,
) -> ModelProfile:
    """`facts` with the seconds that `device`, one of `machines`, takes over micro-batches up to `micro_batch`.

    As they were where the model cannot be traced, or where nobody has kernels to run.
    """
    sizes = sorted({max(FEWEST, micro_batch // 2), max(2 * FEWEST, micro_batch)})
    kind = "cuda" if device.type == "cuda" else "cpu"
    try:
        works = trace_calls(build, sizes, precision=numbers.name, loss=loss, target=kind, channels_last=channels_last)
    except Exception as error:
        if cannot_be_traced(error) or isinstance(error, PlanError):  # as in a step of another size than was planned by
            return facts
        raise
    restore = set_fp32_products(numbers)
    try:
        seconds = [time_work(work, machines, device, numbers.tf32) for work in works]
    finally:
        restore()
    points = tuple(zip(sizes, seconds, strict=True))
    host = host_seconds(build, device, numbers.dtype, loss, channels_last) if _runs_whole(facts, device) else None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what follows counts on it
        torch.cuda.reset_peak_memory_stats(device)  # or the probe would count as training's
    how = f"{facts.how}; its operations timed on this device"
    return replace(facts, timed=Timed(machines.device.name, points, host), how=how)


def _runs_whole(facts: ModelProfile, device: torch.device) -> bool:
    """Whether some samples may be computed for real."""
    return device.type == "cuda" and 2 * facts.persistent + facts.working.at(2) < torch.cuda.mem_get_info(device)[0]


def time_work(work: Work, machines: ClusterSpec, device: torch.device, tf32: bool) -> float:
    """Seconds that `device` takes over the calls of `work`; those that cannot be run alone are reckoned."""
    calls = work.calls or {}
    seconds = replay(calls, device)
    total = 0.0
    for call, cost in calls.items():
        known = seconds.get(call)
        total += op_seconds(machines, as_op(call, cost), tf32) if known is None else known * cost.count
    return total


def as_op(call: Call, cost: Cost) -> Op:
    """Equal calls as one kind of operation."""
    return Op(str(call.func.overloadpacket), cost.count, cost.flops, cost.moved, _dtype(call.args))


def _dtype(values: tuple[object, ...]) -> str:
    """What a call computes in: the dtype of its last tensor of real numbers."""
    flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
    shapes = [each for each in flat if isinstance(each, Shape) and each.dtype.is_floating_point]
    return str(shapes[-1].dtype).removeprefix("torch.") if shapes else ""
