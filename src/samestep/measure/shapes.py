"""Models and batches as shapes alone: what is floating has no memory, whole numbers keep theirs and their values.

Token numbers, positions and masks are small, and models look at them (is anything masked?) to choose their way: with
their values a trace goes the way that training goes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.data.tree import map_tensors
from samestep.torch_private import cannot_be_traced, has_no_memory, with_memory

_ASKED_FOR_VALUES = object()
_LARGEST = 2**26  # elements of a tensor of whole numbers that is computed for real


class FloatsOnMeta(TorchDispatchMode):
    """Inside, new floating tensors are on the meta device, and so is what is computed with them."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation on the meta device where it makes or takes a tensor of that kind."""
        named = dict(kwargs or {})
        tensors = _tensors((args, named))
        if tensors and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **named)
        away = {**named, "device": torch.device("meta")} if _takes_device(func) else named
        if tensors:
            args, away = tree_map_only(torch.Tensor, _to_meta, (args, away))
            return func(*args, **away)
        made = func(*args, **away)
        return func(*args, **named) if _whole(made) else made


class WholeNumbers(TorchDispatchMode):
    """Inside `without_memory()`, computes what depends on whole numbers alone for real."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation by shapes; again for real where nothing floating is in it."""
        named = kwargs or {}
        tensors = _tensors((args, named))
        if func.namespace == "prim" or not all(map(_has_value, tensors)):
            return func(*args, **named)
        if tensors and func._schema.is_mutable:  # pyright: ignore[reportPrivateUsage]  # torch has no other name for it
            return _for_real(func, args, named)
        made = _by_shapes(func, args, named)
        return _for_real(func, args, named) if made is _ASKED_FOR_VALUES or _whole(made) else made


def to_shapes(model: nn.Module, batch: object) -> object:
    """Take the memory of what is floating from a model, in place, and from the batch; tied weights stay tied.

    Only inside `without_memory()`, where new tensors are shapes alone.
    """
    known: dict[int, torch.Tensor] = {}

    def shape(tensor: torch.Tensor) -> torch.Tensor:
        """The shape of a tensor; of the same one, the same."""
        if id(tensor) not in known:
            known[id(tensor)] = _shape(tensor)
        return known[id(tensor)]

    for module in model.modules():
        own: Any = (module._parameters, module._buffers, vars(module))  # pyright: ignore[reportPrivateUsage]  # setattr would refuse
        for held in own:
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor):
                    held[name] = shape(value)
    return map_tensors(batch, shape)


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or (_is_whole(tensor) and not tensor.is_meta):
        return tensor
    bare = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        return bare
    parameter = nn.Parameter(bare, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def _by_shapes(func: Callable[..., object], args: tuple[object, ...], named: Mapping[str, object]) -> object:
    try:
        return func(*args, **named)
    except Exception as error:
        if not cannot_be_traced(error):
            raise
        return _ASKED_FOR_VALUES


def _has_value(tensor: torch.Tensor) -> bool:
    return _is_whole(tensor) and not has_no_memory(tensor)


def _for_real(func: Callable[..., object], args: tuple[object, ...], named: Mapping[str, object]) -> object:
    with with_memory():
        return func(*args, **named)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _whole(made: object) -> bool:
    tensors = _tensors(made)
    return bool(tensors) and all(_is_whole(tensor) and tensor.numel() <= _LARGEST for tensor in tensors)


def _takes_device(func: OpOverload) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)  # pyright: ignore[reportPrivateUsage]


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")
