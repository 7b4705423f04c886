"""Count the operators of a traced step: calls, floating-point operations and bytes moved, by operator and dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from samestep.planner.model_profile import Op

CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
"""The operator that attention is traced as, whatever kernel a GPU would use."""


@dataclass(frozen=True)
class TensorShape:
    """Size, stride and dtype of a tensor argument."""

    size: tuple[int, ...]  # size
    stride: tuple[int, ...]  # stride; empty for a sparse tensor
    dtype: torch.dtype  # dtype of the elements


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
        self.calls: dict[OpCall, OpCost] = {}
        """Cost by call; empty without `record_calls`."""
        self._record_calls = record_calls
        self._totals: dict[tuple[str, str], OpCost] = {}

    def add(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
        inputs: Sequence[object],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Count one call; views are free. `inputs` are the leaves of the arguments, `outputs` those of the result."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if _is_view(func, tensors, outputs):
            return
        name = str(func.overloadpacket)
        flops = _flops(func, name, args, kwargs, result)
        tensors += outputs
        dtype = next((t.dtype for t in reversed(tensors) if t.is_floating_point()), None)
        moved = sum(map(_nbytes, tensors))
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
    if name.startswith(CPU_ATTENTION):  # torch counts the attention kernels of CUDA only
        backward = "backward" in name
        query, key = [value for value in args if isinstance(value, torch.Tensor)][backward : backward + 2]
        return (10.0 if backward else 4.0) * query.numel() * key.shape[-2]  # five matrix products backward, two forward
    count = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _is_view(func: OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a call only returns views of its inputs, or has no effect and no output."""
    if func._schema.is_mutable or not outputs:  # pyright: ignore[reportPrivateUsage]
        return not outputs and not func._schema.is_mutable  # pyright: ignore[reportPrivateUsage]
    known = {id(t.untyped_storage()) for t in inputs if t.layout == torch.strided}
    return all(t.layout == torch.strided and id(t.untyped_storage()) in known for t in outputs)


def _nbytes(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if tensor.layout == torch.strided else size
