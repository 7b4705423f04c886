"""Parameters that a step did not use: noticed at once on every world size, named, explained."""

from collections.abc import Sequence

import torch
from torch import nn

from samestep.errors import WrapError

_SHOWN = 6


class Use:
    """Which trainable parameters received a gradient in the last micro-batch of a step."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._seen: set[int] = set()
        for parameter in self._names.values():
            parameter.register_post_accumulate_grad_hook(self._note)

    def begin(self) -> None:
        """Forget the micro-batches before."""
        self._seen.clear()

    def check(self, model: nn.Module, number: int, samples: Sequence[int], rank: int) -> None:
        """Raise where a backward pass left parameters out; a micro-batch without any backward pass is the user's choice."""
        if not self._seen or len(self._seen) == len(self._names):
            return
        missing = [name for name, parameter in self._names.items() if id(parameter) not in self._seen]
        raise WrapError(explain(model, missing, number, samples, rank))

    def _note(self, parameter: torch.Tensor) -> None:
        self._seen.add(id(parameter))


def explain(model: nn.Module, missing: Sequence[str], number: int, samples: Sequence[int], rank: int) -> str:
    """What was not used, where, for which samples, and what can be done."""
    shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
    home = _common_module(model, missing)
    which = ", ".join(map(str, samples[:_SHOWN])) + (", ..." if len(samples) > _SHOWN else "")
    return (
        f"step {number} did not use {len(missing)} parameter(s) of {home} on rank {rank}: {shown}. The samples that took the other "
        f"branch are {which}. Other ranks would wait for these gradients, and whether an optimizer skips them would depend on the "
        "number of ranks. Either connect them at every step (for dropped conditioning: samestep.nn.ConditioningDropout), or freeze "
        "what never trains (parameter.requires_grad_(False)), or accept the search and its cost: run.wrap(model, unused='allow')"
    )


def _common_module(model: nn.Module, names: Sequence[str]) -> str:
    """The smallest module that holds all of `names`."""
    paths = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    module = model.get_submodule(".".join(common))
    return f"{type(module).__name__} at {'.'.join(common)!r}" if common else type(module).__name__
