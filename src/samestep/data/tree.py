"""Batches as trees of tensors: moved to a device, refused where they are something else."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch

from samestep.errors import DataError

_RIDES_ALONG = (str, bytes, bool, int, float, complex, type(None))


@runtime_checkable
class Movable(Protocol):
    """A batch class of the user's that knows how to move itself."""

    def to(self, device: torch.device) -> "Movable":
        """The same on `device`."""
        ...


def map_tensors(tree: object, function: Callable[[torch.Tensor], object], path: str = "batch") -> object:
    """`tree` with every tensor replaced by `function` of it; strings and numbers ride along unchanged."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, {k: map_tensors(v, function, f"{path}[{k!r}]") for k, v in tree.items()})
    if isinstance(tree, tuple | list):
        return _rebuild(tree, [map_tensors(v, function, f"{path}[{i}]") for i, v in enumerate(tree)])
    if isinstance(tree, _RIDES_ALONG):
        return tree
    raise DataError(
        f"{path} is of class {type(tree).__name__}: a batch is a tensor, or tuples, lists and dicts of them (strings "
        "and "
        "numbers may ride along); give run.shard a collate= that makes one"
    )


def move(tree: object, device: torch.device) -> object:
    """`tree` on `device`; on CUDA the copies from pinned memory are asynchronous."""
    if not isinstance(tree, torch.Tensor | Mapping | tuple | list) and isinstance(tree, Movable):
        return tree.to(device)
    return map_tensors(tree, lambda tensor: tensor.to(device, non_blocking=True))


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Every tensor in `tree`."""
    found: list[torch.Tensor] = []
    if not isinstance(tree, torch.Tensor | Mapping | tuple | list) and isinstance(tree, Movable):
        return found
    map_tensors(tree, found.append)
    return found


def _rebuild(like: tuple[object, ...] | list[object], values: list[object]) -> object:
    if isinstance(like, list):
        return values
    if hasattr(like, "_fields"):  # a named tuple takes its fields one by one
        return type(like)(*values)  # pyright: ignore[reportArgumentType]
    return tuple(values)


def _rebuild_mapping(like: Mapping[object, object], values: dict[object, object]) -> object:
    return values if type(like) is dict else type(like)(values)  # pyright: ignore[reportCallIssue]  # a mapping class of the user's
