"""A wrapped model: what its ranks made of it, and what must stay true of it while it trains."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from samestep.errors import WrapError
from samestep.parallel.batchnorm import learning
from samestep.parallel.unused_parameters import Passes, Use, explain
from samestep.torch_private import drop_gathered_gradients

_SHOWN = 6


class WrappedModel:
    """The user's module (`inner`), the callable that trains it (`model`), and the watch over both."""

    def __init__(self, inner: nn.Module, core: nn.Module, model: nn.Module, strategy: str, use: Use | None) -> None:
        self.inner, self.core, self.model, self.strategy = inner, core, model, strategy
        self.norms = learning(inner)
        """BatchNorm layers that learn statistics from what goes through."""
        self._use = use
        self._passes = Passes(model) if isinstance(model, DistributedDataParallel) else None
        self._known = {id(p): p.requires_grad for p in inner.parameters()}
        self._names = {id(p): name for name, p in inner.named_parameters()}

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the weights, so that the forward pass needs all ranks."""
        return isinstance(self.inner, FSDPModule)

    def sync(self, last: bool) -> None:
        """Let gradients travel in the coming backward pass, or keep them here."""
        if self._use is not None and last:
            self._use.begin()
        if self._passes is not None and last:
            self._passes.begin()
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = last
        elif isinstance(self.inner, FSDPModule):
            self.inner.set_requires_gradient_sync(last)
            self.inner.set_is_last_backward(last)

    def forget(self) -> None:
        """Drop the gradients of a step that was left early, also those that wait for its last micro-batch."""
        self.sync(last=True)
        self.rest()
        drop_gathered_gradients(self.inner)
        for gradient in self.gradients():
            gradient.zero_()

    def rest(self) -> None:
        """Hold this rank's parts only: a forward pass without a backward pass leaves some whole, with zero2 all."""
        for module in self.inner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What trains."""
        return (parameter for parameter in self.inner.parameters() if self._known.get(id(parameter)))

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradients that stand on this rank."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                yield parameter.grad

    def first_not_finite(self) -> str | None:
        """The name of the first parameter whose gradient holds inf or nan on this rank."""
        for name, parameter in self.inner.named_parameters():
            if parameter.grad is not None and not bool(local_tensor(parameter.grad).isfinite().all()):
                return name
        return None

    def all_finite(self) -> torch.Tensor:
        """Whether every gradient of this rank is finite, as a tensor on the device: no transfer."""
        grads = [local_tensor(gradient) for gradient in self.gradients()]
        if not grads:
            return torch.tensor(True)
        # a rank may hold no part of a small parameter, and nothing has no largest element
        grads = [gradient for gradient in grads if gradient.numel()] or [torch.zeros(1, device=grads[0].device)]
        norms = torch.stack([torch.linalg.vector_norm(gradient, ord=torch.inf) for gradient in grads])
        return norms.isfinite().all()

    def average_again(self, number: int) -> None:
        """Average the gradients over the ranks where DDP has left some out; every rank has had the same passes.

        It has sent those of the first backward pass after a forward pass. What a second one adds stays on its rank;
        what was averaged is the same on all, so the average of both is the average of all.
        """
        if self._passes is None or not self._passes.end():
            return
        if self._use is None:
            raise WrapError(
                f"step {number} had a second backward pass after one forward pass: DDP sends the gradients of the "
                "first alone, and with unused='allow' ranks do not know which others have any; add the losses up and "
                "call backward() once"
            )
        for gradient in self.gradients():
            dist.all_reduce(gradient.div_(dist.get_world_size()))

    def check_use(self, number: int, samples: Sequence[int], rank: int) -> bool:
        """Raise where the step left parameters unused; whether it used any, as far as that is watched."""
        if self._use is None or not self._use.any:
            return False
        if missing := self._use.missing():
            self.check_unchanged()  # where a parameter was replaced, the old one is unused: tell the cause
            frozen = [name for name, p in self.inner.named_parameters() if name in missing and not p.requires_grad]
            if frozen:
                raise WrapError(f"parameter {frozen[0]!r} was frozen after run.wrap: freeze before, then wrap")
            raise WrapError(explain(self.inner, missing, number, samples, rank))
        return True

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is one that this wrapper knew from the start."""
        return id(parameter) in self._known

    def check_unchanged(self) -> None:
        """Raise where a parameter was replaced, added or unfrozen since the model was wrapped."""
        self.rest()
        for name, parameter in self.inner.named_parameters():
            known = self._known.get(id(parameter))
            if known is None:
                raise WrapError(
                    f"parameter {name!r} was replaced or added after run.wrap, so its gradient stays on each rank and "
                    "the ranks drift apart: change the model first, then wrap it, then build the optimizer"
                )
            if parameter.requires_grad and not known:
                raise WrapError(
                    f"parameter {name!r} was frozen when the model was wrapped and trains now, so its gradient stays "
                    "on each rank: unfreeze it before run.wrap; to train more from some epoch on, end this Run there "
                    "and "
                    "go on with another"
                )


def check_optimizer(optimizer: Optimizer, models: Sequence[WrappedModel]) -> None:
    """Raise where an optimizer steps parameters that no wrapped model holds."""
    strays = [
        (at, parameter)
        for at, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad and not any(model.owns(parameter) for model in models)
    ]
    if not strays:
        return
    told = ", ".join(f"{tuple(parameter.shape)} in group {at}" for at, parameter in strays[:_SHOWN])
    kind = type(optimizer).__name__
    raise WrapError(
        f"{kind} holds {len(strays)} parameter(s) that no wrapped model has: shape {told}. If it was built before "
        f"run.wrap, build it after: {kind}(model.parameters(), ...); if they belong to another module, wrap that too: "
        "its gradients stay on each rank"
    )


def guard_against_bypass(inner: nn.Module, model: nn.Module, in_step: Callable[[], bool]) -> None:
    """Raise where the inner module is called in training past its wrapper: its gradients would not be averaged."""
    inside = [False]

    def _enter(*_: object) -> None:
        inside[0] = True

    def _leave(*_: object) -> None:
        inside[0] = False

    def _look(called: nn.Module, *_: object) -> None:
        # a copy of the model, such as a target network, has this hook too, and no wrapper that it could be called past
        own = called is inner and inner.training
        if own and not inside[0] and torch.is_grad_enabled() and in_step():
            raise WrapError(
                f"{type(inner).__name__} was called past its wrapper in a training step (model.module(x)?): its "
                "gradients would not be averaged over the ranks; call the model that run.wrap returned"
            )

    model.register_forward_pre_hook(_enter)
    model.register_forward_hook(_leave, always_call=True)
    inner.register_forward_pre_hook(_look)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, what a sparse one holds, or the tensor itself."""
    if tensor.is_sparse:
        return tensor.coalesce().values()
    to_local = getattr(tensor, "to_local", None)
    return to_local() if callable(to_local) else tensor  # pyright: ignore[reportReturnType]  # DTensor's own method
