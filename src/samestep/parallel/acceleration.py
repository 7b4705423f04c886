"""What a run does to be fast: decided once for all ranks, told once, undone at the end, kept for the summary."""

from collections.abc import Callable, Sequence

import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import Optimizer

from samestep.distributed.communicator import Communicator
from samestep.parallel.precision import Arithmetic, LossScale, agree_on_numbers, set_fp32_products
from samestep.parallel.wrapped_model import WrappedModel

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


class Acceleration:
    """The precision of a run and what follows from it, from the start of the run to its end."""

    def __init__(self, link: Communicator, mine: Arithmetic, say: Callable[[str], None]) -> None:
        self.numbers = agree_on_numbers(link, mine)
        self.scale = LossScale(link) if self.numbers.name == "fp16" else None
        self._say = say
        self._fused: list[str] = []
        self._told = False
        self._device = mine.device
        self._forward: torch.autocast | None = None
        self._restore = set_fp32_products(self.numbers)
        if self.numbers.tf32 or self.numbers.strict:  # these hold from now on, also for what is never wrapped
            self.tell()

    def tell(self) -> None:
        """Say what was chosen and why; a second call says nothing."""
        if not self._told:
            self._told = True
            self._say(self.numbers.tell())

    def open_forward(self) -> None:
        """Compute in the chosen precision from now on, until the loss is known.

        Wider than the call of the model: torch then widens large outputs inside the kernels of the loss, which spares
        a copy of them (a twelfth of a small language model's step). On the CPU losses would stay narrow: there only the
        calls of the model are meant.
        """
        if self._device == "cuda" and self.numbers.dtype is not None and self._forward is None:
            self._forward = torch.autocast(self._device, dtype=self.numbers.dtype)
            self._forward.__enter__()

    def close_forward(self) -> None:
        """The loss is known, or there will be none: what follows, the backward pass first, is not under autocast."""
        forward, self._forward = self._forward, None
        if forward is not None:
            forward.__exit__(None, None, None)

    def settle(self, models: Sequence[WrappedModel], number: int) -> None:
        """Called when a step's micro-batches are done: gradients come out as if there had been no scale."""
        if self.scale is not None and (dropped := self.scale.settle(models, number)):
            self._say(dropped)

    def meet(self, optimizer: Optimizer) -> None:
        """Called before the first step of an optimizer."""
        if turn_on_fused(optimizer):
            self._fused.append(type(optimizer).__name__)
            self._say(f"optimizer: fused {self._fused[-1]}, one kernel for all parameters (fused=False turns it off)")

    def choices(self) -> dict[str, object]:
        """What was chosen, for the summary."""
        numbers = self.numbers
        found: dict[str, object] = {"precision": numbers.name, "reason": numbers.reason, "tf32": numbers.tf32}
        found |= {"compile": numbers.compile, "fused": list(self._fused)}
        return found if self.scale is None else {**found, "loss_scale": self.scale.factor}

    def close(self) -> None:
        """Bring torch's settings back."""
        self.close_forward()
        self._restore()
