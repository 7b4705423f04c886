"""Inputs and outputs of a teacher on their way between devices, whatever containers hold them."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def carry(tree: Any, device: torch.device) -> Any:
    """`tree` with every tensor on `device`; containers keep their class, and what is no container rides along.

    Where all of it is there already it is `tree` itself.
    """

    def there(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; towards the host a copy that does not wait would be read before it has arrived."""
        return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")

    return _map(tree, there)


def with_items(tree: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same class with these values, also where an attribute stands for a key; made by no constructor.

    A mapping that cannot be changed is made of them by its class.
    """
    kind: Any = type(tree)
    if kind is dict or not isinstance(tree, MutableMapping):
        return kind(values)
    made: Any = copy(tree)
    attributes: dict[Any, object] = getattr(made, "__dict__", {})
    for key, value in values.items():
        if key in attributes and attributes[key] is tree[key]:
            attributes[key] = value
        made[key] = value
    return made


def with_fields(tree: Any, values: Mapping[str, object]) -> Any:
    """A copy of an object with these attributes, though it be frozen; made by no constructor."""
    made = copy(tree)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _map(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return _map_named(tree, dict(tree.items()), function, with_items)
    if isinstance(tree, list | tuple):
        parts = [_map(value, function) for value in tree]
        if _same(parts, tree):
            return tree
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if is_dataclass(tree) and not isinstance(tree, type):
        return _map_named(tree, {each.name: getattr(tree, each.name) for each in fields(tree)}, function, with_fields)
    return tree


def _map_named(
    tree: Any,
    has: dict[Any, Any],
    function: Callable[[torch.Tensor], torch.Tensor],
    make: Callable[[Any, dict[Any, Any]], Any],
) -> Any:
    values = {name: _map(value, function) for name, value in has.items()}
    return tree if _same(list(values.values()), list(has.values())) else make(tree, values)


def _same(values: Sequence[object], others: Sequence[object]) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))
