"""What must hold the same bits on every rank while a run trains."""

from collections.abc import Iterator, Sequence

import torch
from torch.optim.optimizer import Optimizer

from samestep.wrap.batchnorm import of_own_rows
from samestep.wrap.wrapped import Wrapped


def replicated(models: Sequence[Wrapped], optimizers: Sequence[Optimizer]) -> dict[str, torch.Tensor]:
    """Weights, buffers that no rank keeps for itself, and optimizer state, by name."""
    found: dict[str, torch.Tensor] = {}
    for at, model in enumerate(models):
        own = {id(b) for norm in of_own_rows(model.inner) for b in norm.buffers()}
        named = (*model.inner.named_parameters(), *model.inner.named_buffers())
        found.update({name if at == 0 else f"model {at}: {name}": t for name, t in named if id(t) not in own})
        for which, optimizer in enumerate(optimizers):
            prefix = "" if at == 0 else f"model {at}: "
            suffix = "" if which == 0 else f", optimizer {which}"
            found.update({f"{prefix}{name}{suffix}": value for name, value in _state(model, optimizer)})
    return found


def _state(model: Wrapped, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.inner.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value):
                yield f"{name} ({key} of {type(optimizer).__name__})", value
