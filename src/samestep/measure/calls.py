"""The distinct calls of a step: which operator, with tensors of which shapes, so that each can be run again alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload


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
