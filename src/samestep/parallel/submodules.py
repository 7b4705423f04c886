"""Submodules with a role of their own: repeated blocks, frozen parts in evaluation mode, recomputed activations."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from samestep.errors import WrapError
from samestep.messages import format_list

_Containers = type[nn.ModuleList] | type[nn.Sequential] | type[nn.ModuleDict]
_LISTS: tuple[_Containers, ...] = (nn.ModuleList, nn.Sequential)
_SHOWN = 12


def repeated_blocks(module: nn.Module, dicts: bool = False) -> dict[str, nn.Module]:
    """Members of the outermost ModuleLists and Sequentials with at least two members, by name, in order, each once.

    With `dicts` a ModuleDict counts too. No block contains another, and every block has parameters.
    """
    kinds = (*_LISTS, nn.ModuleDict) if dicts else _LISTS
    seen: dict[nn.Module, str] = {}
    for name, member in _members(module, "", kinds):
        if has_parameters(member):
            seen.setdefault(member, name)
    return {name: member for member, name in seen.items()}


def callable_by_itself(module: nn.Module) -> bool:
    """Whether a module has a forward pass, rather than being a container of modules or parameters."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def has_parameters(module: nn.Module) -> bool:
    """Whether a module has any parameter."""
    return next(module.parameters(), None) is not None


def _members(module: nn.Module, name: str, kinds: tuple[_Containers, ...]) -> Iterator[tuple[str, nn.Module]]:
    repeats = isinstance(module, kinds) and len(module) > 1
    for leaf, child in module.named_children():
        path = f"{name}.{leaf}" if name else leaf
        if repeats and callable_by_itself(child):
            yield path, child
        else:
            yield from _members(child, path, kinds)


def frozen_parts(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The largest submodules that have parameters but no trainable one, by name with `prefix`."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        if has_parameters(child) and not any(p.requires_grad for p in child.parameters()):
            found[prefix + name] = child
        else:
            found.update(frozen_parts(child, f"{prefix}{name}."))
    return found


def frozen_names(model: nn.Module, parts: dict[str, nn.Module]) -> list[str]:
    """Full names of the parameters and buffers of frozen parts."""
    inside = {id(t) for part in parts.values() for t in (*part.parameters(), *part.buffers())}
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if id(tensor) in inside]


def frozen_tensor_names(model: nn.Module) -> list[str]:
    """Names in the state dict that training does not change; tied ones each, and none if no parameter is trainable.

    These are the frozen parameters, and the buffers of submodules whose parameters are all frozen.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not any(parameter.requires_grad for parameter in parameters.values()):
        return []
    buffers = {id(buffer) for part in frozen_parts(model).values() for buffer in part.buffers()}
    saved = model.state_dict(keep_vars=True)
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    return [name for name, tensor in saved.items() if name in frozen or id(tensor) in buffers]


def keep_frozen_in_eval(model: nn.Module, parts: dict[str, nn.Module]) -> None:
    """Put frozen parts into evaluation mode, now and before every forward pass, also after `model.train()`."""
    if not parts:
        return

    def set_eval(called: nn.Module, *_: object) -> None:
        """The hook; a copy of the model has it too, with its own frozen parts."""
        for part in parts.values() if called is model else map(called.get_submodule, parts):
            if part.training:
                part.eval()

    set_eval(model)
    model.register_forward_pre_hook(set_eval)


def checkpoint_activations(model: nn.Module, classes: Sequence[type[nn.Module]]) -> int:
    """Recompute the activations of every outermost module of `classes` in the backward pass; returns their number.

    Results do not change: torch restores its generators for the second pass, and the keys of samples are still set.
    The modules keep their class, hooks and parameter names: only their `forward` is called differently.
    """
    if not classes:
        return 0
    blocks = _outermost(model, tuple(classes))
    if not blocks:
        requested = ", ".join(kind.__name__ for kind in classes)
        known = sorted({type(module).__name__ for module in model.modules() if module is not model})
        shown = format_list(known, _SHOWN)
        raise WrapError(
            f"activation_checkpointing=({requested},) matches no module of {type(model).__name__}: its submodules are "
            f"of class {shown or 'none'}"
        )
    for block in blocks:
        # not a closure: a copy of the model, such as its moving average, must use its own weights
        block.forward = partial(_recompute, block.forward)
    return len(blocks)


def _outermost(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Modules of `classes` that are not inside another one, which would be computed four times."""
    found: dict[int, nn.Module] = {}
    for child in module.children():
        for block in [child] if isinstance(child, classes) else _outermost(child, classes):
            found[id(block)] = block
    return list(found.values())


def _recompute(forward: Callable[..., object], /, *inputs: object, **kwargs: object) -> object:
    if not torch.is_grad_enabled():
        return forward(*inputs, **kwargs)
    cache = kwargs.get("past_key_values")
    if callable(length := getattr(cache, "get_seq_length", None)) and not length():
        # models of transformers create one also in training, and both passes would add their keys and values to it
        kwargs["past_key_values"] = None
    # keyword arguments are bound, since some of their names are options of `checkpoint`
    return checkpoint(partial(forward, **kwargs) if kwargs else forward, *inputs, use_reentrant=False)
