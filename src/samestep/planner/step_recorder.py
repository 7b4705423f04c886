"""Record what a step does: the memory timeline, storage by storage, and its operators with FLOPs and bytes moved.

On CUDA the tracker rounds sizes as torch's allocator does, and adds the workspace that kernels allocate while they run.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from samestep.planner.model_profile import MemoryPoint, Op, PeakMemory

Args = tuple[object, ...]
CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
"""The operator that attention is traced as, whatever kernel a GPU would use."""
CUBLAS_WORKSPACE = 64 * 2**20
"""Bytes that cuBLAS keeps from its first product on: on Hopper 32 MiB for each thread that computes, and the backward
pass has its own thread. Older GPUs need 8 MiB each."""

_MIB = 2**20
_SHARDS = (1, 2, 3, 4, 8, 16, 64, 1024)  # numbers of gradient shards for which the peak must be exact
_HALF = (torch.bfloat16, torch.float16)
_INTO_DTYPE = "dtype"  # the overload of a product whose result has another dtype than its factors
_FP32_BACKWARD = 2.3  # of input and output: cuDNN's choice for 3x3 kernels without TF32
_FP32_BACKWARD_CHANNELS_LAST = 3.3


@dataclass(frozen=True)
class TensorShape:
    """A tensor argument."""

    size: tuple[int, ...]
    stride: tuple[int, ...]  # empty for a sparse tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class OpCall:
    """One call of an operator with shapes in place of tensors; equal calls cost the same."""

    func: OpOverload  # the operator
    args: tuple[object, ...]  # positional arguments: shapes, numbers, and tuples of these
    kwargs: tuple[tuple[str, object], ...]  # keyword arguments, sorted by name


@dataclass
class OpCost:
    """Total cost of several calls."""

    count: int = 0  # number of calls
    flops: float = 0.0  # floating-point operations
    bytes_moved: float = 0.0  # bytes read and written


class OpCounter:
    """Adds up the cost of operators by name and dtype, and with `record_calls` also by call."""

    def __init__(self, *, record_calls: bool = False) -> None:
        self.flops = 0.0
        self.calls: dict[OpCall, OpCost] = {}  # cost by call; empty without `record_calls`
        self._record_calls = record_calls
        self._totals: dict[tuple[str, str], OpCost] = {}

    def add(self, func: OpOverload, args: Args, kwargs: Mapping[str, object], result: object) -> None:
        """Count one call; views are free."""
        tensors, outputs = tensor_leaves((args, kwargs)), tensor_leaves(result)
        if _is_view(func, tensors, outputs):
            return
        name = str(func.overloadpacket)
        flops = _flops(func, name, args, kwargs, result)
        tensors += outputs
        factors = tensor_leaves(args) if func._overloadname == _INTO_DTYPE else tensors  # pyright: ignore[reportPrivateUsage]
        dtype = next((t.dtype for t in reversed(factors) if t.is_floating_point()), None)
        moved = sum(map(_bytes_moved, tensors))
        totals = [self._totals.setdefault((name, "" if dtype is None else str(dtype).removeprefix("torch.")), OpCost())]
        if self._record_calls:
            shapes = tuple((key, _to_shapes(value)) for key, value in sorted(kwargs.items()))
            call = OpCall(func, tuple(map(_to_shapes, args)), shapes)
            totals.append(self.calls.setdefault(call, OpCost()))
        for total in totals:
            total.count += 1
            total.flops += flops
            total.bytes_moved += moved
        self.flops += flops

    def ops(self) -> tuple[Op, ...]:
        """All operators, the one that moves the most bytes first."""
        found = [
            Op(name, cost.count, cost.flops, cost.bytes_moved, dtype) for (name, dtype), cost in self._totals.items()
        ]
        return tuple(sorted(found, key=lambda op: (-op.bytes_moved, op.name, op.dtype)))


def tensor_leaves(tree: object) -> list[torch.Tensor]:
    """The tensors in arguments or results of an operator."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _to_shapes(value: object) -> object:
    if isinstance(value, torch.Tensor):
        stride = value.stride() if value.layout == torch.strided else ()
        return TensorShape(tuple(value.shape), stride, value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_to_shapes, value))
    return value


def _flops(
    func: OpOverload, name: str, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
) -> float:
    if name.startswith(CPU_ATTENTION):  # torch counts neither this kernel nor grouped products
        backward = "backward" in name
        query, key = tensor_leaves(args)[backward : backward + 2]
        return (10.0 if backward else 4.0) * query.numel() * key.shape[-2]  # five matrix products backward, two forward
    if name == "aten._grouped_mm":
        first, second = tensor_leaves(args)[:2]
        groups = first.shape[0] if first.dim() == 3 and second.dim() == 2 else 1  # groups of columns of the result
        return 2.0 * first.numel() * second.shape[-1] / groups
    functional = getattr(torch.ops.aten, name.removeprefix("aten.").removesuffix("_"), None)  # for addmm_ addmm
    count = flop_registry.get(func.overloadpacket) or flop_registry.get(functional)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _is_view(func: OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a call only returns views of its inputs, or has no effect and no output."""
    if func._schema.is_mutable or not outputs:  # pyright: ignore[reportPrivateUsage]
        return not outputs and not func._schema.is_mutable  # pyright: ignore[reportPrivateUsage]
    known = {id(t.untyped_storage()) for t in inputs if t.layout == torch.strided}
    return all(t.layout == torch.strided and id(t.untyped_storage()) in known for t in outputs)


def _bytes_moved(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if tensor.layout == torch.strided else size


class MemorySample(NamedTuple):
    """Memory in use after one operation."""

    op: str  # the operation
    used: int  # bytes in use, gradients included, as the allocator rounds them
    exact: int  # the same, not rounded
    gradients: int  # bytes of gradients among them


class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that counts bytes by storage, so that views are free and tied weights count once.

    `cuda`: count as torch's CUDA allocator does, with the workspace of CUDA kernels. `counter` counts the operators.
    """

    def __init__(self, *, cuda: bool, counter: OpCounter | None = None) -> None:
        super().__init__()
        self.timeline: list[MemorySample] = []
        self.counter = counter
        self.used = 0  # bytes in use now
        self._cuda = cuda
        self._exact = self._gradients = 0
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._gradient_sizes: dict[int, int] = {}

    def mark_gradient(self, parameter: torch.Tensor) -> None:
        """Count a parameter's gradient as a gradient from now on; a hook after gradient accumulation."""
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            return
        self.add(gradient)
        storage = gradient.untyped_storage()
        key = id(storage)
        if key not in self._gradient_sizes and key in self._storages:
            self._gradient_sizes[key] = self._round(storage.nbytes())
            self._gradients += self._gradient_sizes[key]

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: Args = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run the operation, then record new storages and workspace."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # queries such as the device of a tensor
            return result
        outputs = tensor_leaves(result)
        new = [self.add(tensor) for tensor in outputs]
        name = str(func.overloadpacket)
        if self.counter is not None:
            self.counter.add(func, args, kwargs, result)
        workspace = cuda_workspace(name, tensor_leaves((args, kwargs)), outputs) if self._cuda else 0
        if any(new) or workspace:
            sample = MemorySample(name, self.used + workspace, self._exact + workspace, self._gradients)
            self.timeline.append(sample)
        return result

    def _round(self, size: int) -> int:
        return allocated_bytes(size) if self._cuda else size

    def add(self, tensor: torch.Tensor) -> bool:
        """Count the storage of a tensor until it is freed; returns whether it is new."""
        if tensor.layout == torch.sparse_coo:
            parts = tensor._indices(), tensor._values()  # pyright: ignore[reportPrivateUsage]  # the public ones need a coalesced tensor
            return bool([part for part in parts if self.add(part)])
        if tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return False
        exact = storage.nbytes()
        size = self._round(exact)
        self._storages[key] = (weakref.ref(storage, lambda _: self._remove(key)), size, exact)
        self.used += size
        self._exact += exact
        return True

    def _remove(self, key: int) -> None:
        _, size, exact = self._storages.pop(key)
        self.used -= size
        self._exact -= exact
        self._gradients -= self._gradient_sizes.pop(key, 0)


def allocated_bytes(size: int) -> int:
    """Bytes that torch's CUDA allocator uses for a tensor of `size` bytes.

    Sizes are rounded up to 512 bytes. From 10 MiB on, memory comes in segments of 2 MiB, and a remainder of up to 1 MiB
    is not split off.

    >>> allocated_bytes(0), allocated_bytes(1), allocated_bytes(513), allocated_bytes(int(11.5 * 2**20)) / 2**20
    (0, 512, 1024, 12.0)
    """
    rounded = -(-size // 512) * 512
    if rounded < 10 * _MIB:
        return rounded
    segment = -(-rounded // (2 * _MIB)) * 2 * _MIB
    return segment if segment - rounded <= _MIB else rounded


def cuda_workspace(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes that the CUDA kernel of an operator allocates while it runs."""
    rule = _WORKSPACE.get(name)
    return 0 if rule is None else int(rule(inputs, outputs))


def _convolution(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
    """Copies of input and output if their memory format is not the one that the kernel needs."""
    image, weight, result = inputs[0], inputs[1], outputs[0]
    copies = image.nbytes + result.nbytes
    if image.dtype not in _HALF:
        return copies if _is_channels_last(image) else 0
    if _is_channels_last(image) or _is_channels_last(weight):
        return _channels_last_copy(image)
    return 0 if _is_pointwise(image, weight, result) else copies + weight.nbytes


def _convolution_backward(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
    """The same copies, more in fp32 without TF32, and an fp32 copy for the gradient of a bias."""
    gradient, image, weight = inputs[:3]
    copies = image.nbytes + gradient.nbytes
    pointwise = _is_pointwise(image, weight, gradient)
    if image.dtype in _HALF:
        if _is_channels_last(image) or _is_channels_last(weight):
            has_bias = len(outputs) > 2
            return _channels_last_copy(image) + (2 * gradient.nbytes if has_bias else 0)
        return 0 if pointwise else copies + weight.nbytes
    if pointwise or image.shape[2:] != gradient.shape[2:]:
        return copies
    return copies * (_FP32_BACKWARD_CHANNELS_LAST if _is_channels_last(image) else _FP32_BACKWARD)


def _attention_backward(inputs: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> float:
    """Query gradients in fp32, unreduced gradients of shared heads, and the gradient of a mask."""
    query, key = inputs[1], inputs[2]
    rows = 2 * 4 * query.numel() // query.shape[-1]
    shared = 2 * query.nbytes if query.shape[1] != key.shape[1] else 0
    masked = inputs[6].nbytes if len(inputs) > 6 else 0
    return 4 * query.numel() + rows + shared + masked


def _channels_last_copy(image: torch.Tensor) -> int:
    return 0 if _is_channels_last(image) else image.nbytes


def _is_channels_last(image: torch.Tensor) -> bool:
    return image.dim() == 4 and not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last)


def _is_pointwise(image: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a convolution is a matrix product: a 1x1 kernel with stride 1."""
    return all(size == 1 for size in weight.shape[2:]) and image.shape[2:] == result.shape[2:]


_WORKSPACE: Mapping[str, Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]] = {
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    f"{CPU_ATTENTION}_backward": _attention_backward,
}


def fit_peak_memory(
    small: Sequence[MemorySample],
    large: Sequence[MemorySample],
    sizes: tuple[int, int],
    persistent: int,
    gradients: int,
    extra: MemoryPoint,
) -> PeakMemory:
    """Fit the peak memory to the timelines of two micro-batches of `sizes` samples.

    `persistent` are the bytes of weights and optimizer state, `gradients` those of all gradients. `extra` is added to
    every point.
    """
    if [sample.op for sample in small] == [sample.op for sample in large]:
        pairs = list(zip(small, large, strict=True))
    else:  # the operations depend on the micro-batch: only the two peaks correspond to each other
        pairs = [(max(small, key=lambda s: s.used), max(large, key=lambda s: s.used))]
    points = [_fit_point(sizes, before, after, persistent, extra) for before, after in pairs]
    peaks: dict[MemoryPoint, None] = {}
    for shards in (*_SHARDS, 0):
        peaks.update(dict.fromkeys(_upper_envelope(points, shards)))
    return PeakMemory(tuple(peaks), gradients)


def _fit_point(
    sizes: tuple[int, int], small: MemorySample, large: MemorySample, persistent: int, extra: MemoryPoint
) -> MemoryPoint:
    """The line through two samples; small tensors grow with the micro-batch even if rounding hides it."""
    growth = max(large.used - small.used, large.exact - small.exact)
    per_sample = -(-growth // (sizes[1] - sizes[0]))
    fixed = large.used - large.gradients - per_sample * sizes[1] - persistent
    return MemoryPoint(fixed + extra.fixed, per_sample + extra.per_sample, large.gradients)


def _upper_envelope(points: Sequence[MemoryPoint], shards: int) -> Iterator[MemoryPoint]:
    """The points that are the peak for some micro-batch, with gradients in `shards` parts; 0: without gradients."""

    def height(point: MemoryPoint, samples: float) -> float:
        return point.fixed + point.per_sample * samples + (point.gradients / shards if shards else 0)

    current, samples = max(points, key=lambda p: (height(p, 1), p.per_sample)), 1.0
    while True:
        yield current
        steeper = [p for p in points if p.per_sample > current.per_sample]
        if not steeper:
            return
        crossings = [(height(current, 0) - height(p, 0)) / (p.per_sample - current.per_sample) for p in steeper]
        samples = min(crossings)
        current = max(
            (p for p, at in zip(steeper, crossings, strict=True) if at == samples), key=lambda p: p.per_sample
        )
