"""The optimizer of a step that is looked at: named or made by the user, stepping as it would on the target."""

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch.optim.optimizer import Optimizer

from samestep.errors import PlanError
from samestep.measure.failures import telling
from samestep.wrap.fused import turn_on_fused

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], Optimizer]


def make_optimizer(wish: str | MakeOptimizer, parameters: list[torch.nn.Parameter]) -> Optimizer:
    """The optimizer for these parameters."""
    make = _named(wish) if isinstance(wish, str) else wish
    with telling(_called(wish), lambda said: _refused(wish, said)):
        optimizer = make(parameters)
    if not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's own function
        raise PlanError(
            f"optimizer gave a {type(optimizer).__name__}: give a name of torch.optim, or a function of "
            "the parameters, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)"
        )
    return optimizer


def step(optimizer: Optimizer, wish: str | MakeOptimizer) -> None:
    """Step as a training loop does: after the backward pass, without a closure."""
    with telling(_called(wish), lambda said: _cannot_step(wish, said)):
        optimizer.step()


def state_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Every tensor that the optimizer keeps."""
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def step_as_on_cuda(optimizer: Optimizer) -> None:
    """Let CPU parameters step as CUDA ones would; call it before the first step, when gradients stand.

    Run turns fused kernels on where torch has them; else torch steps all parameters at once, with temporaries.
    """
    if turn_on_fused(optimizer, device="cpu"):
        return
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _called(wish: str | MakeOptimizer) -> str:
    return f"optimizer={wish!r}" if isinstance(wish, str) else "the optimizer"


def _refused(wish: str | MakeOptimizer, said: str) -> str:
    return (
        f"{_called(wish)} does not take all parameters of this model ({said}): name another of torch.optim; "
        "trace_model(optimizer=...) takes a function of the parameters as well"
    )


def _cannot_step(wish: str | MakeOptimizer, said: str) -> str:
    return (
        f"{_called(wish)} cannot step after a backward pass ({said}): name one that steps without a closure and for "
        "gradients as this model has them, such as AdamW or SGD"
    )


def _named(name: str) -> MakeOptimizer:
    known = {n: kind for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    known.pop("Optimizer", None)
    if name not in known:
        raise PlanError(f"optimizer={name!r} is not in torch.optim: use one of {', '.join(sorted(known))}")
    return cast("MakeOptimizer", known[name])
