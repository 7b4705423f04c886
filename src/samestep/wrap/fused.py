"""Fused optimizers: one kernel for all parameters, turned on where torch has one and the user left it open."""

import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import Optimizer

_HAVE_IT = (Adam, AdamW, SGD)  # on CUDA in every torch that is supported


def turn_on_fused(optimizer: Optimizer, device: str = "cuda") -> bool:
    """Let an optimizer of torch's own that steps parameters on `device` use its fused kernel; whether it does now.

    A choice that the user made (`fused=`, `foreach=`, `differentiable=`) is left alone, and so is a class derived from
    torch's: its `step` may not know the option. The results differ from the default's in the last bits.
    """
    if type(optimizer) not in _HAVE_IT:
        return False
    if not all(_open_to_it(group, device) for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["fused"] = True
        for parameter in group["params"]:
            _follow(optimizer.state.get(parameter), parameter)
    return True


def _open_to_it(group: dict[str, object], device: str) -> bool:
    parameters: list[torch.Tensor] = group["params"]  # pyright: ignore[reportAssignmentType]  # torch's own layout of a group
    undecided = "fused" in group and group["fused"] is None and group.get("foreach") is None
    return (
        undecided
        and not group.get("differentiable")
        and all(p.device.type == device and torch.is_floating_point(p) for p in parameters)
        and not any(p.grad is not None and p.grad.is_sparse for p in parameters)
    )


def _follow(state: dict[str, object] | None, parameter: torch.Tensor) -> None:
    """A fused kernel counts steps on the device; a state that was restored may still count on the CPU."""
    count = None if state is None else state.get("step")
    if state is not None and isinstance(count, torch.Tensor):
        state["step"] = count.to(parameter.device, torch.float32)
