"""Batches as trees of tensors: moved to a device, cut to their real rows, complained about when they are something else."""

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
        f"{path} is a {type(tree).__name__}: a batch is a tensor, or tuples, lists and dicts of them (strings and numbers may "
        "ride along); give run.shard a collate= that makes one"
    )


def move(tree: object, device: torch.device) -> object:
    """`tree` on `device`; on CUDA the copies from pinned memory are asynchronous."""
    if not isinstance(tree, torch.Tensor | Mapping | tuple | list) and isinstance(tree, Movable):
        return tree.to(device)
    return map_tensors(tree, lambda tensor: tensor.to(device, non_blocking=True))


def first_rows(tree: object, rows: int) -> object:
    """`tree` with its tensors and lists of strings cut to their first `rows` rows."""
    if isinstance(tree, torch.Tensor):
        return tree[:rows] if tree.dim() else tree
    if isinstance(tree, Mapping):
        return _rebuild_mapping(tree, {k: first_rows(v, rows) for k, v in tree.items()})
    if isinstance(tree, list | tuple) and tree and all(isinstance(v, str | bytes) for v in tree):
        return type(tree)(tree[:rows])
    if isinstance(tree, tuple | list):
        return _rebuild(tree, [first_rows(v, rows) for v in tree])
    return tree


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Every tensor in `tree`."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    if not isinstance(tree, torch.Tensor | Mapping | tuple | list) and isinstance(tree, Movable):
        return found
    map_tensors(tree, keep)
    return found


def _rebuild(like: tuple[object, ...] | list[object], values: list[object]) -> object:
    if hasattr(like, "_fields"):  # a named tuple takes its fields one by one
        return type(like)(*values)
    return type(like)(values)


def _rebuild_mapping(like: Mapping[object, object], values: dict[object, object]) -> object:
    return values if type(like) is dict else type(like)(values)  # pyright: ignore[reportCallIssue]  # a mapping class of the user's
