"""Inputs and outputs of a teacher on their way between devices, whatever containers hold them."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def carry(tree: Any, device: torch.device) -> Any:
    """`tree` with every tensor on `device`; containers keep their class, and what is no container rides along."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; towards the host a copy that does not wait would be read before it has arrived."""
        return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")

    return _map(tree, there)


def _map(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return _map_mapping(tree, function)
    if isinstance(tree, list | tuple):
        parts = [_map(value, function) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{field.name: _map(getattr(tree, field.name), function) for field in fields(tree)})
    return tree


def _map_mapping(tree: Mapping[Any, Any], function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    values = {key: _map(value, function) for key, value in tree.items()}
    if type(tree) is dict:
        return values
    return type(tree)(**values) if is_dataclass(tree) else type(tree)(values)  # pyright: ignore[reportCallIssue]  # a mapping class of the user's
