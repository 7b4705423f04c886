"""A wrapped model: when its gradients are reduced, whether they are complete, and checks that it was not changed."""

from collections.abc import Callable, Iterator, Sequence, Sized

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from samestep.distributed.communicator import Communicator
from samestep.errors import WrapError
from samestep.parallel.batchnorm import batchnorms_outside_frozen
from samestep.parallel.fsdp import local_tensor
from samestep.parallel.gradient_checks import (
    AccumulationWatch,
    BackwardPasses,
    PassOrder,
    UsedParameters,
    unused_message,
)
from samestep.torch_private import drop_gathered_gradients, gathered_parameters, is_fsdp

_SHOWN = 6


class WrappedModel:
    """The user's module (`inner`), its compiled form (`core`) and what the user calls in training (`model`)."""

    def __init__(
        self,
        inner: nn.Module,
        core: nn.Module,
        model: nn.Module,
        strategy: str,
        used: UsedParameters | None,
        passes: PassOrder | None,
        shard_copy: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self.inner, self.core, self.model, self.strategy = inner, core, model, strategy
        self.batchnorms = batchnorms_outside_frozen(inner)  # BatchNorm layers that update their statistics in training
        self.shard_copy = shard_copy
        """Shards a copy of a sharded model, on the meta device, in the same way."""
        self._used, self._passes = used, passes
        self._backward_passes = BackwardPasses(model) if isinstance(model, DistributedDataParallel) else None
        self._trainable = {id(p): p.requires_grad for p in inner.parameters()}
        self._accumulation: AccumulationWatch | None = None
        self._holders = [p for p in inner.parameters() if p.requires_grad]  # hold the gradients, sharded with FSDP

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the weights, so that the forward pass needs all ranks."""
        return is_fsdp(self.inner)

    def start_micro_batch(self, step: Sized, number: int, loop: int, last: bool) -> None:
        """Start a micro-batch in a loop over a step; raises if the one before had other passes than on other ranks."""
        if self._passes is not None:
            self._passes.start(step, number, loop)
        self.set_gradient_sync(last)
        if len(step) > 1:
            self.watch_accumulation(step, number)

    def end_micro_batches(self) -> None:
        """End a loop over a step; raises if gradients were reset, or passes differ from those of other ranks."""
        if self._passes is not None:
            self._passes.end()
        if self._accumulation is not None:
            self._accumulation.finish()

    def close_step(self, step: Sized, number: int) -> None:
        """End a step; raises if this rank alone has left the loop over its micro-batches, or did not run it."""
        if self._passes is not None:
            self._passes.close(step, number)

    def set_gradient_sync(self, last: bool) -> None:
        """Reduce gradients over the ranks in the next backward pass if it is that of the last micro-batch."""
        if self._used is not None and last:
            self._used.start()
        if self._backward_passes is not None and last:
            self._backward_passes.start()
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = last
        elif is_fsdp(self.inner):
            self.inner.set_requires_gradient_sync(last)
            self.inner.set_is_last_backward(last)

    def watch_accumulation(self, step: Sized, number: int) -> None:
        """Raise in later backward passes of this step, or at its end, if its gradients were reset.

        FSDP keeps the gradients of all micro-batches but the last where a script cannot reset them.
        """
        if self._accumulation is None:
            gathered = [p for p in gathered_parameters(self.inner).values() if p.requires_grad]
            # the last parameters get their gradients first, when all others still show what was reset
            if used := gathered if self.sharded else self._holders:
                self._accumulation = AccumulationWatch(used[-1], self._holders[::-1] if self.sharded else used[-1:])
        if self._accumulation is not None:
            self._accumulation.start(step, number)

    def drop_gradients(self) -> None:
        """Drop the gradients of a step that was left early, also those that FSDP keeps for the last micro-batch."""
        if self._passes is not None:
            self._passes.leave()
        self.set_gradient_sync(last=True)
        self.reshard()
        drop_gathered_gradients(self.inner)
        for gradient in self.gradients():
            gradient.zero_()

    def reshard(self) -> None:
        """Free gathered weights: a forward pass without a backward pass keeps some, and zero2 keeps all."""
        for module in self.inner.modules():
            if is_fsdp(module):
                module.reshard()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trainable parameters."""
        return (parameter for parameter in self.inner.parameters() if self._trainable.get(id(parameter)))

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradients on this rank."""
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
        gradients = [local_tensor(gradient) for gradient in self.gradients()]
        if not gradients:
            return torch.tensor(True)
        # a rank may hold no element of a small parameter
        nonempty = [gradient for gradient in gradients if gradient.numel()]
        nonempty = nonempty or [torch.zeros(1, device=gradients[0].device)]
        norms = torch.stack([torch.linalg.vector_norm(gradient, ord=torch.inf) for gradient in nonempty])
        return norms.isfinite().all()

    def average_second_backward(self, comm: Communicator, step: Sized, number: int) -> None:
        """Average gradients again if a second backward pass added some that DDP has not reduced; a collective then.

        The gradients of the first pass are already equal on all ranks, so the average of the sum is the average of all.
        """
        if self._backward_passes is None or not self._backward_passes.need_average(comm, step, number):
            return
        if self._used is None:
            raise WrapError(
                f"step {number} had a second backward pass after one forward pass: DDP reduces only the first, and "
                "with unused_parameters='allow' ranks do not know which parameters have gradients on other ranks; add "
                "the losses and call backward() once"
            )
        with comm.collective("averaging the gradients of a second backward pass"):
            for gradient in self.gradients():
                dist.all_reduce(gradient.div_(comm.world.size), group=comm.group)

    def check_used(self, step: int, samples: Sequence[int], rank: int) -> bool:
        """Raise if the step left parameters unused; whether it had a backward pass, as far as that is watched."""
        if self._used is None or not self._used.any:
            return False
        if missing := self._used.missing():
            self.check_unchanged()  # the old tensor of a replaced parameter is unused: name that cause instead
            frozen = [name for name, p in self.inner.named_parameters() if name in missing and not p.requires_grad]
            if frozen:
                raise WrapError(f"parameter {frozen[0]!r} was frozen after run.wrap: freeze it before you wrap")
            raise WrapError(unused_message(self.inner, missing, step, samples, rank))
        return True

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` was part of the model when it was wrapped."""
        return id(parameter) in self._trainable

    def check_unchanged(self) -> None:
        """Raise if a parameter was replaced, added or unfrozen since the model was wrapped."""
        self.reshard()
        for name, parameter in self.inner.named_parameters():
            trainable = self._trainable.get(id(parameter))
            if trainable is None:
                raise WrapError(
                    f"parameter {name!r} was replaced or added after run.wrap, so its gradient is not averaged over "
                    "the ranks: change the model first, then wrap it, then build the optimizer"
                )
            if parameter.requires_grad and not trainable:
                raise WrapError(
                    f"parameter {name!r} was frozen when the model was wrapped and is trainable now, so its gradient "
                    "is not averaged over the ranks: unfreeze it before run.wrap; to train more parameters from some "
                    "epoch on, end this Run there and continue with another"
                )


def gradients_finite(comm: Communicator, operation: str, models: Sequence[WrappedModel]) -> bool:
    """Whether all gradients are finite on all ranks.

    Averaged gradients have the same bits on every rank, so only sharded ones need a collective.
    """
    finite = all(bool(model.all_finite()) for model in models)
    if any(model.sharded for model in models):
        finite = all(bool(part[0]) for part in comm.exchange(operation, [float(finite)]))
    return finite


def check_optimizer(optimizer: Optimizer, models: Sequence[WrappedModel]) -> None:
    """Raise if an optimizer has parameters that no wrapped model owns."""
    foreign = [
        (index, parameter)
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad and not any(model.owns(parameter) for model in models)
    ]
    if not foreign:
        return
    shown = ", ".join(f"{tuple(parameter.shape)} in group {index}" for index, parameter in foreign[:_SHOWN])
    kind = type(optimizer).__name__
    raise WrapError(
        f"{kind} has {len(foreign)} parameter(s) that no wrapped model owns: shape {shown}. If it was built before "
        f"run.wrap, build it after: {kind}(model.parameters(), ...). If they belong to another module, wrap that "
        "module too: its gradients are not averaged over the ranks"
    )


def refuse_direct_calls(inner: nn.Module, model: nn.Module, in_step: Callable[[], bool]) -> None:
    """Raise if the inner module is called directly in a training step: its gradients would not be averaged."""
    inside = [False]

    def enter(*_: object) -> None:
        inside[0] = True

    def leave(*_: object) -> None:
        inside[0] = False

    def check(called: nn.Module, *_: object) -> None:
        # a copy of the model, such as a target network, has this hook too, but no wrapper
        is_inner = called is inner and inner.training
        if is_inner and not inside[0] and torch.is_grad_enabled() and in_step():
            raise WrapError(
                f"{type(inner).__name__} was called without its wrapper in a training step (model.module(x)?), so its "
                "gradients would not be averaged over the ranks: call the model that run.wrap returned"
            )

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
    inner.register_forward_pre_hook(check)
