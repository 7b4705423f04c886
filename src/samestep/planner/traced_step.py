"""Run one training step under the memory tracker, as it would run on the target device."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from samestep.data.loader import list_tensors
from samestep.data.sample_rng import set_micro_batch
from samestep.errors import PlanError
from samestep.parallel.acceleration import turn_on_fused
from samestep.parallel.precision import compute_in
from samestep.planner.memory_tracker import MemorySample, MemoryTracker
from samestep.planner.model_parts import storage_bytes
from samestep.planner.operations import OpCounter
from samestep.planner.traced_model import TracedModel, explain_errors

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class StepConfig:
    """How the traced step is configured."""

    optimizer: str | MakeOptimizer
    """Name of a class in torch.optim, or a function of the parameters that returns an optimizer."""
    dtype: torch.dtype | None  # dtype of autocast; None: no autocast
    target: str  # the device that the step would run on: "cuda" or "cpu"
    blocks: tuple[type[nn.Module] | str, ...] = ()  # classes of the blocks, or their names; empty: detected
    channels_last: bool = False  # whether images and convolution weights use the channels-last memory format


@dataclass(frozen=True)
class StepTrace:
    """The trace of one step."""

    timeline: list[MemorySample]  # memory in use after each operation
    forward_flops: float  # FLOPs of the forward pass; 0 without a counter
    batch_bytes: int  # bytes of the batch


class StepTracer:
    """A model and its optimizer after a first step, so that the optimizer state exists."""

    def __init__(self, traced: TracedModel, config: StepConfig, samples: int) -> None:
        self.traced, self._config = traced, config
        self._trainable = [p for p in traced.model.parameters() if p.requires_grad]
        self.optimizer = _make_optimizer(config.optimizer, self._trainable)
        if config.dtype is not None and config.target == "cpu":
            compute_in(traced.model, torch.device("cpu"), config.dtype)
        self.gradient_bytes = self._first_step(samples)
        """Bytes of all gradients."""
        self.state_bytes = storage_bytes(_state_tensors(self.optimizer))
        """Bytes of the optimizer state."""
        self.weight_bytes = storage_bytes((*traced.model.parameters(), *traced.model.buffers()))
        """Bytes of parameters and buffers."""

    @property
    def on_cuda(self) -> bool:
        """Whether the step would run on a GPU."""
        return self._config.target == "cuda"

    def trace(self, samples: int, counter: OpCounter | None = None) -> StepTrace:
        """Trace a step with one micro-batch; `counter` counts the operators of forward and backward pass."""
        tracker = MemoryTracker(cuda=self.on_cuda, counter=counter)
        model, batch = self.traced.model, self.traced.batch(samples)
        state = _state_tensors(self.optimizer)
        tracker.add_existing([*model.parameters(), *model.buffers(), *state, *list_tensors(batch)])
        hooks = [p.register_post_accumulate_grad_hook(tracker.mark_gradient) for p in self._trainable]
        try:
            with tracker:
                loss = self._forward(samples, batch)
                forward_flops = 0.0 if counter is None else counter.flops
                self._backward(loss)
                del loss
                tracker.counter = None  # the optimizer's work is estimated from the bytes of its state
                _step(self.optimizer, self._config.optimizer)
        finally:
            for hook in hooks:
                hook.remove()
            self.optimizer.zero_grad()
        return StepTrace(tracker.timeline, forward_flops, storage_bytes(list_tensors(batch)))

    def _first_step(self, samples: int) -> int:
        """Create the optimizer state; returns the bytes of all gradients."""
        self._backward(self._forward(samples, self.traced.batch(samples)))
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        size = storage_bytes(gradient for gradient in gradients if gradient.layout == torch.strided)
        if self.on_cuda:
            _step_as_on_cuda(self.optimizer)
        _step(self.optimizer, self._config.optimizer)
        self.optimizer.zero_grad()
        return size

    def _forward(self, samples: int, batch: object) -> torch.Tensor:
        """The loss, under autocast as in a run on CUDA."""
        set_micro_batch(torch.zeros(samples, dtype=torch.long))
        dtype = self._config.dtype if self.on_cuda else None
        with torch.autocast("cpu", dtype=dtype) if dtype is not None else nullcontext():
            return self.traced.compute_loss(batch)

    def _backward(self, loss: torch.Tensor) -> None:
        what = f"the backward pass of {type(self.traced.model).__name__}"
        with explain_errors(
            what, lambda error: f"{what} failed ({error}). Call loss.backward() on its own to see the traceback."
        ):
            loss.backward()


def _make_optimizer(optimizer: str | MakeOptimizer, parameters: list[nn.Parameter]) -> Optimizer:
    make, name = _find_optimizer(optimizer) if isinstance(optimizer, str) else optimizer, _optimizer_name(optimizer)
    with explain_errors(
        name,
        lambda error: (
            f"{name} does not accept the parameters of this model ({error}). Name another class of torch.optim, or "
            "pass trace_model(optimizer=...) a function of the parameters."
        ),
    ):
        made = make(parameters)
    if not isinstance(made, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's function
        raise PlanError(
            f"The optimizer function returned a {type(made).__name__}. Pass the name of a class in torch.optim, or a "
            "function of the parameters, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)"
        )
    return made


def _find_optimizer(name: str) -> MakeOptimizer:
    known = {n: kind for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    known.pop("Optimizer", None)
    if name not in known:
        raise PlanError(f"optimizer={name!r} is not in torch.optim. Use one of {', '.join(sorted(known))}.")
    return cast("MakeOptimizer", known[name])


def _optimizer_name(optimizer: str | MakeOptimizer) -> str:
    return f"optimizer={optimizer!r}" if isinstance(optimizer, str) else "the optimizer"


def _step(optimizer: Optimizer, requested: str | MakeOptimizer) -> None:
    """Step without a closure, as training loops do."""
    name = _optimizer_name(requested)
    with explain_errors(
        name,
        lambda error: (
            f"{name} cannot step after a backward pass ({error}). Use an optimizer that needs no closure and supports "
            "the gradients of this model, such as AdamW or SGD."
        ),
    ):
        optimizer.step()


def _step_as_on_cuda(optimizer: Optimizer) -> None:
    """Make an optimizer of CPU parameters step as on CUDA; call it before the first step, with gradients present.

    Run enables fused kernels if torch has them. Otherwise torch steps all parameters at once, with temporaries.
    """
    if turn_on_fused(optimizer, device="cpu"):
        return
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
