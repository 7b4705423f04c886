"""Calls of a traced step run for real, one by one, to see how long a device takes over each."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from math import prod
from typing import Any

import torch
from torch.nn import functional

from samestep.measure.calls import Call, Shape
from samestep.measure.operations import ATTENTION

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
