"""The work of a step: operations by kind, with their floating-point operations and the bytes they move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from samestep.planner.model_profile import Op


@dataclass(frozen=True)
class Shape:
    """A tensor without its values."""

    size: tuple[int, ...]
    """Its sizes."""
    stride: tuple[int, ...]
    """How it lies in memory."""
    dtype: torch.dtype
    """Of its elements."""


@dataclass(frozen=True)
class Call:
    """One call of an operator; equal ones cost the same."""

    func: OpOverload
    """The operator."""
    args: tuple[object, ...]
    """What it is given by place: shapes, numbers, and tuples of these."""
    kwargs: tuple[tuple[str, object], ...]
    """What it is given by name."""


@dataclass
class Cost:
    """What equal calls of one step add up to."""

    count: int = 0
    """How many there are."""
    flops: float = 0.0
    """Multiplications and additions of all."""
    moved: float = 0.0
    """Bytes that all read and write."""


def call_of(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
    """The call, with shapes in place of tensors."""
    named = tuple((name, _shaped(value)) for name, value in sorted(kwargs.items()))
    return Call(func, tuple(map(_shaped, args)), named)


def _shaped(value: object) -> object:
    if isinstance(value, torch.Tensor):
        strided = value.layout == torch.strided
        return Shape(tuple(value.shape), value.stride() if strided else (), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_shaped, value))
    return value


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
"""What attention is traced as, whatever kernel a GPU would take."""


class Work:
    """Adds up operations by name and dtype, and call by call where those are asked for."""

    def __init__(self, *, each_call: bool = False) -> None:
        self.flops = 0.0
        self.calls: dict[Call, Cost] | None = {} if each_call else None
        """What equal calls add up to; None where nobody asked."""
        self._sums: dict[tuple[str, str], Cost] = {}

    def add(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
        inputs: Sequence[object],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Count one operation; what only looks at a tensor otherwise costs nothing."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if _is_view(func, tensors, outputs):
            return
        name = str(func.overloadpacket)
        flops = _flops(func, name, args, kwargs, result)
        everything = [*tensors, *outputs]
        dtype = next((t.dtype for t in reversed(everything) if t.is_floating_point()), None)
        moved = sum(map(_bytes, everything))
        totals = [self._sums.setdefault((name, "" if dtype is None else str(dtype).removeprefix("torch.")), Cost())]
        if self.calls is not None:
            totals.append(self.calls.setdefault(call_of(func, args, kwargs), Cost()))
        for total in totals:
            total.count += 1
            total.flops += flops
            total.moved += moved
        self.flops += flops

    def ops(self) -> tuple[Op, ...]:
        """All kinds, the one that moves most first."""
        found = [Op(name, s.count, s.flops, s.moved, dtype) for (name, dtype), s in self._sums.items()]
        return tuple(sorted(found, key=lambda op: (-op.moved, op.name, op.dtype)))


def _flops(
    func: OpOverload,
    name: str,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    result: object,
) -> float:
    if name.startswith(ATTENTION):  # torch counts CUDA's kernels of attention, not the CPU's
        backward = "backward" in name
        query, key = [value for value in args if isinstance(value, torch.Tensor)][backward : backward + 2]
        return (10.0 if backward else 4.0) * query.numel() * key.shape[-2]  # five products of matrices, and two
    count = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _is_view(
    func: OpOverload,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> bool:
    if func._schema.is_mutable or not outputs:  # pyright: ignore[reportPrivateUsage]
        return not outputs and not func._schema.is_mutable  # pyright: ignore[reportPrivateUsage]
    known = {id(t.untyped_storage()) for t in inputs if t.layout == torch.strided}
    return all(t.layout == torch.strided and id(t.untyped_storage()) in known for t in outputs)


def _bytes(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if tensor.layout == torch.strided else size
