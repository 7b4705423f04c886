"""The blocks of a teacher: the layers that repeat, which can be moved and streamed one by one."""

from collections.abc import Iterator

from torch import nn


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers by name, in order: elements of the outermost lists of layers.

    A model without such a list has its direct children for blocks, and a single layer is a block by itself. No block
    lies inside another.
    """
    found = dict(_once(_elements(module, "")))
    if not found:
        found = {name: child for name, child in module.named_children() if callable_by_itself(child) and _weighs(child)}
    return found or {"": module}


def callable_by_itself(module: nn.Module) -> bool:
    """Whether a module is called as a whole, and is not only a list of modules or parameters."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def _elements(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    children = list(module.named_children())
    for leaf, child in children:
        path = f"{name}.{leaf}" if name else leaf
        if listed and len(children) > 1 and callable_by_itself(child):
            if _weighs(child):
                yield path, child
        else:
            yield from _elements(child, path)


def _once(found: Iterator[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for name, module in found:
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def _weighs(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
