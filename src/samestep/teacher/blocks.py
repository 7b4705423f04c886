"""The blocks of a teacher: the layers that repeat, which can be moved and streamed one by one."""

from torch import nn

from samestep.wrap.blocks import callable_by_itself, has_parameters, repeated


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers by name, in order: elements of the outermost lists of layers.

    A model without such a list has its direct children for blocks, and a single layer is a block by itself. No block
    lies inside another.
    """
    found = repeated(module, dicts=True)
    if not found:
        children = module.named_children()
        found = {name: child for name, child in children if callable_by_itself(child) and has_parameters(child)}
    return found or {"": module}
