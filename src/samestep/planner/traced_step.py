"""One steady training step of a model, followed storage by storage as it would go on its target."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch.optim.optimizer import Optimizer

from samestep.data.loader import list_tensors
from samestep.data.sample_rng import set_micro_batch
from samestep.errors import PlanError
from samestep.parallel.acceleration import turn_on_fused
from samestep.parallel.precision import compute_in
from samestep.planner.memory_tracker import Notes, Tracker, allocated, cuda_workspace, exact, no_workspace
from samestep.planner.model_parts import nbytes
from samestep.planner.operations import Work
from samestep.planner.traced_model import Subject, telling

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


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Terms:
    """How the step goes."""

    optimizer: str | MakeOptimizer
    """A name of torch.optim, or what makes one of parameters."""
    dtype: torch.dtype | None
    """The dtype of autocast; None: nothing is cast."""
    target: str
    """Where it would run: "cuda" or "cpu"."""


@dataclass(frozen=True)
class Followed:
    """What one step showed."""

    notes: Notes
    """How full memory was, moment by moment."""
    forward_flops: float
    """Work of the forward pass, where work was counted."""
    batch: int
    """Bytes of the batch."""


class Stepping:
    """A model and its optimizer, past their first step: optimizer state stands, gradients come and go."""

    def __init__(self, subject: Subject, terms: Terms, samples: int) -> None:
        self.subject, self._terms = subject, terms
        self._training = [p for p in subject.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(terms.optimizer, self._training)
        if terms.dtype is not None and terms.target == "cpu":
            compute_in(subject.model, _CPU, terms.dtype)
        self.gradients = self._first_step(samples)
        """Bytes of all gradients."""
        self.state = nbytes(state_of(self.optimizer))
        """Bytes of optimizer state."""
        self.weights = nbytes((*subject.model.parameters(), *subject.model.buffers()))
        """Bytes of parameters and buffers."""

    @property
    def on_cuda(self) -> bool:
        """Whether the step would run on a GPU."""
        return self._terms.target == "cuda"

    def follow(self, samples: int, work: Work | None = None) -> Followed:
        """What a step of one micro-batch needs, moment by moment."""
        tracker = Tracker(allocated if self.on_cuda else exact, cuda_workspace if self.on_cuda else no_workspace, work)
        model, batch = self.subject.model, self.subject.batch(samples)
        tracker.hold([*model.parameters(), *model.buffers(), *state_of(self.optimizer), *list_tensors(batch)])
        hooks = [p.register_post_accumulate_grad_hook(tracker.mark_gradient) for p in self._training]
        try:
            with tracker:
                loss = self._loss(samples, batch)
                forward = 0.0 if work is None else work.flops
                self._backward(loss)
                del loss
                tracker.work = None  # an optimizer's work depends on the bytes of its state alone
                step(self.optimizer, self._terms.optimizer)
        finally:
            for hook in hooks:
                hook.remove()
            self.optimizer.zero_grad()
        return Followed(tracker.notes, forward, nbytes(list_tensors(batch)))

    def _first_step(self, samples: int) -> int:
        """Make the optimizer's state; the bytes of all gradients."""
        self._backward(self._loss(samples, self.subject.batch(samples)))
        gradients = [p.grad for p in self._training if p.grad is not None]
        size = nbytes(gradient for gradient in gradients if gradient.layout == torch.strided)
        if self.on_cuda:
            step_as_on_cuda(self.optimizer)
        step(self.optimizer, self._terms.optimizer)
        self.optimizer.zero_grad()
        return size

    def _backward(self, loss: torch.Tensor) -> None:
        name = type(self.subject.model).__name__
        with telling(f"the backward pass of {name}", lambda said: _why_backward_failed(name, said)):
            loss.backward()

    def _loss(self, samples: int, batch: object) -> torch.Tensor:
        """The forward pass, under autocast up to the loss as a run on CUDA has it."""
        set_micro_batch(torch.zeros(samples, dtype=torch.long))
        cast = self._terms.dtype if self._terms.target == "cuda" else None
        with torch.autocast("cpu", dtype=cast) if cast is not None else nullcontext():
            return self.subject.compute_loss(batch)


def _why_backward_failed(name: str, said: str) -> str:
    return f"the backward pass of {name} failed ({said}): call loss.backward() by itself to see where"
