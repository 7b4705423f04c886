"""What makes a run fast: precision, autocast, loss scale and fused optimizers, agreed on by all ranks."""

from collections.abc import Callable, Sequence

import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import Optimizer

from samestep.distributed.communicator import Communicator
from samestep.parallel.precision import LossScale, PrecisionSupport, choose_precision, set_fp32_products
from samestep.parallel.wrapped_model import WrappedModel

_HAVE_FUSED_KERNELS = (Adam, AdamW, SGD)  # on CUDA in every supported torch


class Acceleration:
    """The precision of a run and what follows from it, from its start to its end."""

    def __init__(self, comm: Communicator, support: PrecisionSupport, report: Callable[[str], None]) -> None:
        self.precision = choose_precision(comm.exchange_objects("Run.start, agreeing on precision", support))
        self.loss_scale = LossScale(comm) if self.precision.name == "fp16" else None
        """The loss scale; None unless the run computes in fp16."""
        self._report = report
        self._fused: list[str] = []
        self._reported = False
        self._device = support.device
        self._autocast: torch.autocast | None = None
        self._restore = set_fp32_products(self.precision)
        self._default_dtype = torch.get_default_dtype()
        if self.precision.convert_to is not None:  # also for tensors and models that the script creates
            torch.set_default_dtype(self.precision.convert_to)
        if self.precision.tf32 or self.precision.strict:  # these apply from now on, also to what is never wrapped
            self.report()

    @property
    def loss_factor(self) -> float:
        """The factor on losses in the backward pass; 1 unless the run computes in fp16."""
        return 1.0 if self.loss_scale is None else self.loss_scale.rank_factor

    def report(self) -> None:
        """Print what was chosen and why, once."""
        if not self._reported:
            self._reported = True
            self._report(str(self.precision))

    def open_forward(self) -> None:
        """Start autocast on a GPU, until the loss is computed.

        It covers more than the call of the model: torch then converts large outputs inside the kernels of the loss,
        which saves a copy (a twelfth of the step of a small language model). On the CPU losses would stay in half
        precision, so there autocast covers only the calls of the model.
        """
        if self._device == "cuda" and self.precision.dtype is not None and self._autocast is None:
            self._autocast = torch.autocast(self._device, dtype=self.precision.dtype)
            self._autocast.__enter__()

    def close_forward(self) -> None:
        """End autocast: the loss is computed, and the backward pass does not run under autocast."""
        autocast, self._autocast = self._autocast, None
        if autocast is not None:
            autocast.__exit__(None, None, None)

    def unscale(self, models: Sequence[WrappedModel], step: int) -> None:
        """Take the loss scale out of the gradients when the micro-batches of a step are done."""
        if self.loss_scale is not None and (message := self.loss_scale.unscale(models, step)):
            self._report(message)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Called before the first step of an optimizer: turn on its fused kernel."""
        if turn_on_fused(optimizer):
            name = type(optimizer).__name__
            self._fused.append(name)
            self._report(f"optimizer: fused {name}, one kernel for all parameters (fused=False turns it off)")

    def choices(self) -> dict[str, object]:
        """What was chosen, for the summary."""
        precision = self.precision
        choices: dict[str, object] = {
            "precision": precision.name,
            "reason": precision.reason,
            "tf32": precision.tf32,
            "compile": precision.compile,
            "fused": list(self._fused),
        }
        return choices if self.loss_scale is None else {**choices, "loss_scale": self.loss_scale.factor}

    def close(self) -> None:
        """Restore torch's settings."""
        self.close_forward()
        self._restore()
        if self.precision.convert_to is not None:
            torch.set_default_dtype(self._default_dtype)


def turn_on_fused(optimizer: Optimizer, device: str = "cuda") -> bool:
    """Let an optimizer of torch whose parameters are on `device` use its fused kernel; returns whether it does now.

    A choice of the user (`fused=`, `foreach=`, `differentiable=`) is kept, and so is a subclass of torch's optimizers,
    whose `step` may not support the option. The results differ from the default's in the last bits.
    """
    if type(optimizer) not in _HAVE_FUSED_KERNELS:
        return False
    if not all(_allows_fused(group, device) for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        group["fused"] = True
        for parameter in group["params"]:
            # a fused kernel counts steps on the device; a restored state may still count on the CPU
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(parameter.device, torch.float32)
    return True


def _allows_fused(group: dict[str, object], device: str) -> bool:
    parameters: list[torch.Tensor] = group["params"]  # pyright: ignore[reportAssignmentType]  # torch's layout of a group
    undecided = "fused" in group and group["fused"] is None and group.get("foreach") is None
    return (
        undecided
        and not group.get("differentiable")
        and all(p.device.type == device and torch.is_floating_point(p) for p in parameters)
        and not any(p.grad is not None and p.grad.is_sparse for p in parameters)
    )
