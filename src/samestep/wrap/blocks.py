"""The layers of a model that repeat: what is gathered, moved or streamed one by one."""

from collections.abc import Iterator

from torch import nn

_Lists = type[nn.ModuleList] | type[nn.Sequential] | type[nn.ModuleDict]
_LISTS: tuple[_Lists, ...] = (nn.ModuleList, nn.Sequential)


def repeated(module: nn.Module, dicts: bool = False) -> dict[str, nn.Module]:
    """Members of the outermost lists of layers that have two and more, by name, in order, each once.

    With `dicts` a ModuleDict counts as a list too. No member lies inside another, none is without parameters.
    """
    kinds = (*_LISTS, nn.ModuleDict) if dicts else _LISTS
    seen: dict[nn.Module, str] = {}
    for name, member in _members(module, "", kinds):
        if has_parameters(member):
            seen.setdefault(member, name)
    return {name: member for member, name in seen.items()}


def callable_by_itself(module: nn.Module) -> bool:
    """Whether a module is called as a whole, and is not only a list of modules or parameters."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def has_parameters(module: nn.Module) -> bool:
    """Whether there is anything in it to move."""
    return next(module.parameters(), None) is not None


def _members(module: nn.Module, name: str, kinds: tuple[_Lists, ...]) -> Iterator[tuple[str, nn.Module]]:
    repeats = isinstance(module, kinds) and len(module) > 1
    for leaf, child in module.named_children():
        path = f"{name}.{leaf}" if name else leaf
        if repeats and callable_by_itself(child):
            yield path, child
        else:
            yield from _members(child, path, kinds)
